"""Privileges of the account that backupd uses: what it may do (SHOW GRANTS), what it needs, and what it would not even
see, because a server leaves that out of its lists without a word.

A role counts only while it is active: a granted role that is not a default role gives a service nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.engine.sql.dialect import Dialect
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName, TablePattern

_GRANT = re.compile(
    r"(?P<verb>GRANT|REVOKE) (?P<names>.+?) ON (?:\*\.\*|`(?P<schema>(?:[^`]|``)*)`\.(?:\*|`(?P<table>(?:[^`]|``)*)`))"
    r" (?:TO|FROM) ",
    re.IGNORECASE,
)
_OF_COLUMNS = re.compile(r"[\w ]+\([^)]*\)")
_LIKE = re.compile(r"\\(.)|(%)|(_)|(.)", re.DOTALL)
_NO_GRANT_TABLES = 1290
_ROLE = re.compile(r"GRANT (?P<roles>[`'\"].+?) TO ", re.IGNORECASE)

_SYNONYMS = {
    "BINLOG MONITOR": "REPLICATION CLIENT",
    "REPLICA MONITOR": "SLAVE MONITOR",
    "REPLICATION REPLICA": "REPLICATION SLAVE",
}
_EVERYTHING = "ALL PRIVILEGES"


@dataclass(frozen=True, slots=True)
class Need:
    """A privilege on ``*.*``; ``required`` for taking a backup at all, else ``purpose`` says what is lost."""

    privilege: str
    purpose: str
    required: bool


@dataclass(frozen=True, slots=True)
class Grants:
    """``everywhere``: privileges on *.* that are active now; ``roles``: granted roles, active or not. ``schemas``:
    privileges by pattern of schemas, as LIKE has them; ``tables``: by schema and table; ``revoked``: those on *.* that
    do not hold in a schema."""

    account: str
    everywhere: frozenset[str]
    roles: tuple[str, ...]
    schemas: tuple[tuple[str, frozenset[str]], ...] = ()
    tables: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    revoked: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def allow(self, privilege: str, schema: str = "", table: str = "") -> bool:
        """On *.*; with ``schema`` (which may have ``*`` in it) on all of it, with ``table`` on that one."""
        wanted = _plain(privilege)
        if wanted not in self.revoked.get(schema, ()) and _holds(self.everywhere, wanted):
            return True
        if any(_holds(names, wanted) and _is_like(schema, pattern) for pattern, names in self.schemas):
            return True
        return _holds(self.tables.get((schema, table), frozenset()), wanted)


def needs(dialect: Dialect, *, binlog: bool = False, physical: bool = True, rocksdb: bool = False) -> tuple[Need, ...]:
    """What a backup, the probe and the witness need; with ``binlog`` also a stream of the binary log. ``physical``
    False: only dumps are taken. ``rocksdb``: is that engine loaded?

    mariadb-backup: RELOAD, PROCESS, LOCK TABLES, BINLOG MONITOR (its page "Authentication and Privileges");
    XtraBackup 8: BACKUP_ADMIN, PROCESS, RELOAD, LOCK TABLES, REPLICATION CLIENT (its page "Privileges
    needed"). Whoever reads a binary log over the wire needs REPLICATION SLAVE, and to list the logs what the tool
    needs for positions.
    """
    tool = "the physical backup tool stops without it"
    required = dict.fromkeys(
        ("RELOAD", "PROCESS", "LOCK TABLES", dialect.monitor_privilege, dialect.backup_privilege), tool
    )
    if not physical:
        required = {
            "RELOAD": "a dump cannot block commits for the moment in which it begins, so every dump fails",
            "PROCESS": "the server's tablespaces and running statements cannot be read, so every dump fails",
            dialect.monitor_privilege: "the position in the binary log cannot be read, so every dump fails",
        }
    elif rocksdb and dialect.flavour is Flavour.MARIADB:
        required["SUPER"] = (
            "the engine ROCKSDB is loaded, of which the physical backup tool makes a checkpoint (SET "
            "GLOBAL rocksdb_create_checkpoint): every physical backup fails without it"
        )
    wanted = {
        "SELECT": "no witness can be read, so a restore is not proved equal, and engines in use stay unknown",
        "SHOW VIEW": "views are not counted, so a restore is not checked for them",
        "TRIGGER": "triggers are not counted, so a restore is not checked for them",
        "EVENT": "events are not counted, so a restore is not checked for them",
        dialect.replica_privilege: "a stopped replica is not recognised as one",
        dialect.binlog_session_privilege: "ALTER TABLE waits while a witness is read, for 60 s at most",
    }
    return (
        *(Need(name, why, required=True) for name, why in required.items() if name),
        *([Need("REPLICATION SLAVE", "the binary log cannot be streamed", required=True)] if binlog else []),
        *(Need(name, why, required=False) for name, why in wanted.items() if name and name not in required),
    )


def read_grants(session: Session) -> Grants:
    """Of the account that the session logged in as. Raises ServerError."""
    account = str(session.scalar("SELECT CURRENT_USER()"))
    try:
        lines = [str(row[0]) for row in session.query("SHOW GRANTS")]
    except ServerError as error:
        if error_code(error) != _NO_GRANT_TABLES:
            raise
        return Grants(account, frozenset({_EVERYTHING}), ())  # everybody may do everything there
    active = session.scalar("SELECT CURRENT_ROLE()") if _has_roles(session) else None
    if active not in (None, "NONE", "") and "mariadb" not in session.greeting.lower():
        # MySQL lists what roles give only when asked with USING; MariaDB lists it by itself.
        lines += [str(row[0]) for row in session.query(f"SHOW GRANTS FOR CURRENT_USER() USING {active}")]
    return parse_grants(account, lines)


def parse_grants(account: str, lines: Sequence[str]) -> Grants:
    """Read the lines of SHOW GRANTS; they hold password hashes, so they are not kept."""
    everywhere: set[str] = set()
    schemas: list[tuple[str, frozenset[str]]] = []
    tables: dict[tuple[str, str], frozenset[str]] = {}
    revoked: dict[str, frozenset[str]] = {}
    roles: list[str] = []
    for line in lines:
        if found := _GRANT.match(line):
            names = frozenset(_plain(name) for name in _OF_COLUMNS.sub("", found["names"]).split(",")) - {""}
            schema, table = ((half or "").replace("``", "`") for half in (found["schema"], found["table"]))
            if found["verb"].upper() == "REVOKE":
                revoked[schema] = revoked.get(schema, frozenset()) | names
            elif not schema:
                everywhere |= names
            elif not table:
                schemas.append((schema, names))
            else:
                tables[schema, table] = tables.get((schema, table), frozenset()) | names
        elif (role := _ROLE.match(line)) and " ON " not in role["roles"]:
            roles += [name.strip() for name in role["roles"].split(",")]
    return Grants(account, frozenset(everywhere), tuple(roles), tuple(schemas), tables, revoked)


def _has_roles(session: Session) -> bool:
    greeting = session.greeting.removeprefix("5.5.5-").lower()
    return "mariadb" in greeting or not greeting.startswith(("5.", "4."))


def _holds(names: frozenset[str], wanted: str) -> bool:
    return _EVERYTHING in names or wanted in names


def _is_like(schema: str, pattern: str) -> bool:
    """``*`` in ``schema`` stands for any text, which one character of ``pattern`` is not enough for."""
    parts = (
        re.escape(escaped or plain) if escaped or plain else ".*" if anything else "[^*]"
        for escaped, anything, _one, plain in _LIKE.findall(pattern)
    )
    return re.fullmatch("".join(parts), schema, re.DOTALL) is not None


def _plain(privilege: str) -> str:
    name = " ".join(privilege.upper().replace("_", " ").split())
    return _SYNONYMS.get(name, name)


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
