"""Beginning a dump: what a server must be told before it sends its binary log, on a connection of its own.

PyMySQL connects, encrypts and authenticates; from the dump command on, its socket is read by us. All that is known here
of PyMySQL's inner parts is in ``Session.begin_dump``.

- Both families keep what they are told in variables of the session. They have two names each, of which a server reads
  the one that it knows and takes the other for a user's own.
- Without a checksum variable, both end the dump at the first event. Its value concerns the artificial events alone.
- A dump that begins after ``@rpl_semi_sync_replica`` was set is that of a semi-synchronous replica. **Its request is an
  acknowledgement** of everything before its position, on both families: never ask for one that is not durable.
- ``@mariadb_slave_capability=4`` and flag 2 (send annotations): with less, MariaDB rewrites or leaves out events. MySQL
  ignores both.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, replace

from backupd.engine.sql.client import Connection, Session

HIGHEST_START = 2**32 - 1
"""A dump cannot begin beyond."""
_COMMAND = struct.Struct("<IHI")
_COM_BINLOG_DUMP = 0x12
_ANSWER_SECONDS = 60.0
_SEMI_SYNC = ", @rpl_semi_sync_slave = 1, @rpl_semi_sync_replica = 1"
_END_WHERE_IT_ENDS, _ANNOTATIONS = 0x01, 0x02


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: the server's ``file`` from byte ``start`` on, and all that follows. ``server_id``: of this
    end, no other replica's. ``heartbeat``: seconds after which the server speaks though it has nothing to send.
    ``ends``: the dump ends where the log ends now. ``source_id``: server id of the server that is meant, None for
    whoever answers. ``semi_sync``: as a semi-synchronous replica, whose acknowledgements commits wait for. ``gtids``:
    of MariaDB, what is there: the dump begins behind it, wherever that is, and ``file`` is ""."""

    file: str
    start: int
    server_id: int
    heartbeat: float
    ends: bool = False
    source_id: int | None = None
    semi_sync: bool = False
    gtids: str = ""


def begin(connection: Connection, request: Request) -> tuple[Session, socket.socket]:
    """Connect, and ask. The session must be closed. Raises ServerError."""
    session = replace(connection, answer_timeout=connection.answer_timeout or _ANSWER_SECONDS).connect()
    try:
        period = round(request.heartbeat * 1_000_000_000)
        session.execute(
            f"SET @master_heartbeat_period = {period}, @source_heartbeat_period = {period},"
            " @master_binlog_checksum = @@GLOBAL.binlog_checksum, @source_binlog_checksum = @@GLOBAL.binlog_checksum,"
            " @mariadb_slave_capability = 4" + (_SEMI_SYNC if request.semi_sync else "")
        )
        if request.gtids:
            session.execute("SET @slave_connect_state = %s", request.gtids)
        flags = _ANNOTATIONS | (_END_WHERE_IT_ENDS if request.ends else 0)
        command = _COMMAND.pack(request.start, flags, request.server_id) + request.file.encode()
        return session, session.begin_dump(_COM_BINLOG_DUMP, command)
    except BaseException:
        session.close()
        raise
