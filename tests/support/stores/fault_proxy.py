"""Stands between a client and a server that speak HTTP, and makes trouble as planned: per request, counted, repeatable.

    with FaultProxy(server.endpoint) as proxy:
        config = {**server.bucket("mine"), "endpoint_url": proxy.endpoint}
        proxy.plan(Fault(Kind.ANSWER, method="PUT", times=2))

Of the faults that are planned, the first that fits a request happens to it. ``down`` and ``up`` take the whole place
away and bring it back.
"""

from __future__ import annotations

import contextlib
import random
import re
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO, NoReturn, Self, cast
from urllib.parse import urlsplit

from tests.support.service.serving import held_port

_PIECE = 16 * 1024
_POLL = 0.05
NOT_LISTINGS = r"^(?!.*list-type=2)(?!.*[?&]uploads)"


class Kind(StrEnum):
    REFUSE = "refuse"
    """The connection ends without an answer; the server hears nothing."""
    HANG = "hang"
    """No answer, the connection stays; the server hears nothing."""
    RESET_REQUEST = "reset-request"
    """The connection breaks after ``after`` bytes of what is sent; the server's does, too."""
    RESET_RESPONSE = "reset-response"
    """The server does it; the connection breaks after ``after`` bytes of the answer's body."""
    ANSWER = "answer"
    """``status`` and ``code`` instead; the server hears nothing."""
    FLIP_REQUEST = "flip-request"
    """A bit of byte ``after`` (modulo the length) of what is sent is another one."""
    FLIP_RESPONSE = "flip-response"
    """The same for the answer's body."""
    TRUNCATE = "truncate"
    """The connection ends, in order, after ``after`` bytes of the answer's body."""
    SLOW = "slow"
    """``rate`` bytes a second, both ways."""
    LOSE = "lose"
    """Reading: 404. Writing: an answer as if it had been done; the server hears nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``method`` and ``path``: regular expressions that a request has to fit (path with its query; empty: any). The
    first ``skip`` that do pass; then it happens ``times`` times (None: always), each with probability ``chance``."""

    kind: Kind
    method: str = ""
    path: str = ""
    times: int | None = None
    skip: int = 0
    after: int = 0
    status: int = 503
    code: str = "SlowDown"
    rate: int = 0
    chance: float = 1.0

    def fits(self, method: str, path: str) -> bool:
        return bool(re.fullmatch(self.method or ".*", method)) and bool(re.search(self.path, path))


