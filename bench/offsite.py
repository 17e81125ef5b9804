"""Physical backup to object storage and restore from there, against the pipe that a careful administrator would type.

Part of ``make bench``. A real S3 server on this machine. The yardstick of a backup is the stream of mariadb-backup,
``zstd | gpg | aws s3 cp -``, that of a restore ``aws s3 cp | gpg -d | zstd -d | mbstream -x``, prepare, start;
alternating, medians. What is sent for a second backup of which nothing changed is counted by the loopback device's own
counters.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from backupd.model.text import format_size, parse_size
from bench.house import SOURCE, House
from bench.measure import Run, Series, compared, table, timed
from tests.support.keys import Keys, operator_keys
from tests.support.sample import create
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import Server
from tests.support.stores.folders import short_directory
from tests.support.stores.s3_server import S3Server

SIZE, ROUNDS = parse_size("2GiB"), 2
MEMORY = parse_size("200MiB")
_AWS = "/usr/bin/aws"
_PLACE = "s3://pipe/full.xb.zst.gpg"


class Bench(House):
    """And the pipe."""

    def __init__(self, base: Path, server: Server, keys: Keys, store: S3Server) -> None:
        super().__init__(base, server, keys, destination=store.bucket("bench"))
        self.store = store
        store.bucket("pipe")
        self._aws = (
            f"env AWS_SHARED_CREDENTIALS_FILE={shlex.quote(str(store.credentials_file))} "
            f"AWS_DEFAULT_REGION=eu-central-1 {_AWS} --endpoint-url {store.endpoint} s3 cp --quiet"
        )

    def pipe_backup(self) -> Run:
        shutil.rmtree(self.base / "tool", ignore_errors=True)
        script = (
            f"mariadb-backup --defaults-file={shlex.quote(str(self.server.client_file()))} --backup "
            f"--stream=xbstream --target-dir={self.base}/tool --socket={self.server.socket} 2>{self.base}/tool.log"
            f" | {self.seal(3, 1)} | {self._aws} - {_PLACE}"
        )
        return timed(["bash", "-o", "pipefail", "-c", script])

    def pipe_restore(self) -> Run:
        return self.restore_by_hand(f"{self._aws} {_PLACE} - | {self.unseal('-')}")

    def fresh_repository(self) -> None:
        """An empty bucket, and a catalog that knows nothing."""
        for path in (self.store.folder / "bench").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        super().fresh_repository()


def sent() -> int:
    """Bytes that went over the loopback device so far; each is both sent and received there."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.lstrip().startswith("lo:"))
    return int(line.split(":", 1)[1].split()[0])


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    pipe, first, second, pipe_back, back = (Series() for _ in range(5))
    share = 0.0
    for _ in range(rounds):
        pipe.runs.append(bench.pipe_backup())
        bench.fresh_repository()
        before = sent()
        first.runs.append(bench.backupd("backup", SOURCE, "--kind", "full"))
        whole, before = sent() - before, sent()
        second.runs.append(bench.backupd("backup", SOURCE, "--kind", "full"))
        share = max(share, (sent() - before) / whole)
        pipe_back.runs.append(bench.pipe_restore())
        run, _outcome = bench.restore_whole("latest")
        back.runs.append(run)
    peak = max(series.peak for series in (first, second, back))
    return [
        compared("physical full to S3, against `zstd \\| gpg \\| aws s3 cp -`", first, pipe, None),
        compared("nothing changed, against the same", second, pipe, None),
        {
            "work": "bytes over the network for the unchanged backup",
            "ours": f"{share:.2%}",
            "yardstick": "of the first",
            "ratio": round(share, 4),
            "goal": 0.02,
        },
        compared("restore from S3 to a started server, its CHECK TABLE included", back, pipe_back, None),
        {
            "work": "peak memory of backupd",
            "ours": format_size(peak),
            "yardstick": "200 MiB",
            "ratio": round(peak / MEMORY, 2),
            "goal": 1.0,
        },
    ]


def main(size: int = SIZE, rounds: int = ROUNDS) -> str:
    with operator_keys() as keys, short_directory("bench-") as base, S3Server() as store:
        base.chmod(0o755)
        with PrivateServer(binlog=False) as server:
            create(server, size)
            server.restart()
            rows = measure(Bench(base, server, keys, store), rounds)
    about = f"{format_size(size)} of sample data; a real S3 server on the same {os.cpu_count()} cores."
    runs = "\n".join(
        f"- {row['work']}: backupd {row['runs']['ours']}, yardstick {row['runs']['yardstick']}"
        for row in rows
        if "runs" in row
    )
    print(json.dumps({"size": size, "rounds": rounds, "rows": rows}))
    return f"{about}\n\n{table(rows)}\n\n{runs}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=SIZE, help="at least 2GiB to count")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(main(options.size, options.rounds))
