"""The events of real servers, as they are sent: wherever their bytes are cut, broken or altered, what is stored is the
server's own file or its beginning, and reads the same to the server's own tool."""

from __future__ import annotations

import functools
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.engine.binlog.events import clear_flag
from backupd.engine.receiver.endings import DamagedDumpError, EndedError
from backupd.engine.receiver.packets import Packets
from backupd.model.errors import MisnamedError
from tests.support.logs.binlogs import FLAVOURS, real_logs, why_not
from tests.unit.engine.receiver.test_log_bytes import NAME, Memory, event, log_of, rotate
from tests.unit.engine.receiver.test_packets import cut, sent

BOTH = pytest.mark.parametrize(
    "flavour",
    [pytest.param(one, marks=pytest.mark.skipif(bool(why_not(one)), reason=why_not(one))) for one in FLAVOURS],
)
HARD = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
_LEAST, _TURN = 1_000, 1 << 16
"""Bytes of a buffer. What is in no file, and a format description, must fit."""


@functools.cache
def files(flavour: str) -> dict[str, bytes]:
    """Each as it goes over the wire."""
    return {name: clear_flag(log.path.read_bytes()) for name, log in real_logs(flavour).files.items()}


def events(file: bytes) -> Iterator[bytes]:
    at = 4
    while at < len(file):
        length = int.from_bytes(file[at + 9 : at + 13], "little")
        yield file[at : at + length]
        at += length


def dumped(file: bytes, dice: random.Random) -> bytes:
    """The dump of a file, with heartbeats between its events."""
    messages, size = [rotate()], 4
    for one in events(file):
        messages.append(one)
        size += len(one)
        if dice.random() < 0.2:
            messages.append(event(27, 0, NAME.encode(), following=size % 2**32))
    return b"".join(sent(b"\0" + message) for message in messages)


def received(chunks: Sequence[bytes], size: int = 1 << 19) -> tuple[bytes, bool]:
    """What is stored of it, and whether it was taken to its end."""
    sink, packets = Memory(), Packets(size)
    log = log_of(sink)
    try:
        for chunk in chunks:
            left = memoryview(chunk)
            while left:
                space = packets.space()
                count = min(len(space), len(left))
                space[:count] = left[:count]
                packets.came(count)
                left = left[count:]
                log.take(packets.pieces())
    except (DamagedDumpError, EndedError, MisnamedError):
        return sink.content, False
    assert list(sink.files) == [NAME]
    return sink.content, True


def decoded(tool: str, path: Path, folder: Path) -> list[str]:
    """What the server's own tool prints, as far as it comes; but for names of files that it writes to ``folder``, and
    what it adds at an end within a transaction."""
    done = subprocess.run(
        [tool, "--no-defaults", "-v", "--base64-output=decode-rows", f"--local-load={folder}", str(path)],
        capture_output=True,
        check=False,
    )
    text = re.sub(r"(SQL_LOAD_MB-\d+)-\w+", r"\1", done.stdout.decode("utf-8", "replace"))
    return [line for line in text.splitlines() if not line.startswith("ROLLBACK /* added")]


@BOTH
def test_the_servers_own_tool_reads_the_same_in_what_is_stored(flavour: str, tmp_path: Path) -> None:
    dice, logs = random.Random(18), real_logs(flavour)
    for name, file in files(flavour).items():
        if name in ("growing", "large"):  # the first is in use, which the tool remarks: ``stopped`` is the same
            continue
        data = dumped(file, dice)
        stored, whole = received(cut(data, [dice.randrange(2**40) for _ in range(50)]))
        assert (whole, stored) == (True, file), name
        (tmp_path / NAME).write_bytes(stored)
        theirs = decoded(logs.tool, logs.files[name].path, tmp_path)
        assert len(theirs) > 5
        assert decoded(logs.tool, tmp_path / NAME, tmp_path) == theirs, name


@BOTH
@HARD
@given(data=st.data())
def test_wherever_the_bytes_are_cut_and_the_connection_breaks_whole_events_are_stored(
    flavour: str, data: st.DataObject
) -> None:
    file = files(flavour)[data.draw(st.sampled_from(sorted(files(flavour))))]
    dump = dumped(file, random.Random(data.draw(st.integers(0, 9))))
    dump = dump[: data.draw(st.integers(0, len(dump)))]
    places = data.draw(st.lists(st.integers(0, 2**32), max_size=30))
    stored, whole = received(cut(dump, places), data.draw(st.integers(_LEAST, _TURN)))
    assert whole
    assert file.startswith(stored)


@BOTH
@HARD
@given(data=st.data())
def test_whatever_byte_is_altered_on_its_way_nothing_else_than_the_servers_file_is_stored(
    flavour: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(set(files(flavour)) - {"without_checksums"})))
    file = files(flavour)[name]
    dump = bytearray(dumped(file, random.Random(data.draw(st.integers(0, 9)))))
    for _ in range(data.draw(st.integers(1, 3))):
        dump[data.draw(st.integers(0, len(dump) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    stored, _whole = received([bytes(dump)], data.draw(st.integers(_LEAST, _TURN)))
    assert file.startswith(stored)


@BOTH
def test_the_beginning_of_a_file_reads_as_the_beginning_of_what_the_tool_prints(flavour: str, tmp_path: Path) -> None:
    logs, file = real_logs(flavour), files(flavour)["rows"]
    whole = decoded(logs.tool, logs.files["rows"].path, tmp_path)
    ends = [4]
    for one in events(file):
        ends.append(ends[-1] + len(one))
    for end in random.Random(18).sample(ends[2:], 5):
        (tmp_path / NAME).write_bytes(file[:end])
        part = decoded(logs.tool, tmp_path / NAME, tmp_path)
        same = next((at for at, (one, other) in enumerate(zip(part, whole, strict=False)) if one != other), len(part))
        assert all(not line.startswith(("#", "###")) for line in part[same:] if "End of log file" not in line)
