"""The account that backupd uses on a server: the statements that make it, and making it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from backupd.engine.server.accounts import needs
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.server_facts import Version

NAME, HOST = "backupd", "localhost"
ACCOUNT = f"{NAME}@{HOST}"
UNSAID = "..."
"""What stands for the password in statements that people read."""
_OF_EVERY_KIND = "-Aa1"
"""What policies for passwords ask for, whatever else was drawn."""


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """``privileges``: on every table; ``plugins``: also those that let it load the plugin of CLONE for each backup."""

    privileges: tuple[str, ...]
    plugins: bool

    def statements(self, password: str = UNSAID) -> tuple[str, ...]:
        """Without semicolons, in their order."""
        return (
            f"CREATE USER {ACCOUNT} IDENTIFIED BY '{password}'",
            f"GRANT {', '.join(self.privileges)} ON *.* TO {ACCOUNT}",
            *([f"GRANT INSERT, DELETE ON mysql.plugin TO {ACCOUNT}"] if self.plugins else []),
        )

    def make(self, session: Session, password: str) -> None:
        """Nobody quotes these statements, in an error neither. A part of them is undone. Raises ServerError."""
        create, *grants = self.statements(password)
        session.send(create.encode())
        try:
            for grant in grants:
                session.send(grant.encode())
        except BaseException:
            drop(session)
            raise


def account_for(dialect: Dialect, *, rocksdb: bool = False, clones: bool = False) -> ServiceAccount:
    """Whatever a policy of this server may ask for. ``rocksdb``: is that engine loaded? ``clones``: are physical
    backups taken by CLONE?"""
    wanted = [need.privilege for need in needs(dialect, binlog=True, rocksdb=rocksdb)]
    return ServiceAccount(tuple(dict.fromkeys([*wanted, *filter(None, [dialect.xa_privilege])])), clones)


def dialect_of_greeting(version: str) -> Dialect:
    """That of a server which greets with ``version``; a Percona Server greets as a MySQL does, and gives accounts the
    same. Raises ValueError."""
    from backupd.engine.server.probe import flavour_of

    return dialect_of(flavour_of(version, ""), Version.parse(version))


def new_password() -> str:
    """Nothing in it has to be quoted in SQL or in an option file."""
    return secrets.token_urlsafe(24) + _OF_EVERY_KIND


def is_there(session: Session) -> bool:
    """Does the server have the account? Raises ServerError."""
    found: Sequence[object] = session.query("SELECT 1 FROM mysql.user WHERE User = %s AND Host = %s", NAME, HOST)
    return bool(found)


def drop(session: Session) -> None:
    """Raises ServerError."""
    session.execute(f"DROP USER {ACCOUNT}")
