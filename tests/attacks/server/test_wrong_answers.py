"""A server that answers anything: files that it asks for, rows without an end, what is no answer, nothing at all."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from backupd.engine.sql import answers
from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError

_CAPABILITIES = 0x81BFF7FE & ~0x820  # neither TLS nor compression
_OK = b"\0\0\0\2\0\0\0"
_TEXT = b"\3def\0\0\0\1a\0\x0c\x21\0\xff\0\0\0\xfd\0\0\0\0\0"
_EOF = b"\xfe\0\0\2\0"


def _packet(number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "little") + bytes([number % 256]) + body


class Rogue:
    """``answer``: what it sends for each command that begins with ``to``, each chunk as it is; others succeed. ``got``:
    what clients sent."""

    def __init__(
        self, answer: Callable[[], Iterator[bytes]], *, to: bytes = b"\3SELECT 1", greets: bool = True
    ) -> None:
        self.got: list[bytes] = []
        self._answer, self._to, self._greets = answer, to, greets
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Rogue:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()

    @property
    def connection(self) -> Connection:
        return Connection(host="127.0.0.1", port=self.port, user="bob", password="s3cret")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                opened, _address = self._listener.accept()
                threading.Thread(target=self._serve, args=(opened,), daemon=True).start()

    def _serve(self, opened: socket.socket) -> None:
        with opened, contextlib.suppress(OSError, EOFError):
            source = opened.makefile("rb")
            if not self._greets:
                source.read()
            greeting = struct.pack("<B", 10) + b"5.5.5-10.11.19-MariaDB\0" + struct.pack("<I", 7) + b"a" * 8 + b"\0"
            greeting += struct.pack("<HBHHB", _CAPABILITIES & 0xFFFF, 33, 2, _CAPABILITIES >> 16, 21) + b"\0" * 10
            opened.sendall(_packet(0, greeting + b"b" * 12 + b"\0mysql_native_password\0"))
            number, _login = self._read(source)
            opened.sendall(_packet(number + 1, _OK))
            while True:
                number, statement = self._read(source)
                self.got.append(statement)
                if statement.startswith(self._to):
                    for chunk in self._answer():
                        opened.sendall(chunk)
                else:
                    opened.sendall(_packet(1, _OK))

    @staticmethod
    def _read(source: BinaryIO) -> tuple[int, bytes]:
        head = source.read(4)
        if len(head) < 4:
            raise EOFError
        return head[3], source.read(int.from_bytes(head[:3], "little"))


def _refused(rogue: Rogue) -> str:
    with rogue.connection.connect() as session, pytest.raises(ServerError) as caught:
        session.query("SELECT 1")
    return caught.value.detail


def _asks_for_a_file() -> Iterator[bytes]:
    yield _packet(1, b"\xfb/etc/passwd")


def test_a_file_that_the_server_asks_for_is_not_sent() -> None:
    with Rogue(_asks_for_a_file) as rogue:
        assert "LOAD_LOCAL" in _refused(rogue)
    assert not any(b"root:" in sent for sent in rogue.got)


@pytest.mark.parametrize("program", ["mydumper", "mariadb-binlog"])
def test_no_program_sends_a_file_either(program: str, short_tmp: Path) -> None:
    options = short_tmp / "o.cnf"
    with Rogue(_asks_for_a_file, to=b"\3") as rogue:
        options.write_text(f"[client]\nuser=bob\npassword=x\nhost=127.0.0.1\nport={rogue.port}\n")
        words = {
            "mydumper": ["-o", str(short_tmp / "out")],
            "mariadb-binlog": ["--read-from-remote-server", "--raw", "x.000001"],
        }[program]
        subprocess.run(
            [program, f"--defaults-file={options}", *words], check=False, capture_output=True, timeout=30, cwd=short_tmp
        )
    assert rogue.got
    assert not any(b"root:" in sent for sent in rogue.got)


def _endless_rows() -> Iterator[bytes]:
    yield _packet(1, b"\1") + _packet(2, _TEXT) + _packet(3, _EOF)
    number = 4
    while True:
        yield b"".join(_packet(number + each, b"\xfa" + b"x" * 250) for each in range(256))


def _endless_row() -> Iterator[bytes]:
    yield _packet(1, b"\1") + _packet(2, _TEXT) + _packet(3, _EOF)
    piece = b"x" * 0xFFFFFF
    for number in range(4, 1 << 20):
        yield b"\xff\xff\xff" + bytes([number % 256]) + piece


@pytest.mark.parametrize("answer", [_endless_rows, _endless_row])
def test_an_answer_has_an_end(answer: Callable[[], Iterator[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "most", lambda: 64 * 1024**2)
    with Rogue(answer) as rogue:
        assert "its answer is longer than 67,108,864 bytes" in _refused(rogue)


def test_what_is_no_answer_is_an_error_of_the_server() -> None:
    dice = random.Random(20261123)
    good = [b"\1", _TEXT, _EOF, b"\1x", _EOF]

    def broken() -> Iterator[bytes]:
        bodies = list(good)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(bodies))
            body = bytearray(bodies[at])
            for _ in range(dice.randrange(1, 4)):
                body[dice.randrange(len(body)) : dice.randrange(len(body) + 1)] = dice.randbytes(dice.randrange(3))
                body = body or bytearray(b"\0")
            bodies[at] = bytes(body)
        yield b"".join(_packet(number, body) for number, body in enumerate(bodies, start=1))
        raise EOFError

    with Rogue(broken) as rogue:
        refused = 0
        for _ in range(400):
            with rogue.connection.connect() as session:
                try:
                    session.query("SELECT 1")
                except ServerError:
                    refused += 1
    assert refused > 100


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_GREETING_SECONDS", 0.5)
    with Rogue(_asks_for_a_file, greets=False) as rogue, pytest.raises(ServerError, match="cannot connect"):
        rogue.connection.connect()
