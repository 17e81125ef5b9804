"""Bringing a catalog's tables to the form that this program knows. The steps are in ``alembic/versions``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from backupd.catalog.database import VERSION_TABLE, Database, current
from backupd.model.errors import CatalogError

_LOCK = 0x6261636B757064
"""Key of the advisory lock that upgrades of one PostgreSQL database share: the letters ``backupd``."""


def scripts() -> Path:
    """The folder of the migrations: inside the package when installed from a wheel, else beside it in the tree."""
    package = Path(__file__).parent
    for folder in (package / "alembic_scripts", package.parents[1] / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise CatalogError(
        "the catalog's migrations are missing from this installation", hint="install the package backupd again"
    )


def configuration() -> Config:
    """What alembic needs to find the migrations; the caller adds the connection."""
    config = Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def head() -> str:
    """The revision that this program knows and wants."""
    revision = ScriptDirectory.from_config(configuration()).get_current_head()
    if revision is None:
        raise CatalogError("the catalog's migrations are empty", hint="install the package backupd again")
    return revision


def bring_up_to_date(database: Database, tables: Collection[str]) -> tuple[str | None, str]:
    """Upgrade where needed; gives the revision before and after. ``tables``: the names of all that a catalog has.

    The whole upgrade is one transaction behind one lock, so a kill leaves the old form, and of two processes the
    second finds the work done. Raises CatalogError: a newer catalog, a database of another program, or a failure.
    """
    wanted = head()
    with database.read() as connection:
        found = current(connection)
    if found == wanted:
        return found, wanted
    with database.write() as connection, database.unhurried(connection):
        if not database.sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        found = current(connection)
        if found != wanted:
            _refuse_strangers(database, connection, found, tables)
            config = configuration()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    return found, wanted


def _refuse_strangers(database: Database, connection: Connection, found: str | None, ours: Collection[str]) -> None:
    if found is not None:
        known = {script.revision for script in ScriptDirectory.from_config(configuration()).walk_revisions()}
        if found not in known:
            raise CatalogError(
                f"the catalog {database.name} is newer than this program",
                detail=f"its schema version is {found}; this program supports up to {head()}",
                hint="run the version of backupd that upgraded it, or a newer one; to go back, move "
                "the catalog away (keep it) and run `backupd catalog rebuild --from DESTINATION`, which creates a new "
                "one from the backups stored there",
            )
        return
    tables = set(inspect(connection).get_table_names())
    if strange := sorted(tables if database.sqlite else tables.intersection(ours)):
        raise CatalogError(
            f"{database.name} is the database of another program",
            detail=f"it has the tables {', '.join(strange[:8])} but no {VERSION_TABLE}",
            hint="give the catalog a file or a PostgreSQL database of its own",
        )
