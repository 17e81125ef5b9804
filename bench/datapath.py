"""Where the processor time of a backup and of a restore goes: each stage of the data path alone, over the same real
backup, in MB of plaintext for each second of one core. It is processor time of this process and of the programs that it
starts, so a busy machine shows nearly the same as a quiet one. ``python -m bench.datapath --size 1GiB``
"""

from __future__ import annotations

import argparse
import hashlib
import io
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from backupd.engine.physical.capture import Data
from backupd.engine.physical.xbstream import demultiplex
from backupd.model.manifest import PART_SIZE
from backupd.model.text import format_size, parse_size
from backupd.transfer.records.encryption import Sealer, Unsealer
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys, operator_keys
from tests.support.sample import create
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import make_short_directory
from tests.support.stores.stock import START

SIZE = "1GiB"


def _processor() -> float:
    """Seconds, user and system, of this process and of the programs that it has waited for."""
    programs = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + programs.ru_utime + programs.ru_stime


def measure(base: Path, server: PrivateServer, keys: Keys) -> tuple[int, dict[str, float]]:
    """Bytes of plaintext, and the processor seconds of each stage over all of them."""
    seconds: dict[str, float] = {}
    stream = base / "stream"
    destination = FilesystemDestination("bench", base / "repository")
    destination.initialise(START)
    sealer = Sealer([keys.fingerprint], keys.public_home)
    unsealer = Unsealer(keys.secret_home)

    def stage(name: str, work: Callable[[], Any]) -> Any:
        before = _processor()
        made = work()
        seconds[name] = _processor() - before
        return made

    def captured() -> None:
        with stream.open("wb") as file:
            subprocess.run(
                [
                    "mariadb-backup",
                    f"--defaults-file={server.client_file()}",
                    "--backup",
                    "--stream=xbstream",
                    f"--target-dir={base / 'tool'}",
                    f"--socket={server.socket}",
                ],
                stdout=file,
                stderr=subprocess.DEVNULL,
                check=True,
            )

    def taken_apart() -> int:
        with stream.open("rb", buffering=0) as file:
            return sum(len(event.payload) for event in demultiplex(file) if isinstance(event, Data))

    stage("the tool writes its stream", captured)
    size = stage("the stream is taken apart", taken_apart)
    plain = stream.read_bytes()
    parts = [memoryview(plain)[start : start + PART_SIZE] for start in range(0, len(plain), PART_SIZE)]
    stage("SHA-256 of the plaintext", lambda: [hashlib.sha256(part).digest() for part in parts])
    packed = stage("zstd, level 1", lambda: [zstandard.ZstdCompressor(level=1).compress(part) for part in parts])
    sealed = stage("sealed: zstd and gpg", lambda: [sealer.seal(part) for part in parts])
    seconds["of that, gpg"] = seconds["sealed: zstd and gpg"] - seconds["zstd, level 1"]
    keyed = {hashlib.sha256(item).hexdigest(): item for item in sealed}
    stage(
        "stored in a folder, synced", lambda: [destination.put(f"objects/{k}", io.BytesIO(v)) for k, v in keyed.items()]
    )
    stage("read back", lambda: [destination.get(f"objects/{key}").read() for key in keyed])
    stage("SHA-256 of what is stored", lambda: [hashlib.sha256(item).digest() for item in sealed])
    stage("unsealed: gpg and zstd", lambda: [unsealer.unseal(item, limit=PART_SIZE) for item in sealed])
    stage("of that, zstd", lambda: [zstandard.ZstdDecompressor().decompress(frame) for frame in packed])
    return size, seconds


def main(size: int = parse_size(SIZE)) -> str:
    """The table, as Markdown."""
    base = make_short_directory("bench-")
    base.chmod(0o755)
    try:
        with operator_keys() as keys, PrivateServer(binlog=False) as server:
            create(server, size)
            server.restart()
            plain, seconds = measure(base, server, keys)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    lines = [f"| stage, over {format_size(plain)} | MB/s of one core | of SHA-256 |", "|---|---|---|"]
    yardstick = seconds["SHA-256 of the plaintext"]
    lines += [f"| {name} | {plain / 1e6 / spent:,.0f} | {spent / yardstick:.2f} |" for name, spent in seconds.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size(SIZE), help=f"default: {SIZE}")
    print(main(parser.parse_args().size))
