"""What the account that we use may do, read from SHOW GRANTS, and what it needs.

A role counts only while it is active: a granted role that is not a default role gives a service nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from backupd.engine.client import Session
from backupd.engine.dialect import Dialect

_GLOBAL = re.compile(r"GRANT (?P<names>.+?) ON (?P<object>\*\.\*|`(?:[^`]|``)*`\.\*) TO ", re.IGNORECASE)
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
    """``everywhere``: privileges on *.* that are active now; ``roles``: granted roles, active or not."""

    account: str
    everywhere: frozenset[str]
    roles: tuple[str, ...]

    def allow(self, privilege: str) -> bool:
        return _EVERYTHING in self.everywhere or _plain(privilege) in self.everywhere


def needs(dialect: Dialect, *, binlog: bool = False) -> tuple[Need, ...]:
    """What a physical backup, the probe and the witness need; with ``binlog`` also a stream of the binary log.

    mariadb-backup: RELOAD, PROCESS, LOCK TABLES, BINLOG MONITOR (its page "Authentication and Privileges");
    XtraBackup 8: BACKUP_ADMIN, PROCESS, RELOAD, LOCK TABLES, REPLICATION CLIENT (its page "Privileges
    needed"). Whoever reads a binary log over the wire needs REPLICATION SLAVE, and to list the logs what the tool
    needs for positions.
    """
    tool = "the physical backup tool stops without it"
    required = ["RELOAD", "PROCESS", "LOCK TABLES", dialect.monitor_privilege, dialect.backup_privilege]
    wanted = {
        "SELECT": "no witness can be read, so a restore is not proved equal, and engines in use stay unknown",
        "SHOW VIEW": "views are not counted, so a restore is not checked for them",
        "TRIGGER": "triggers are not counted, so a restore is not checked for them",
        "EVENT": "events are not counted, so a restore is not checked for them",
        dialect.replica_privilege: "a stopped replica is not recognised as one",
        dialect.binlog_session_privilege: "ALTER TABLE waits while a witness is read, for 60 s at most",
    }
    return (
        *(Need(name, tool, required=True) for name in required if name),
        *([Need("REPLICATION SLAVE", "the binary log cannot be streamed", required=True)] if binlog else []),
        *(Need(name, why, required=False) for name, why in wanted.items() if name and name not in required),
    )


def read_grants(session: Session) -> Grants:
    """Of the account that the session logged in as. Raises ServerError."""
    account = str(session.scalar("SELECT CURRENT_USER()"))
    lines = [str(row[0]) for row in session.query("SHOW GRANTS")]
    active = session.scalar("SELECT CURRENT_ROLE()") if _has_roles(session) else None
    if active not in (None, "NONE", "") and "mariadb" not in session.greeting.lower():
        # MySQL lists what roles give only when asked with USING; MariaDB lists it by itself.
        lines += [str(row[0]) for row in session.query(f"SHOW GRANTS FOR CURRENT_USER() USING {active}")]
    return parse_grants(account, lines)


def parse_grants(account: str, lines: Sequence[str]) -> Grants:
    """Read the lines of SHOW GRANTS; they hold password hashes, so they are not kept."""
    everywhere: set[str] = set()
    roles: list[str] = []
    for line in lines:
        found = _GLOBAL.match(line)
        if found and found["object"] == "*.*":
            everywhere |= {_plain(name) for name in found["names"].split(",")}
        elif (role := _ROLE.match(line)) and " ON " not in role["roles"]:
            roles += [name.strip() for name in role["roles"].split(",")]
    return Grants(account, frozenset(everywhere), tuple(roles))


def _has_roles(session: Session) -> bool:
    greeting = session.greeting.removeprefix("5.5.5-").lower()
    return "mariadb" in greeting or not greeting.startswith(("5.", "4."))


def _plain(privilege: str) -> str:
    name = " ".join(privilege.upper().replace("_", " ").split())
    return _SYNONYMS.get(name, name)
