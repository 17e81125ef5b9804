"""A table that comes in as a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from tests.support.servers.server import Server, quote_name
from tests.support.stores.folders import give_to_database


def import_tablespace(
    server: Server, schema: str, source: str, target: str, *, on_the_way: Callable[[], None] = lambda: None
) -> None:
    """Replace what ``target`` holds by the file of ``source``, which has the same definition. ``on_the_way`` is called
    while it has no tablespace."""
    folder = server.datadir / schema
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"FLUSH TABLES {quote_name(schema, source)} FOR EXPORT")
        for suffix in ("ibd", "cfg"):
            shutil.copy(folder / f"{source}.{suffix}", server.base / f"import.{suffix}")
        cursor.execute("UNLOCK TABLES")
    server.execute(f"ALTER TABLE {quote_name(schema, target)} DISCARD TABLESPACE")
    on_the_way()
    for suffix in ("ibd", "cfg"):
        shutil.copy(server.base / f"import.{suffix}", folder / f"{target}.{suffix}")
        give_to_database(folder / f"{target}.{suffix}")
    server.execute(f"ALTER TABLE {quote_name(schema, target)} IMPORT TABLESPACE")
    (folder / f"{target}.cfg").unlink(missing_ok=True)
