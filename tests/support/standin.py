"""A stand-in for xtrabackup, for trouble that the real one cannot be talked into: it is no proof of how that behaves.

It speaks the command line of --backup and --prepare, replays a stream that was made for it and says what it was told
to say. What the real tool does is tested where it is named (see tests/unit/engine/physical/test_traps.py).

``make`` writes a program into a folder; that program runs this module as a script, with the folder's name first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_KNOBS, _STREAM, _ARGV, _OPTIONS, _LOGIN, _GO = ("knobs.json", "stream.xbs", "argv.json", "options.cnf", "login", "go")

_MODULE, _SYSTEMS = "standin.py", "/usr/bin/python3"
_KNOWN = (
    "--backup",
    "--no-version-check",
    "--ftwrl-wait-timeout",
    "--ftwrl-wait-threshold",
    "--ftwrl-wait-query-type",
    "--backup-lock-timeout",
    "--lock-ddl",
    "--lock-ddl-timeout",
)


@dataclass(frozen=True)
class Knobs:
    """``before`` and ``after``: lines on stderr before and after the stream; ``last``: the very last one, with a line
    end unless ``open_end``. ``cut``: bytes of the stream, None for all. ``wait_at``: after so many bytes wait until
    ``go`` is called. ``deaf``: ignore SIGINT and SIGTERM. ``lacks``: options that this build does not know.
    ``reached``: the number that prepare prints, None for one that is right, 0 for no such line."""

    version: str = "2.4.4"
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    last: str = "261121 02:03:35 completed OK!"
    open_end: bool = False
    exit_code: int = 0
    cut: int | None = None
    wait_at: int | None = None
    deaf: bool = False
    lacks: Sequence[str] = ()
    prepare_says: Sequence[str] = ()
    reached: int | None = None
    shutdown: str = "InnoDB: Shutdown completed; log sequence number {}"


@dataclass(frozen=True)
class StandIn:
    """``path``: the program."""

    folder: Path
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.folder / "xtrabackup")

    @property
    def arguments(self) -> list[str]:
        """Of its last backup."""
        return [str(word) for word in json.loads((self.folder / _ARGV).read_text())]

    @property
    def option_file(self) -> str:
        """What the option file of its last backup held."""
        return (self.folder / _OPTIONS).read_text()

    @property
    def login_file(self) -> Path:
        """Where its last backup would have looked for more credentials."""
        return Path((self.folder / _LOGIN).read_text())

    def go(self) -> None:
        (self.folder / _GO).touch()


def make(folder: Path, stream: bytes = b"", knobs: Knobs | None = None) -> StandIn:
    folder.mkdir()
    folder.chmod(0o777)  # what prepares is not root, and a stand-in notes how it was called
    shutil.copy(__file__, folder / _MODULE)
    python = _SYSTEMS if os.access(_SYSTEMS, os.X_OK) else sys.executable  # which others may run, too
    (folder / _STREAM).write_bytes(stream)
    (folder / _KNOBS).write_text(json.dumps(asdict(knobs or Knobs())))
    made = StandIn(folder)
    made.path.write_text(f'#!/bin/sh\nexec {python} -S {folder / _MODULE} {folder} "$@"\n')
    made.path.chmod(0o755)
    return made


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _option(arguments: Sequence[str], name: str) -> str:
    return next((word.partition("=")[2] for word in arguments if word.startswith(f"{name}=")), "")


def _backup(folder: Path, knobs: Knobs, arguments: Sequence[str]) -> None:
    (folder / _ARGV).write_text(json.dumps(arguments))
    shutil.copyfile(_option(arguments, "--defaults-file"), folder / _OPTIONS)
    (folder / _LOGIN).write_text(os.environ.get("MYSQL_TEST_LOGIN_FILE", "~/.mylogin.cnf"))
    _say(*knobs.before)
    stream = (folder / _STREAM).read_bytes()[: knobs.cut]
    first = len(stream) if knobs.wait_at is None else knobs.wait_at
    sys.stdout.buffer.write(stream[:first])
    sys.stdout.buffer.flush()
    while first < len(stream) and not (folder / _GO).exists():
        time.sleep(0.01)
    sys.stdout.buffer.write(stream[first:])
    sys.stdout.buffer.flush()
    _say(*knobs.after)


def _prepare(knobs: Knobs, arguments: Sequence[str]) -> None:
    base = Path(_option(arguments, "--target-dir"))
    increment = _option(arguments, "--incremental-dir")
    receipt = base / "xtrabackup_checkpoints"
    values = dict(line.split(" = ") for line in receipt.read_text().splitlines())
    if increment:
        source = Path(increment)
        newer = dict(line.split(" = ") for line in (source / receipt.name).read_text().splitlines())
        values |= {"to_lsn": newer["to_lsn"], "last_lsn": newer["last_lsn"]}
        for name in ("xtrabackup_binlog_info", "xtrabackup_info"):
            shutil.copyfile(source / name, base / name)
    values["backup_type"] = "log-applied" if "--apply-log-only" in arguments else "full-prepared"
    receipt.write_text("".join(f"{name} = {value}\n" for name, value in values.items()))
    _say("xtrabackup: This target seems to be not prepared yet.", *knobs.prepare_says)
    _say(knobs.shutdown.format(100), "InnoDB: Number of pools: 1")  # of an earlier start in the same run
    if knobs.reached != 0:
        _say(knobs.shutdown.format(int(values["last_lsn"]) + 9 if knobs.reached is None else knobs.reached))


def main(arguments: Sequence[str]) -> int:
    folder, words = Path(arguments[0]), arguments[1:]
    knobs = Knobs(**json.loads((folder / _KNOBS).read_text()))
    if "--version" in words:
        _say(f"xtrabackup version {knobs.version} based on MySQL server 5.7.13 Linux (x86_64) (revision id: )")
        return 0 if os.access(folder, os.W_OK) else 1  # in a sandbox it could note nothing: it is not for one
    if "--help" in words:
        known = (f"  {name}=#  A text in which --words occur." for name in _KNOWN if name not in knobs.lacks)
        print("Usage: xtrabackup [--defaults-file=#] [OPTIONS]", "  -?, --help  Display this.", *known, sep="\n")
        return 0
    if knobs.deaf:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--backup" in words:
        _backup(folder, knobs, words)
    else:
        _prepare(knobs, words)
    print(knobs.last, file=sys.stderr, end="" if knobs.open_end else "\n", flush=True)
    return knobs.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
