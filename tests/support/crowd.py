"""Many clients of the REST interface at once, each on a connection that it keeps, over IPv4 and IPv6."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_HOSTS = ("127.0.0.1", "::1")


@dataclass(slots=True)
class Crowd:
    """What came of it: ``latencies`` in seconds, of answered requests; ``errors``: what went wrong otherwise."""

    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    families: set[str] = field(default_factory=set)

    def quantile(self, share: float) -> float:
        found = sorted(self.latencies)
        return found[min(len(found) - 1, int(len(found) * share))]

    def told(self) -> str:
        return (
            f"{len(self.latencies)} answers, p50 {self.quantile(0.5) * 1000:.0f} ms, "
            f"p99 {self.quantile(0.99) * 1000:.0f} ms, longest {max(self.latencies) * 1000:.0f} ms, "
            f"{len(self.errors)} errors"
        )


def ask(
    port: int, token: str, paths: Sequence[str], *, clients: int = 200, seconds: float = 10.0, every: float = 1.0
) -> Crowd:
    """``clients`` ask for the ``paths`` in turn, each once in ``every`` seconds, for ``seconds``."""
    crowd = Crowd()

    async def all_of_them() -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(
            *(
                _client(crowd, number, port, token, paths, number / clients * every, every, end)
                for number in range(clients)
            )
        )

    asyncio.run(all_of_them())
    return crowd


async def _client(
    crowd: Crowd, number: int, port: int, token: str, paths: Sequence[str], late: float, every: float, end: float
) -> None:
    host = _HOSTS[number % len(_HOSTS)]
    await asyncio.sleep(late)
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        crowd.errors.append(f"{host}: {error}")
        return
    turn = number
    try:
        while True:  # once at least, however long it took to get in
            began = time.monotonic()
            status = await asyncio.wait_for(_get(reader, writer, paths[turn % len(paths)], token), 30)
            taken = time.monotonic() - began
            if status == 200:
                crowd.latencies.append(taken)
                crowd.families.add(host)
            else:
                crowd.errors.append(f"{paths[turn % len(paths)]}: {status}")
            turn += 1
            await asyncio.sleep(max(0.0, every - taken))
            if time.monotonic() >= end:
                return
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        crowd.errors.append(f"{host}: {type(error).__name__} {error}")
    finally:
        writer.close()


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, token: str) -> int:
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split(" ")[1])
