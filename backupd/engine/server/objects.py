"""What a server holds, by kind and name, with digests of the definitions: so that two servers can be compared.

A digest, 16 hex digits, is of what SHOW CREATE prints, less what differs between a server and its copy though both
mean the same: the next AUTO_INCREMENT, folders of tables, whether an event runs and on which server. Texts are not
kept: they hold connection strings of FEDERATED, CONNECT and SPIDER.

Measured with MariaDB 10.11.19 and 5,000 tables of InnoDB on a loaded machine of 2 cores: see ``list_objects`` and
``digests``.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping

from backupd.engine.server.definitions import plain_session
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import SYSTEM_SCHEMAS
from backupd.model.errors import ServerError
from backupd.model.table import quote_name

TABLE, VIEW, SEQUENCE, TRIGGER, EVENT, USER = "table", "view", "sequence", "trigger", "event", "user"
ROUTINES = ("procedure", "function", "package", "package body")

Listing = Mapping[str, frozenset[str]]
"""Kind to names, each quoted with backticks: ```schema`.`name` ``, of a user ```name`.`host` ``. A kind that the
account may not look at is missing."""
Digests = Mapping[str, Mapping[str, str]]
"""Kind to name to digest; "" where only the name is known."""

_OUTSIDE = f"NOT IN ({', '.join(['%s'] * len(SYSTEM_SCHEMAS))})"
_TABLES = f"SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE FROM information_schema.TABLES WHERE TABLE_SCHEMA {_OUTSIDE}"  # noqa: S608 - of constants
_NAMES = {
    TRIGGER: "SELECT TRIGGER_SCHEMA, TRIGGER_NAME FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA",
    USER: "SELECT User, Host FROM mysql.user WHERE User",
}
_ROUTINES = f"SELECT ROUTINE_SCHEMA, ROUTINE_NAME, ROUTINE_TYPE FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA {_OUTSIDE}"  # noqa: S608, E501 - of constants
_KINDS = {"BASE TABLE": TABLE, "SYSTEM VERSIONED": TABLE, "VIEW": VIEW, "SEQUENCE": SEQUENCE}
_OLD_EVENT = (
    "body",
    "definer",
    "execute_at",
    "interval_value",
    "interval_field",
    "starts",
    "ends",
    "on_completion",
    "sql_mode",
    "comment",
    "time_zone",
    "character_set_client",
    "collation_connection",
    "db_collation",
)
_EVENT = (
    "EVENT_DEFINITION",
    "DEFINER",
    "EXECUTE_AT",
    "INTERVAL_VALUE",
    "INTERVAL_FIELD",
    "STARTS",
    "ENDS",
    "ON_COMPLETION",
    "SQL_MODE",
    "EVENT_COMMENT",
    "TIME_ZONE",
    "CHARACTER_SET_CLIENT",
    "COLLATION_CONNECTION",
    "DATABASE_COLLATION",
)
_LEFT_OUT = re.compile(r" ?(?:AUTO_INCREMENT=\d+|(?:DATA|INDEX) DIRECTORY ?= ?'(?:[^'\\]|''|\\.)*')")


def list_objects(session: Session) -> Listing:
    """Everything outside the system schemas, and the accounts. Opens no table: 5,000 of them take about 0.1 s. Raises
    ServerError when the server is gone."""
    found: dict[str, set[str]] = {}
    rows = session.permitted(_TABLES, *SYSTEM_SCHEMAS)
    if rows is not None:
        found |= {TABLE: set(), VIEW: set(), SEQUENCE: set()}
    for schema, name, said in rows or ():
        if str(said) in _KINDS:
            found[_KINDS[str(said)]].add(quote_name(str(schema), str(name)))
    for kind, question in {**_NAMES, EVENT: _event_question(session)}.items():
        rows = session.permitted(f"{question} {_OUTSIDE}", *SYSTEM_SCHEMAS)
        if rows is not None:
            found[kind] = {quote_name(str(schema), str(name)) for schema, name, *_ in rows}
    rows = session.permitted(_ROUTINES, *SYSTEM_SCHEMAS)
    for schema, name, said in rows or ():
        found.setdefault(str(said).lower(), set()).add(quote_name(str(schema), str(name)))
    if rows is not None:
        for kind in ROUTINES:
            found.setdefault(kind, set())
    return {kind: frozenset(names) for kind, names in found.items()}


def digests(session: Session, listed: Listing, *, seconds: float) -> Digests:
    """Of each object in ``listed``, tables last; "" for one that is gone, locked, may not be read, or was not reached
    within ``seconds``. Raises ServerError when the server is gone."""
    end = time.monotonic() + seconds
    found: dict[str, dict[str, str]] = {}
    with plain_session(session) as own:
        events = _events(own) if listed.get(EVENT) else {}
        for kind in sorted(listed, key=lambda kind: (kind == TABLE, kind)):
            found[kind] = {}
            for name in sorted(listed[kind]):
                if kind in (USER, EVENT):
                    found[kind][name] = events.get(name, "") if kind == EVENT else ""
                else:
                    found[kind][name] = _shown(own, kind, name) if time.monotonic() < end else ""
    return found


def digest_of(session: Session, kind: str, name: str) -> str:
    """Of one object, in a ``plain_session``; "" where it cannot be read. Raises ServerError when the server is gone."""
    if kind == EVENT:
        return _events(session).get(name, "")
    return "" if kind == USER else _shown(session, kind, name)


def settled(before: Digests, listed: Listing | None, after: Digests) -> Digests:
    """What is known of one moment. ``listed``: at that moment; None where no list is of just that moment, and then only
    what was the same before and after is known. A digest is kept where it is the same before and after."""
    if listed is None:
        return {
            kind: {name: digest for name, digest in names.items() if after[kind].get(name) == digest}
            for kind, names in before.items()
            if kind in after
        }
    return {
        kind: {name: _same(before.get(kind, {}).get(name, ""), after.get(kind, {}).get(name, "")) for name in names}
        for kind, names in listed.items()
    }


def _same(one: str, other: str) -> str:
    return one if one == other else ""


def _shown(session: Session, kind: str, name: str) -> str:
    try:
        rows = session.records(f"SHOW CREATE {kind.upper()} {name}")
    except ServerError:
        session.ping()
        return ""
    if not rows:
        return ""
    record = rows[0]
    text = next((str(value) for key, value in record.items() if _is_text(key) and value is not None), "")
    if not text:
        return ""
    rest = [
        f"{key}={value}"
        for key, value in sorted(record.items())
        if key.lower() in ("sql_mode", "character_set_client", "collation_connection", "database collation")
    ]
    return _digest(_LEFT_OUT.sub("", text) if kind in (TABLE, SEQUENCE) else text, *rest)


def _is_text(column: str) -> bool:
    return column.startswith("Create ") or column == "SQL Original Statement"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _event_question(session: Session) -> str:
    dialect = read_dialect(session)
    names = "db, name" if dialect.events.startswith("mysql.event") else "EVENT_SCHEMA, EVENT_NAME"
    return f"SELECT {names} FROM {dialect.events}"  # noqa: S608 - of our own table of statements


def _events(session: Session) -> dict[str, str]:
    """Digests by name. Whether an event runs is not part of it: in a copy, and on a replica, it does not."""
    dialect = read_dialect(session)
    old = dialect.events.startswith("mysql.event")
    names, columns = ("db, name", _OLD_EVENT) if old else ("EVENT_SCHEMA, EVENT_NAME", _EVENT)
    question = f"SELECT {names}, {', '.join(columns)} FROM {dialect.events} {_OUTSIDE}"  # noqa: S608 - of constants
    rows = session.permitted(question, *SYSTEM_SCHEMAS)
    return {quote_name(str(schema), str(name)): _digest(*map(_as_text, values)) for schema, name, *values in rows or ()}


def _as_text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else repr(value)
