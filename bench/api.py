"""The REST interface while a backup runs: two hundred clients, each asking once a second on a connection that it keeps,
half of them over IPv6. Milliseconds until an answer.

Part of ``make bench``. The second row is the same crowd beside nothing, the third one a crowd that asks as fast as it
is answered.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backupd.app.context.access import command_line, create_token
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.service.api_process import ApiWatch
from backupd.catalog.session import open_catalog
from backupd.model.access import Role
from backupd.model.text import format_size
from bench.house import SOURCE, House
from tests.support.crowd import Crowd, ask
from tests.support.keys import operator_keys
from tests.support.sample import create
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.serving import free_port
from tests.support.stores.folders import make_short_directory

SIZE = 2**30
SECONDS = 30.0
PATHS = (
    "/v1/backups",
    "/v1/servers",
    f"/v1/servers/{SOURCE}",
    f"/v1/servers/{SOURCE}/timeline",
    "/v1/jobs",
    "/v1/whoami",
    "/v1/destinations",
    "/healthz",
)


def main(size: int = SIZE, seconds: float = SECONDS) -> str:
    """The table as Markdown."""
    base = make_short_directory("bench-api-")
    base.chmod(0o755)
    try:
        with operator_keys() as keys, PrivateServer(binlog=False) as server:
            create(server, size)
            house = House(base, server, keys)
            rows = _measured(house, seconds)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    lines = [
        f"| {name} | {len(crowd.latencies) / seconds:.0f} | {crowd.quantile(0.5) * 1000:.1f} | "
        f"{crowd.quantile(0.99) * 1000:.1f} | {max(crowd.latencies) * 1000:.0f} | {len(crowd.errors)} |"
        for name, crowd in rows.items()
    ]
    return "\n".join(
        [
            f"### 200 clients of the REST interface ({format_size(size)} of data)",
            "",
            "| beside | answers/s | p50 ms | p99 ms | longest ms | errors |",
            "|---|---:|---:|---:|---:|---:|",
            *lines,
        ]
    )


def _measured(house: House, seconds: float) -> dict[str, Crowd]:
    port = free_port()
    with house.config.open("a") as file:
        file.write(f'api: {{listen: "[::]:{port}"}}\n')
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog, ApiWatch(Wiring(settings, catalog)) as watch:
        _token, secret = create_token(Wiring(settings, catalog), command_line(), "bench", Role.VIEWER)
        while watch.running() is None:
            time.sleep(0.05)
        ask(port, secret, PATHS, seconds=2)
        with _backups(house):
            beside = ask(port, secret, PATHS, seconds=seconds)
        return {
            "a running backup": beside,
            "nothing": ask(port, secret, PATHS, seconds=seconds),
            "nothing, as fast as it goes": ask(port, secret, PATHS, seconds=seconds / 3, every=0.0),
        }


@contextmanager
def _backups(house: House) -> Iterator[None]:
    """One full backup after the other, until the block ends."""
    over = threading.Event()
    log = Path(house.base / "backups.log")

    def run() -> None:
        with log.open("ab") as sink:
            while not over.is_set():
                subprocess.run(house.command("backup", SOURCE, "--kind", "full"), stdout=sink, stderr=sink, check=True)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    print(main())
