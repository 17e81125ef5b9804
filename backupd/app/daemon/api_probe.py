"""Does the process of the REST interface answer, or does it only live?"""

from __future__ import annotations

import socket
import ssl
import threading

_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_BEGINNING = b"HTTP/1.1 "


class Probe:
    """One question, asked by a thread of its own: who wants the answer need not wait for it. ``heard`` is None until it
    is known."""

    def __init__(self, address: tuple[str, int], *, tls: bool, seconds: float) -> None:
        self.heard: bool | None = None
        threading.Thread(target=self._ask, args=(address, tls, seconds), name="api-probe", daemon=True).start()

    def _ask(self, address: tuple[str, int], tls: bool, seconds: float) -> None:
        self.heard = answers(address, tls=tls, seconds=seconds)


def answers(address: tuple[str, int], *, tls: bool, seconds: float) -> bool:
    """Whatever it says: one that refuses lives as well. ``seconds``: for each step of it."""
    try:
        with (
            socket.create_connection(address, timeout=seconds) as plain,
            _context().wrap_socket(plain) if tls else plain as connection,
        ):
            connection.sendall(_REQUEST)
            return connection.recv(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def _context() -> ssl.SSLContext:
    """Nothing secret is sent, so it does not matter whose certificate it is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
