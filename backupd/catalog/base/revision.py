"""Which form a catalog's tables have, asked without the library that changes it: importing that takes as long as many a
command."""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text

VERSION_TABLE = "backupd_version"
"""Not alembic's usual name: a PostgreSQL database may be shared with another program that uses alembic."""
WANTED = "0012"
"""The form that this program knows: the newest of ``alembic/versions``."""


def current(connection: Connection) -> str | None:
    """The revision of a catalog's tables; None before the first upgrade."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608  a constant
    return None if found is None else str(found)
