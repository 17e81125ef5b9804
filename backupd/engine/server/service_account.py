"""The accounts that backupd uses on servers, that of the service and that of table restores: the statements that make
them, and making it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from backupd.engine.server.accounts import Grants, needs
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


STAGING = "backupd\\_restore\\_%"
"""The schemas that tables are restored into before they get their names, as a pattern of grants."""
_RESTORER = "backupd_restore@localhost"
_STAGED = "backupd_restore_1"
"""One of them."""
_RESTORING = (
    "CREATE",
    "DROP",
    "ALTER",
    "INDEX",
    "REFERENCES",
    "SELECT",
    "INSERT",
    "UPDATE",
    "DELETE",
    "TRIGGER",
    "LOCK TABLES",
)


def lacks_for_restores(grants: Grants) -> tuple[str, ...]:
    """What an account lacks that tables are restored with, as far as it can be told before anybody names tables."""
    return tuple(name for name in _RESTORING if not grants.allow(name, _STAGED))


def grant_for_restores(account: str) -> str:
    """The statement that lets an account (``user@host``) restore tables of every schema."""
    user, _, host = account.rpartition("@")
    return f"GRANT {', '.join(_RESTORING)} ON *.* TO '{user}'@'{host}';"


def account_for_restores() -> str:
    """The statements that make such an account."""
    return f"CREATE USER 'backupd_restore'@'localhost' IDENTIFIED BY '...'; {grant_for_restores(_RESTORER)}"
