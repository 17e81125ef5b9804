"""Checks of tables. MySQL knows the name of one only once per schema, as of a foreign key; MariaDB once per table."""

from __future__ import annotations

from backupd.engine.schema.definition_text import tokens
from backupd.engine.sql.client import Session
from backupd.model.table import TableName


def check_names(session: Session, table: TableName) -> tuple[str, ...]:
    """Raises ServerError."""
    return tuple(
        str(row[0])
        for row in session.query(
            "SELECT CONSTRAINT_NAME FROM information_schema.TABLE_CONSTRAINTS WHERE CONSTRAINT_TYPE = 'CHECK' "
            "AND TABLE_SCHEMA = %s AND TABLE_NAME = %s",
            table.schema,
            table.table,
        )
    )


def schema_checks(session: Session, schema: str) -> dict[str, str]:
    """The table that has each, by the check's name in lower case. Raises ServerError."""
    rows = session.query(
        "SELECT CONSTRAINT_NAME, TABLE_NAME FROM information_schema.TABLE_CONSTRAINTS "
        "WHERE CONSTRAINT_TYPE = 'CHECK' AND TABLE_SCHEMA = %s",
        schema,
    )
    return {str(name).lower(): str(table) for name, table in rows}


def check_clauses(create: str) -> tuple[tuple[str, str], ...]:
    """Name and clause of each named check of a CREATE TABLE as printed."""
    found = list(tokens(create))
    checks = []
    for at, token in enumerate(found[:-3]):
        if token.word != "CONSTRAINT" or found[at + 1].kind != "name" or found[at + 2].word != "CHECK":
            continue
        depth, end = 0, at + 3
        while True:
            if found[end].kind == "mark":
                depth += (found[end].text == "(") - (found[end].text == ")")
            if depth == 0:
                break
            end += 1
        enforced = [token.word for token in found[end + 1 : end + 3]] != ["NOT", "ENFORCED"]
        text = create[token.start : found[end].end]
        checks.append((found[at + 1].plain, text if enforced else f"{text} NOT ENFORCED"))
    return tuple(checks)
