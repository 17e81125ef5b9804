"""What alembic runs around each migration.

backupd hands over its own open connection and transaction. For developers `alembic -c alembic.ini -x url=... COMMAND`
works too.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from backupd.catalog.database import VERSION_TABLE, Database
from backupd.catalog.snapshot import every_table


def _migrate(connection: Connection) -> None:
    # transactional_ddl: SQLite can undo DDL, but alembic does not assume so.
    context.configure(
        connection=connection,
        target_metadata=every_table,
        version_table=VERSION_TABLE,
        transactional_ddl=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _migrate(given)
else:
    address = context.get_x_argument(as_dictionary=True).get("url")
    if not address:
        raise SystemExit("name the catalog: alembic -x url=sqlite:////PATH COMMAND")
    database = Database(address)
    with database.write() as own:
        _migrate(own)
    database.close()
