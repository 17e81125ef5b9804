"""Private MariaDB servers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.support.servers.datadir import find_program, initialise
from tests.support.servers.server import (
    BACKUP_PASSWORD,
    BACKUP_USER,
    SERVICE_PASSWORD,
    SERVICE_USER,
    Server,
    connect,
    option_text,
    query,
    quote_name,
)

__all__ = [
    "BACKUP_PASSWORD", "BACKUP_USER", "SERVICE_PASSWORD", "SERVICE_PRIVILEGES", "SERVICE_USER", "TOOL_PRIVILEGES",
    "PrivateServer", "connect", "option_text", "query", "quote_name",
]  # fmt: skip

TOOL_PRIVILEGES = ("RELOAD", "PROCESS", "LOCK TABLES", "BINLOG MONITOR")
"""What mariadb-backup itself asks for on *.* (its page "Authentication and Privileges")."""
SERVICE_PRIVILEGES = (
    *TOOL_PRIVILEGES, "SELECT", "SHOW VIEW", "EVENT", "TRIGGER", "SLAVE MONITOR", "BINLOG ADMIN",
    "REPLICATION SLAVE",
)  # fmt: skip
"""The tool's, and what probe, census, witness and stream read."""


class PrivateServer(Server):
    """One MariaDB server of this machine."""

    sequences = True

    def program(self) -> str:
        return find_program("mariadbd")

    def make_datadir(self) -> None:
        initialise(self.datadir, self.options)

    def flavour_settings(self, *, binlog: bool) -> dict[str, str | int | None]:
        settings: dict[str, str | int | None] = {"innodb_log_file_size": "64M"}
        if binlog:
            settings |= {
                "log_bin": "binlog",
                "log_bin_index": "binlog.index",
                "binlog_format": "ROW",
                "sync_binlog": 1,
                "gtid_domain_id": 0,
                "gtid_strict_mode": 1,
                "log_slave_updates": 1,
                "relay_log": "relay",
            }
        return settings

    def create_user(self, user: str, password: str, privileges: Sequence[str]) -> None:
        self.query(f"CREATE OR REPLACE USER {quote_name(user)}@localhost IDENTIFIED BY %s", (password,))
        self.execute(f"GRANT {', '.join(privileges) or 'USAGE'} ON *.* TO {quote_name(user)}@localhost")

    def create_backup_users(self) -> None:
        self.create_user(BACKUP_USER, BACKUP_PASSWORD, TOOL_PRIVILEGES)
        self.create_user(SERVICE_USER, SERVICE_PASSWORD, SERVICE_PRIVILEGES)

    def settle(self, timeout: float = 300.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            status = {
                name: int(value)
                for name, value in self.query(
                    "SHOW GLOBAL STATUS WHERE Variable_name IN "
                    "('Innodb_buffer_pool_pages_dirty', 'Innodb_history_list_length')"
                )
            }
            if not any(status.values()):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not settled after {timeout} s: {status}")
            if not status["Innodb_history_list_length"]:
                # The page cleaner alone stops at some hundred pages once the server is idle.
                self.execute("SET GLOBAL innodb_log_checkpoint_now = 1")
            time.sleep(0.02)
