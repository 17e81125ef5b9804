"""What an account would not even see: a server leaves it out of its lists, and nothing tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from backupd.engine.server.grants import Grants
from backupd.engine.sql.client import Session, is_denied
from backupd.model.errors import ServerError
from backupd.model.table import TableName, TablePattern

_OPEN_TO = {"views": "SHOW VIEW", "triggers": "TRIGGER", "events": "EVENT"}
_SHOWING_ROUTINES = ("EXECUTE", "CREATE ROUTINE", "ALTER ROUTINE", "SHOW CREATE ROUTINE")
_SHOWN = 10
_PROBE = "SELECT 1 FROM {table} LIMIT 0"


def hidden(grants: Grants, schema: str) -> Mapping[str, str]:
    """Kinds of objects of ``schema`` that the account may not see all of, each with what it lacks for that."""
    found = {
        what: f"no {privilege} privilege on *.*, nor on this schema"
        for what, privilege in _OPEN_TO.items()
        if not grants.allow(privilege, schema)
    }
    if not (
        grants.allow("SELECT")
        or grants.allow("SHOW_ROUTINE")
        or grants.allow("SELECT", "mysql", "proc")
        or any(grants.allow(privilege, schema) for privilege in _SHOWING_ROUTINES)
    ):
        found["routines"] = (
            "no privilege that shows those of others (SHOW_ROUTINE in MySQL, SELECT on mysql.proc in MariaDB)"
        )
    return found


def unseen(grants: Grants, include: Sequence[TablePattern]) -> Iterator[str]:
    """Sentences about those of ``include`` that ask for more than the account may see. A pattern that names one table
    is none of them: that it fits nothing is told anyway."""
    account = grants.account
    for schema in sorted(grants.revoked):
        if not grants.allow("SELECT", schema) and any(pattern.reaches(schema) for pattern in include):
            yield (
                f"{account} has no SELECT privilege on schema {schema} (it is revoked there): its tables cannot be "
                "dumped, and what it may not see of them is not even named"
            )
    if grants.allow("SELECT"):
        return
    may = sorted(pattern for pattern, _names in grants.schemas if grants.allow("SELECT", pattern.replace("\\", "")))
    readable = ", ".join(may[:_SHOWN]) + (f" and {len(may) - _SHOWN} more" if len(may) > _SHOWN else "")
    for pattern in include:
        if pattern.table is None and not grants.allow("SELECT", pattern.schema):
            yield (
                f"{account} has no SELECT privilege on *.*, and {pattern} asks for more than the schemas that it "
                f"may read ({readable or 'none'}): tables that it may not see are missing, and nothing names them"
            )


def unreadable(session: Session, grants: Grants, names: Iterable[TableName]) -> dict[TableName, str]:
    """Those of ``names`` that the account may not read, in words that name the privilege. Raises ServerError."""
    found = {}
    for name in names:
        if grants.allow("SELECT", name.schema, name.table):
            continue
        try:  # the server's word counts, not our reading of its grants
            session.query(_PROBE.format(table=name))
        except ServerError as error:
            if is_denied(error):
                found[name] = f"{grants.account} has no SELECT privilege on it"
            session.ping()
    return found
