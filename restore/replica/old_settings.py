"""What a copy in mode ``replica`` without a source needs before it replicates, as far as that is known.

A copy of a MariaDB server keeps its GTID position and nothing else.
"""

from __future__ import annotations

import re

from backupd.engine.sql.dialect import dialect_of
from backupd.model.manifest import BodyFacts
from backupd.model.server_facts import Position, Role
from backupd.process.output import redact

_SECRET = re.compile(
    r"(MASTER_PASSWORD\s*=\s*)('(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|[^\s,;]+)", re.IGNORECASE
)
_ACCOUNT = "MASTER_USER='USER', MASTER_PASSWORD='PASSWORD', MASTER_USE_GTID=slave_pos"


def replica_remarks(facts: BodyFacts, position: Position) -> tuple[str, ...]:
    """For mode ``replica``: the statements that make the copy of ``facts`` a replica again, as far as they are known.
    ``position``: where the copy is, which is further than the backup when binary logs were replayed onto it.

    MariaDB keeps host and account of a replication connection in ``master.info`` files, which mariadb-backup does
    not copy; the position is in the table ``mysql.gtid_slave_pos``, which it does. MySQL keeps both in InnoDB tables.
    """
    info = facts.server
    if dialect_of(info.flavour, info.version).backs_up_replication:
        if position == facts.position:
            return ()
        return (
            "replaying binary logs removed the replication settings that came with the data: set them again with "
            "CHANGE REPLICATION SOURCE TO; everything up to "
            + (position.gtid or f"{position.file}:{position.pos}")
            + " is executed",
        )
    recorded = " ".join(_SECRET.sub(r"\1'***'", redact(facts.receipts.replica_of)).split())
    found = ["a backup of MariaDB holds no replication settings (master.info is not in it): set them again, as below"]
    if recorded or info.role is Role.REPLICA:
        found.append(
            "to follow the source that the backed-up server followed (gtid_slave_pos came with the data): "
            f"CHANGE MASTER TO MASTER_HOST='HOST', MASTER_PORT=PORT, {_ACCOUNT}"
            + (f" -- recorded: {recorded}" if recorded else "")
        )
    port = info.variables.get("port", "")
    host = info.hostname.replace("\\", "").replace("'", "''") or "HOST"
    source = f"MASTER_HOST='{host}', MASTER_PORT={port if port.isdecimal() and int(port) else 'PORT'}"
    if position.gtid:
        found.append(
            f"to follow the backed-up server itself: SET GLOBAL gtid_slave_pos='{position.gtid}'; "
            f"CHANGE MASTER TO {source}, {_ACCOUNT}"
        )
    elif position.file:
        account = _ACCOUNT.rpartition(", ")[0]
        found.append(
            f"to follow the backed-up server itself: CHANGE MASTER TO {source}, {account}, "
            f"MASTER_LOG_FILE='{position.file}', MASTER_LOG_POS={position.pos}"
        )
    return tuple(found)
