"""A mail server that keeps what it is given: just enough of RFC 5321 for the demo to show what would arrive."""

from __future__ import annotations

import socketserver
import threading
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Self, cast


class _Conversation(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self._say("220 demo")
        while line := self.rfile.readline():
            word = line.split(b" ")[0].strip().upper()
            if word in (b"EHLO", b"HELO"):
                self._say("250 demo")
            elif word == b"DATA":
                self._say("354 go on")
                self._take()
                self._say("250 taken")
            elif word == b"QUIT":
                self._say("221 bye")
                return
            else:
                self._say("250 fine")

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode() + b"\r\n")

    def _take(self) -> None:
        lines: list[bytes] = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line.removeprefix(b"."))
        cast(Postbox, self.server).arrived.append(message_from_bytes(b"".join(lines), policy=policy.default))


class Postbox(socketserver.ThreadingTCPServer):
    """Listens on a free port of this host while the block lasts; ``arrived`` holds the messages, oldest first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.arrived: list[EmailMessage] = []
        self.port: int = self.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
