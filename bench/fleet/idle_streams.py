"""Streams of idle servers: memory and processor time of 40 of them together, beside a service that has forked their
processes; and the most memory of all processes, the service among them, while they begin.

One MariaDB stands for 40 servers, with a name for each: each stream has a connection, a spool and a server id of its
own. Memory is PSS, in which a page that several processes share counts once: their own pages, and their part of what
the fork server has imported.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.support.keys import operator_keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory

BACKUPD = str(Path(sys.executable).with_name("backupd"))
POLICY = """\
physical: {full: "0 0 1 1 *"}
destinations: {required: [local]}
retention: {local: {keep_fulls: 2}}
binlog: {stream: true}
"""
SETTLED, MEASURED = 180.0, 60.0
"""Seconds: from the last stream's start, and of what is measured then."""
BEGINNING = 60.0
"""Seconds from the service's start in which the most memory is looked for, once all stream."""


def main(servers: int, settled: float, measured: float) -> str:
    """A table of what was measured."""
    with short_directory() as base, operator_keys() as keys, PrivateServer() as server:
        server.create_backup_users()
        (base / "policies").mkdir()
        (base / "policies" / "idle.yaml").write_text(POLICY)
        names = "".join(
            f"  db{number:02}: {{socket: {server.socket}, defaults_file: {server.client_file()}, policy: idle}}\n"
            for number in range(servers)
        )
        config = base / "backupd.yaml"
        config.write_text(
            f"catalog: sqlite:///{base}/catalog.db\nspool: {base}/spool\npolicies: {base}/policies\n"
            f"servers:\n{names}destinations:\n  local: {{type: filesystem, path: {base}/repository}}\n"
            f"encryption: {{gnupg_home: {keys.public_home}, recipients: [{keys.user_id}]}}\n"
        )
        with (
            (base / "log").open("wb") as log,
            subprocess.Popen(
                [BACKUPD, "--config", str(config), "serve"],
                stderr=log,
                env={**os.environ, "BACKUPD_RUNTIME": str(base / "run")},
            ) as service,
        ):
            try:
                began = time.monotonic()
                peak = Peak(base)
                _streams(base, servers, began + 600, peak)
                all_stream = time.monotonic() - began
                while time.monotonic() < began + BEGINNING:
                    peak.look()
                    time.sleep(1)
                time.sleep(settled)
                streams = sorted(set(_streams(base, servers, time.monotonic() + 60)))
                before = {pid: _ticks(pid) for pid in streams}
                time.sleep(measured)
                seconds = sum(_ticks(pid) - before[pid] for pid in streams) / os.sysconf("SC_CLK_TCK")
                memory = [_memory(pid) for pid in streams]
            finally:
                service.send_signal(signal.SIGINT)
                service.wait(120)
    total = {key: sum(one[key] for one in memory) / 1024 for key in memory[0]}
    return "\n".join(
        [
            f"| {servers} idle streams, in {len(streams)} processes | together | each |",
            "|---|---|---|",
            *(f"| {key}, MiB | {value:.0f} | {value / servers:.1f} |" for key, value in total.items()),
            f"| % of a core | {seconds / measured * 100:.1f} | {seconds / measured * 100 / servers:.2f} |",
            f"| most PSS while they begin, MiB | {peak.mebibytes:.0f} | {peak.mebibytes / servers:.1f} |",
            f"| seconds until all stream | {all_stream:.0f} | |",
        ]
    )


class Peak:
    """The most memory (PSS) that all processes of the service in ``base`` took together at a look."""

    def __init__(self, base: Path) -> None:
        self._mark = f"BACKUPD_RUNTIME={base}/run".encode()
        self.mebibytes = 0.0

    def look(self) -> None:
        """How much is it now?"""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    total += _memory(int(folder.name))["PSS"]
        self.mebibytes = max(self.mebibytes, total / 1024)


def _streams(base: Path, servers: int, until: float, peak: Peak | None = None) -> list[int]:
    """Ids of their processes, once all stream."""
    while True:
        if peak is not None:
            peak.look()
        found = []
        for lock in (base / "spool" / "binlogs").glob("*/lock"):
            if (name := re.search(r'"owner": "([^"]+)"', lock.read_text())) and (lock.parent / "state.json").exists():
                found.append(int(name[1].split(" ")[-2]))
        if len(found) == servers:
            return found
        if time.monotonic() > until:
            raise TimeoutError(f"{len(found)} of {servers} streams: {(base / 'log').read_text()[-2000:]}")
        time.sleep(1)


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15])


def _memory(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    private = found["Private_Dirty"] + found["Private_Clean"]
    return {"PSS": found["Pss"], "private": private, "resident": found["Rss"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=40)
    parser.add_argument("--settled", type=float, default=SETTLED)
    parser.add_argument("--measured", type=float, default=MEASURED)
    chosen = parser.parse_args()
    print(main(chosen.servers, chosen.settled, chosen.measured))
