"""PyMySQL's connection for a server that may lie: an answer has an end, and whatever it is, the worst it can be is an
error of the connection.

An answer is held in memory until its last row has come, and a server that never sends that one would fill all of it:
no answer may take more than half of the machine's. One that cannot be read at all ends the connection, for what comes
after it means nothing. Who says nothing when he is called (a server that stands still: its kernel answers for it) is
not waited for as for an answer.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pymysql
import pymysql.connections
from pymysql.constants import CR

_GIB = 1024**3
_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_GREETING_SECONDS = 60.0
_EACH = 100
"""Bytes that a packet's header, or its content, takes beside its own."""


def most() -> int:
    """Bytes of memory that one answer may take."""
    return max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _GIB)


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


_Plain: Any = pymysql.connections.Connection


class Answering(_Plain):  # type: ignore[misc]  # its stubs do not know what is changed here
    """Raises pymysql.err.Error, OSError or UnicodeError, and nothing else."""

    _read_timeout: float | None
    _taken, _limit = 0, _GIB

    def connect(self, sock: Any = None) -> None:
        patience, self._read_timeout = self._read_timeout, _GREETING_SECONDS
        try:
            super().connect(sock)
            self._read_timeout = patience
        except (pymysql.err.Error, OSError, UnicodeError):
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def peer(self) -> tuple[int, int] | None:
        """Process and user at the other end of a socket of this host, by the kernel's word (0 is a process in another
        pid namespace); None over TCP."""
        opened: socket.socket = self._sock
        if opened.family != socket.AF_UNIX:
            return None
        process, user, _group = struct.unpack(
            "3i", opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return process, user

    def server_uid(self) -> int | None:
        """Whose process is at the other end, by the kernel's word; None where it is not on this host's network."""
        if (peer := self.peer()) is not None:
            return peer[1]
        opened: socket.socket = self._sock
        ends = opened.getpeername()[1], opened.getsockname()[1]
        for table in _TCP_TABLES:
            for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
                _number, local, remote, _state, _queues, _timer, _retries, uid, *_rest = line.split()
                if (_port_of(local), _port_of(remote)) == ends:
                    return int(uid)
        return None

    def _execute_command(self, command: int, sql: str | bytes) -> None:
        self._taken, self._limit = 0, most()
        super()._execute_command(command, sql)

    def _read_query_result(self, unbuffered: bool = False) -> int:
        try:
            return int(super()._read_query_result(unbuffered=unbuffered))
        except (pymysql.err.Error, OSError, UnicodeError):
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def _read_bytes(self, num_bytes: int) -> bytes:
        self._taken += num_bytes + _EACH
        if self._taken > self._limit:
            self._force_close()
            raise pymysql.err.OperationalError(
                CR.CR_MALFORMED_PACKET, f"its answer is longer than {self._limit:,} bytes"
            )
        return bytes(super()._read_bytes(num_bytes))

    def _unreadable(self, error: Exception) -> pymysql.err.OperationalError:
        self._force_close()
        return pymysql.err.OperationalError(CR.CR_MALFORMED_PACKET, f"its answer cannot be read: {error!r}")
