"""Physical backup and restore against the pipe that a careful administrator would type.

Measured in one run on one machine, alternating, medians: full backup, unchanged second backup, restore to a started
server, peak memory. Prints a table; ``--write FILE`` keeps it with the machine it was measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backupd.model.text import format_size, parse_size
from bench import api, logical, looking, offsite, onetable, replaying, solving, streaming, timeline
from bench.fleet import scheduling
from bench.house import House
from bench.measure import Run, Series, compared, table, timed
from tests.support.keys import operator_keys
from tests.support.sample import create
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import make_short_directory

LEVEL = 1
"""backupd's own default."""


class Bench(House):
    """And the pipe."""

    def pipe_backup(self, level: int, threads: int) -> Run:
        shutil.rmtree(self.base / "tool", ignore_errors=True)
        script = (
            f"mariadb-backup --defaults-file={shlex.quote(str(self.server.client_file()))} --backup "
            f"--stream=xbstream --target-dir={self.base}/tool --socket={self.server.socket} 2>{self.base}/tool.log"
            f" | {self.seal(level, threads)} > {self.base}/full.xb.zst.gpg && sync {self.base}/full.xb.zst.gpg"
        )
        return timed(["bash", "-o", "pipefail", "-c", script])

    def pipe_restore(self) -> Run:
        return self.restore_by_hand(self.unseal(f"{self.base}/full.xb.zst.gpg"))

    def our_restore(self) -> tuple[Run, Run]:
        """The whole restore, and the same without its phase ``verified`` (CHECK TABLE), which the pipe does not do."""
        run, outcome = self.restore_whole("latest")
        checks = sum(phase["seconds"] for phase in outcome["phases"] if phase["name"] == "verified")
        return run, replace(run, seconds=run.seconds - checks)


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    pipe, wide, same, first, second, pipe_back, whole, back = (Series() for _ in range(8))
    new_share = size_share = 0.0
    cores = os.cpu_count() or 1
    for _ in range(rounds):
        same.runs.append(bench.pipe_backup(LEVEL, cores))
        pipe.runs.append(bench.pipe_backup(3, 1))
        wide.runs.append(bench.pipe_backup(3, cores))
        stored_by_pipe = (bench.base / "full.xb.zst.gpg").stat().st_size
        bench.fresh_repository()
        first.runs.append(bench.backupd("backup", "bench", "--kind", "full"))
        again = bench.backupd("backup", "bench", "--kind", "full")
        second.runs.append(again)
        record = json.loads(again.stdout)
        size_share = record["bytes_stored"] / stored_by_pipe
        new_share = max(new_share, record["bytes_new"] / record["bytes_stored"])
        pipe_back.runs.append(bench.pipe_restore())
        for series, run in zip((whole, back), bench.our_restore(), strict=True):
            series.runs.append(run)
    peak = max(series.peak for series in (first, second, back))
    return [
        compared("physical full, against `zstd`", first, pipe, 1.10),
        compared("physical full, against `zstd -T0`", first, wide, 1.10),
        compared(f"physical full, against `zstd -{LEVEL} -T0`, our own level", first, same, None),
        {
            "work": f"its stored bytes (level {LEVEL}), against `zstd` (level 3)",
            "ours": f"{size_share:.0%}",
            "yardstick": "100%",
            "ratio": round(size_share, 2),
            "goal": None,
        },
        compared("nothing changed, against `zstd`", second, pipe, 1.0),
        compared("nothing changed, against `zstd -T0`", second, wide, 1.0),
        {
            "work": "new bytes of the unchanged backup",
            "ours": f"{new_share:.2%}",
            "yardstick": "of stored bytes",
            "ratio": round(new_share, 4),
            "goal": 0.02,
        },
        compared("restore to a started server", back, pipe_back, 1.0),
        compared("the same with our CHECK TABLE of everything", whole, pipe_back, None),
        {
            "work": "peak memory of backupd",
            "ours": format_size(peak),
            "yardstick": "200 MiB",
            "ratio": round(peak / parse_size("200MiB"), 2),
            "goal": 1.0,
        },
    ]


def machine() -> str:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{os.cpu_count()} cores ({cpu}), {format_size(memory)} memory, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size("2GiB"), help="at least 2GiB to count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="keep the result as this Markdown file")
    options = parser.parse_args()
    base = make_short_directory("bench-")
    base.chmod(0o755)
    try:
        with operator_keys() as keys, PrivateServer(binlog=False) as server:
            print(f"making {format_size(options.size)} of sample data", flush=True)
            create(server, options.size)
            server.restart()
            rows = measure(Bench(base, server, keys), options.rounds)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    others = (looking, solving, timeline, scheduling, streaming, replaying, api)
    small = options.size < logical.SIZE
    text = "\n\n".join(
        [
            table(rows),
            *(other.main() for other in others),
            logical.main(min(options.size, logical.SIZE), options.rounds),
            onetable.main(options.size if small else onetable.SIZE, options.rounds),
            offsite.main(options.size, options.rounds),
        ]
    )
    print(text)
    print(json.dumps({"size": options.size, "rounds": options.rounds, "machine": machine(), "rows": rows}))
    if options.write:
        options.write.write_text(
            "# Benchmarks\n\nMade by `make bench` (`bench/physical.py`): the same work by backupd and by the bare "
            "tools, alternating in one run.\nThe yardstick of a backup is "
            "`mariadb-backup --stream | zstd | gpg > file`: zstd with its defaults (level 3, one core), on all cores "
            "(`-T0`), and at\nthe level that backupd itself uses. That of a restore is "
            "`gpg -d | zstd -d | mbstream -x`, prepare, start.\n\n"
            f"{datetime.now(UTC):%Y-%m-%d}, {format_size(options.size)} of sample data, medians of {options.rounds} "
            f"rounds, page cache warm.\nMachine: {machine()}.\n\n{text}\n\nSingle runs, seconds:\n\n"
            + "\n".join(
                f"- {r['work']}: backupd {r['runs']['ours']}, yardstick {r['runs']['yardstick']}"
                for r in rows
                if "runs" in r
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