def schedule(
    dice: random.Random,
    *,
    chance: float,
    size: int,
    method: str = "",
    path: str = "",
    kinds: tuple[Kind, ...] = (
        Kind.REFUSE,
        Kind.RESET_REQUEST,
        Kind.RESET_RESPONSE,
        Kind.ANSWER,
        Kind.FLIP_REQUEST,
        Kind.TRUNCATE,
    ),
) -> list[Fault]:
    """Faults that pass, of each kind, at random places up to byte ``size``; together each hits ``chance`` of all."""
    answers = [(500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable"), (429, "TooManyRequests")]
    found = []
    for kind in kinds:
        status, code = dice.choice(answers)
        found.append(
            Fault(
                kind,
                method=method,
                path=path,
                after=dice.randrange(size),
                status=status,
                code=code,
                chance=chance / len(kinds),
            )
        )
    dice.shuffle(found)
    return found


class _Cut(Exception):  # noqa: N818  ends a connection on purpose
    """``reset``: by a RST, else in order."""

    def __init__(self, *, reset: bool) -> None:
        super().__init__()
        self.reset = reset


@dataclass(slots=True)
class _Head:
    """Of a request or an answer. ``first``: its first line."""

    first: str
    lines: list[str]
    fields: Mapping[str, str]

    @classmethod
    def read(cls, source: BinaryIO) -> _Head | None:
        first = source.readline()
        if not first.endswith(b"\n"):
            return None
        lines = []
        while (line := source.readline()) not in {b"\r\n", b"\n", b""}:
            lines.append(line.decode("latin-1").rstrip("\r\n"))
        pairs = (line.partition(":") for line in lines)
        return cls(
            first.decode("latin-1").rstrip("\r\n"),
            lines,
            {name.lower(): value.strip() for name, _colon, value in pairs},
        )

    def encode(self, *, without: str = "") -> bytes:
        kept = [line for line in self.lines if not without or not line.lower().startswith(without + ":")]
        return "\r\n".join([self.first, *kept, "", ""]).encode("latin-1")

    @property
    def length(self) -> int:
        return int(self.fields.get("content-length", 0))


class FaultProxy:
    """``target``: the server, as ``http://host:port``. ``dice`` decides about chances. Use as a context manager.

    ``done`` counts faults by kind, ``requests`` counts all requests by method."""

    def __init__(self, target: str, dice: random.Random | None = None) -> None:
        split = urlsplit(target)
        self._target = (split.hostname or "127.0.0.1", split.port or 80)
        self._dice = dice or random.Random(0)
        self._lock = threading.Lock()
        self._planned: list[tuple[Fault, list[int]]] = []
        self._ending = threading.Event()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._port = 0
        self._held = contextlib.ExitStack()
        self.done: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def plan(self, *faults: Fault) -> None:
        """From now on these, and none that was planned before."""
        with self._lock:
            self._planned = [(fault, [fault.skip, -1 if fault.times is None else fault.times]) for fault in faults]

    def clear(self) -> None:
        """No faults, and nothing counted."""
        self.plan()
        self.done.clear()
        self.requests.clear()

    def up(self) -> Self:
        if self._listener is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._port))
            listener.listen(128)
            self._port = listener.getsockname()[1]
            self._listener = listener
            self._ending.clear()
            self._accepting = threading.Thread(target=self._accept, args=(listener,), daemon=True)
            self._accepting.start()
        return self

    def down(self) -> None:
        """Connections are refused, and those that are open break, until ``up``."""
        self._ending.set()
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        self._accepting.join()
        with self._lock:
            broken = list(self._open)
        for connection in broken:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> Self:
        self._port = self._held.enter_context(held_port())  # also while it is down
        return self.up()

    def __exit__(self, *_how: object) -> None:
        self.down()
        self._held.close()

    # --- connections

    def _begin(self, run: Callable[[socket.socket], None], connection: socket.socket) -> None:
        thread = threading.Thread(target=run, args=(connection,), daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _address = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(client)
            self._begin(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket()
        with self._lock:
            self._open.add(server)  # it may wait for ever for the rest of a request that was cut off
        reset = False
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(cast(BinaryIO, client.makefile("rb")))
            try:
                server.connect(self._target)
                if self._ending.is_set():
                    raise _Cut(reset=True)
                for connection in (client, server):  # heads and bodies go apart: none waits for the other's receipt
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                answers = stack.enter_context(cast(BinaryIO, server.makefile("rb")))
                more = True
                while more and (head := _Head.read(source)) is not None:
                    more = self._exchange(head, client, source, server, answers)
            except _Cut as cut:
                reset = cut.reset
            except (OSError, ValueError):
                reset = True
        for connection in (client, server):
            if reset:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        with self._lock:
            self._open -= {client, server}

    def _exchange(
        self, head: _Head, client: socket.socket, source: BinaryIO, server: socket.socket, answers: BinaryIO
    ) -> bool:
        """One request and its answer; may another one follow?"""
        method, path = head.first.split(" ")[:2]
        fault = self._decide(method, path)
        kind = None if fault is None else fault.kind
        if kind is Kind.REFUSE:
            raise _Cut(reset=True)
        if kind is Kind.HANG:
            self._hang(client)
        expects = "expect" in head.fields
        if fault is not None and kind in {Kind.ANSWER, Kind.LOSE}:
            self._answer(fault, method, head, client, source, expects=expects)
        if expects:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        server.sendall(head.encode(without="expect"))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before it heard all
            self._pass(source, server, head.length, fault, {Kind.FLIP_REQUEST, Kind.RESET_REQUEST})
        answer = _Head.read(answers)
        if answer is None:
            raise _Cut(reset=True)
        status = int(answer.first.split(" ")[1])
        client.sendall(answer.encode())
        bodiless = method == "HEAD" or status in {204, 304}
        there = {Kind.FLIP_RESPONSE, Kind.RESET_RESPONSE, Kind.TRUNCATE}
        if answer.fields.get("transfer-encoding", "") == "chunked" and not bodiless:
            for size, raw in _chunks(answers):
                client.sendall(raw)
                self._pass(answers, client, size, fault, there)
        else:
            self._pass(answers, client, 0 if bodiless else answer.length, fault, there)
        return answer.fields.get("connection", "").lower() != "close"

    def _pass(self, source: BinaryIO, sink: socket.socket, length: int, fault: Fault | None, here: set[Kind]) -> None:
        kind = fault.kind if fault is not None and fault.kind in here | {Kind.SLOW} else None
        stop = flipped = -1
        if fault is not None and kind in {Kind.RESET_REQUEST, Kind.RESET_RESPONSE, Kind.TRUNCATE}:
            stop = min(fault.after, max(length - 1, 0))
        if fault is not None and kind in {Kind.FLIP_REQUEST, Kind.FLIP_RESPONSE} and length:
            flipped = fault.after % length
        at = 0
        while at < length and at != stop:
            piece = bytearray(source.read(min(_PIECE, length - at, stop - at if stop >= 0 else _PIECE)))
            if not piece:
                raise _Cut(reset=True)
            if at <= flipped < at + len(piece):
                piece[flipped - at] ^= 0x10
            sink.sendall(piece)
            at += len(piece)
            if fault is not None and kind is Kind.SLOW and self._ending.wait(len(piece) / fault.rate):
                raise _Cut(reset=True)
        if stop >= 0:
            raise _Cut(reset=kind is not Kind.TRUNCATE)

    # --- faults

    def _decide(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests[method] += 1
            for fault, left in self._planned:
                if left[1] == 0 or not fault.fits(method, path):
                    continue
                if left[0]:
                    left[0] -= 1
                    continue
                if fault.chance < 1.0 and self._dice.random() >= fault.chance:
                    continue
                left[1] -= 1
                self.done[fault.kind] += 1
                return fault
        return None

    def _hang(self, client: socket.socket) -> None:
        """Until the client gives up, or all is over."""
        while not self._ending.is_set():
            ready, _w, _x = select.select([client], [], [], _POLL)
            if ready and not client.recv(_PIECE):
                break
        raise _Cut(reset=True)

    def _answer(
        self, fault: Fault, method: str, head: _Head, client: socket.socket, source: BinaryIO, *, expects: bool
    ) -> NoReturn:
        writes = fault.kind is Kind.LOSE and method not in {"GET", "HEAD"}
        if writes and expects:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        left = head.length if writes or not expects else 0
        while left and (piece := source.read(min(_PIECE, left))):
            left -= len(piece)
        status, code = (404, "NoSuchKey") if fault.kind is Kind.LOSE else (fault.status, fault.code)
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>planned</Message></Error>'.encode()
        extra = ""
        if writes:
            status, body, extra = 200, b"", 'ETag: "0123456789abcdef0123456789abcdef"\r\n'
        client.sendall(
            f"HTTP/1.1 {status} Planned\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
            f"{extra}Connection: close\r\n\r\n".encode()
            + (b"" if method == "HEAD" else body)
        )
        raise _Cut(reset=False)


def _chunks(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(bytes that follow, what to send before them) of each chunk, the last one with its trailer."""
    before = b""
    while True:
        line = source.readline()
        size = int(line.split(b";")[0], 16)
        if size == 0:
            trailer = b""
            while (row := source.readline()) not in {b"\r\n", b""}:
                trailer += row
            yield 0, before + line + trailer + b"\r\n"
            return
        yield size, before + line
        before = source.readline()


def weather(dice: random.Random) -> list[Fault]:
    """What the place is like for a while."""
    flaky = dice.uniform(0.05, 0.5)
    kinds: list[Callable[[], list[Fault]]] = [
        list,
        lambda: schedule(dice, chance=flaky, size=8000),
        lambda: schedule(dice, chance=flaky, size=8000, method="PUT|POST"),
        lambda: [Fault(Kind.ANSWER, status=503, code="SlowDown", chance=flaky + 0.4)],
        lambda: [Fault(Kind.ANSWER, status=500, code="InternalError", chance=flaky + 0.4)],
        lambda: [Fault(Kind.ANSWER, method="PUT|POST", status=507, code="InsufficientStorage", chance=flaky)],
        lambda: [Fault(Kind.ANSWER, method="PUT|POST", status=507, code="InsufficientStorage")],
        lambda: [Fault(Kind.REFUSE)],
        lambda: [Fault(Kind.HANG, times=dice.randrange(1, 4), chance=flaky)],
        lambda: [Fault(Kind.RESET_REQUEST, method="PUT", after=dice.randrange(4000), chance=flaky)],
        lambda: [Fault(Kind.RESET_RESPONSE, after=dice.randrange(300), chance=flaky)],
        lambda: [Fault(Kind.FLIP_RESPONSE, method="GET", path=NOT_LISTINGS, after=dice.randrange(8000), chance=flaky)],
        lambda: [Fault(Kind.TRUNCATE, method="GET", after=dice.randrange(4000), chance=flaky)],
        lambda: [Fault(Kind.LOSE, method="GET|HEAD|PUT", path=NOT_LISTINGS, chance=flaky / 3)],
        lambda: [Fault(Kind.LOSE, method="PUT", path=r"/(objects|servers|binlogs)/", chance=flaky)],
        lambda: [
            Fault(Kind.FLIP_RESPONSE, method="GET", path=r"/(objects|servers|binlogs)/", after=dice.randrange(999))
        ],
        lambda: [Fault(Kind.LOSE, method="GET|HEAD", path=r"^(?!.*list-type).*manifest\.json", chance=flaky + 0.5)],
        lambda: [Fault(Kind.ANSWER, method="DELETE", status=403, code="AccessDenied")],
        lambda: [Fault(Kind.ANSWER, status=403, code="AccessDenied", chance=flaky)],
        lambda: [Fault(Kind.SLOW, rate=300_000, chance=0.3)],
    ]
    return dice.choice(kinds)()


@contextlib.contextmanager
def changing(proxy: FaultProxy, dice: random.Random) -> Iterator[None]:
    """Another weather every moment; now and then nobody is there at all."""
    over = threading.Event()
    turns = [(dice.uniform(0.02, 0.4), None if dice.random() < 0.1 else weather(dice)) for _ in range(40)]
    proxy.plan(*weather(dice))

    def change() -> None:
        for seconds, faults in turns:
            if over.wait(seconds):
                return
            if faults is None:
                proxy.down()
                over.wait(0.2)
                proxy.up()
            else:
                proxy.plan(*faults)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        proxy.plan()
