"""Where the data of a copy is in its cluster's history: what InnoDB says, and how to make it say so after a replay.

A prepare finds the position in InnoDB, and so does a server with ``--wsrep-recover``. A replay without a provider does
not move it. A node that is further than InnoDB says fails to join (``IST started with wrong seqno``), or has
statements repeated.

So after a replay the copy is for a moment the only node of a cluster of its own, in a sandbox without a network: such a
cluster begins with a view, which uses up one seqno, and InnoDB takes that for its position. It begins one below the
wanted seqno; with wsrep_gtid_mode=ON two below, and an empty statement with the GTID of the last transaction takes the
last one. A binary log is off and ``binlog_format=ROW`` is said: MIXED, the default, ends the provider. Its cache is
removed: a node with write sets of that history could not join. Observed, not documented: done on the series that it was
tried with only, and believed only when ``--wsrep-recover`` prints exactly the wanted position.
"""

from __future__ import annotations

import itertools
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backupd.engine.server.launch import LaunchedServer, ServerConfig, log_tail
from backupd.engine.server.wsrep import cluster_position, recovered_positions
from backupd.model.binlog import MariadbGtids
from backupd.model.errors import RefusedError, ToolError
from backupd.model.server_facts import ClusterPosition, Flavour, ServerInfo, WsrepState
from backupd.process.run_context import RunContext
from restore.datadir.occupancy import Account
from restore.galera import grastate

PROVED_SERVER = (10, 11)
"""The MariaDB series with which a position was moved."""
PROVED_PROVIDER = "4."
"""How the provider's version begins; MariaDB's packages call it 26.4.x, its own status 4.x."""
PROVIDERS = (
    "/usr/lib/galera/libgalera_smm.so",
    "/usr/lib64/galera-4/libgalera_smm.so",
    "/usr/lib64/galera/libgalera_smm.so",
)
_RECOVERED = re.compile(
    r"WSREP: Recovered position:?\s+([0-9a-fA-F-]{36}:-?\d+?)(?:,([\d,-]+?))?(?=\d{4}-\d\d-\d\d +\d+:|\s|\Z)"
)
"""The next line, which begins with a date, may follow without a line end."""
_SYNC_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What InnoDB says of itself. ``gtid``: of that transaction, "" with wsrep_gtid_mode=OFF."""

    position: ClusterPosition
    gtid: str = ""

    def __str__(self) -> str:
        return f"{self.position},{self.gtid}" if self.gtid else str(self.position)


def prepared_position(logs: Path, cluster: str) -> ClusterPosition:
    """What the last step of a prepare found, whose outputs are in ``logs``. Raises RefusedError where a step found
    another cluster's, none at all, or an earlier one than the step before it."""
    steps: list[ClusterPosition] = []
    for path in sorted(logs.glob("prepare-*.log"), key=lambda one: int(one.stem.rpartition("-")[2])):
        steps += recovered_positions(path.read_text(encoding="utf-8", errors="replace"))
    if not steps:
        raise RefusedError(
            "the prepare found no position of a cluster in the backup: it is not a backup of a Galera node",
            hint="restore it as a new server (--mode new-server), or let the node join with an empty data directory, "
            "by an SST",
        )
    for before, after in itertools.pairwise(steps):
        if before.uuid != after.uuid or after.seqno < before.seqno:
            raise RefusedError(
                f"the backups of this chain do not follow each other: {before}, then {after}",
                hint="restore the full backup alone, or another chain; `backupd backups` lists them",
            )
    last = steps[-1]
    refuse_other_cluster(last, cluster)
    return last


def refuse_unlike_record(found: ClusterPosition, recorded: ClusterPosition | None) -> str:
    """Raises RefusedError where the copy cannot be of the backup whose record names ``recorded``: of another cluster,
    or further. A lower seqno is to be told only: what uses up one without an event need not move InnoDB's."""
    if recorded is None or found == recorded:
        return ""
    words = f"InnoDB of the copy is at {found}, and the backup's record says {recorded}"
    if found.uuid != recorded.uuid or found.seqno > recorded.seqno:
        raise RefusedError(words, hint="nothing was put in place; restore another backup (`backupd backups`)")
    return f"{words}: the cluster sends from {found.seqno + 1} on"


def refuse_other_cluster(position: ClusterPosition, cluster: str) -> None:
    """Raises RefusedError where the data is of another cluster than the one with the uuid ``cluster``."""
    if position.uuid != cluster:
        raise RefusedError(
            f"the backup is of another cluster: it is at {position}, and the cluster's uuid is {cluster}",
            detail="started on this data the node would take a full copy of a donor (SST)",
            hint="name the cluster of this backup; one that was bootstrapped anew from scratch has another uuid, and "
            "needs a new backup",
        )


def recover(config: ServerConfig, gtid: str = "") -> Recovered | None:
    """What a server with ``--wsrep-recover`` prints of the stopped data directory of ``config``; None where InnoDB has
    no position. With wsrep_gtid_mode=ON, as any ``gtid`` of the cluster's domain means, it prints its GTID, too. Raises
    ToolError."""
    # Without a provider, which it does not load, it skips the recovery.
    asked = replace(config, cluster=_alone(gtid))
    asked.error_log.unlink(missing_ok=True)
    done = LaunchedServer(asked).once("--wsrep-recover")
    printed = log_tail(asked.error_log, 400) + done.stderr
    found = _RECOVERED.findall(printed)
    if not found:
        raise ToolError(
            f"{Path(config.program).name} --wsrep-recover printed no position of {config.datadir}",
            detail=log_tail(asked.error_log),
            hint="see its error log above",
        )
    position = cluster_position(found[-1][0])
    return Recovered(position, found[-1][1]) if position is not None else None


def refuse_unproved(info: ServerInfo, members: Sequence[WsrepState]) -> None:
    """Raises RefusedError where a position was never moved with this server's series or the cluster's provider."""
    series = (info.version.major, info.version.minor)
    others = sorted({state.provider for state in members if not _is_proved(state.provider)})
    if info.flavour is Flavour.MARIADB and series == PROVED_SERVER and not others:
        return
    tried = f"MariaDB {PROVED_SERVER[0]}.{PROVED_SERVER[1]} with Galera {PROVED_PROVIDER}x (26.{PROVED_PROVIDER}x)"
    raise RefusedError(
        "binary logs cannot be replayed onto a node of this cluster: moving InnoDB's position afterwards was tried "
        f"with {tried} only",
        detail=f"{info.flavour} {info.version}; provider {', '.join(others) or PROVED_PROVIDER + 'x'}",
        hint="restore the backup alone (--to backup:ID), where a node still keeps what follows it",
    )


def _is_proved(version: str) -> bool:
    return version.removeprefix("26.").startswith(PROVED_PROVIDER)


def gtid_in(gtids: str, domain: int) -> str:
    """The GTID of ``domain`` among those that are executed. Raises RefusedError without one."""
    found = MariadbGtids.parse(gtids).last.get(domain)
    if found is None:
        raise RefusedError(
            f"the binary logs hold no GTID of the cluster's domain {domain}",
            detail=f"they end at {gtids or 'no GTID'}",
            hint="wsrep_gtid_mode was switched on after the backup: take a new full backup",
        )
    return f"{domain}-{found[0]}-{found[1]}"


def move(config: ServerConfig, base: ClusterPosition, wanted: Recovered, server_id: int, context: RunContext) -> None:
    """Bring InnoDB's position of the stopped data directory of ``config`` from ``base`` to ``wanted``. ``server_id``:
    that of the node. Its private server sees no network where it can be confined. Raises RefusedError where the two are
    too near, ToolError where it did not come out exactly; the copy is not to be used then."""
    first = wanted.position.seqno - (2 if wanted.gtid else 1)
    if first < base.seqno:
        raise RefusedError(
            f"the binary logs bring the node from {base} to {wanted.position.seqno} only: its position cannot be moved "
            "over so few transactions",
            hint="restore the backup alone (--to backup:ID), or wait until the archive is further",
        )
    grastate.remove(config.datadir)
    owner = config.datadir.stat()
    grastate.write(
        config.datadir,
        ClusterPosition(wanted.position.uuid, first),
        Account("", owner.st_uid, owner.st_gid),
        bootstrap=True,
    )
    alone = replace(config, cluster=_alone(wanted.gtid), server_id=server_id)
    with LaunchedServer(alone, cancel=context.cancel) as server, server.connection.connect() as session:
        deadline = time.monotonic() + _SYNC_SECONDS
        while (state := _status(session.query("SHOW GLOBAL STATUS LIKE 'wsrep_%'", shown=True)))[0] != "Synced":
            if time.monotonic() > deadline:
                raise ToolError(
                    f"the private cluster did not form within {_SYNC_SECONDS:.0f} s", detail=server.log_tail()
                )
            time.sleep(0.05)
        if wanted.gtid:
            session.execute(f"SET SESSION wsrep_gtid_seq_no = {int(wanted.gtid.rpartition('-')[2])}")
            session.execute("DROP TABLE IF EXISTS mysql.backupd_no_such_table")
            state = _status(session.query("SHOW GLOBAL STATUS LIKE 'wsrep_%'", shown=True))
        if state[1] != wanted.position.seqno:
            raise ToolError(
                f"the private cluster is at {state[1]}, not at {wanted.position.seqno}", detail=server.log_tail()
            )
    grastate.remove(config.datadir)
    refuse_unequal(recover(config, wanted.gtid), wanted)


def refuse_unequal(found: Recovered | None, wanted: Recovered) -> None:
    """Raises RefusedError where InnoDB says anything else of itself than ``wanted``."""
    if found is None or found.position != wanted.position or (wanted.gtid and found.gtid != wanted.gtid):
        raise RefusedError(
            f"InnoDB of the copy is at {found or 'no position'}, not at {wanted}",
            hint="nothing was put in place and the cluster was not touched; restore again, or use another backup",
        )


def provider() -> str:
    """Path of the provider on this host. Raises RefusedError."""
    found = next((path for path in PROVIDERS if Path(path).is_file()), None)
    if found is None:
        raise RefusedError(
            "no Galera provider is installed on this host", detail="\n".join(PROVIDERS), hint="apt-get install galera-4"
        )
    return found


def _alone(gtid: str) -> dict[str, str | None]:
    """A cluster of one, under a name and at a port that no other has."""
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, incoming = probe.getsockname()[1], other.getsockname()[1]
    domain = gtid.partition("-")[0]
    return {
        "wsrep_on": "ON",
        "wsrep_provider": provider(),
        "wsrep_cluster_name": "backupd_isolated",
        "wsrep_cluster_address": "gcomm://",
        "wsrep_node_address": f"127.0.0.1:{port}",
        "wsrep_provider_options": f"base_host=127.0.0.1;base_port={port};gmcast.listen_addr=tcp://127.0.0.1:{port};"
        f"ist.recv_addr=127.0.0.1:{incoming};gcache.size=8M;pc.recovery=FALSE",
        "wsrep_gtid_mode": "ON" if gtid else "OFF",
        **({"wsrep_gtid_domain_id": domain} if gtid else {}),
        "binlog_format": "ROW",
        "innodb_autoinc_lock_mode": "2",
        "default_storage_engine": "InnoDB",
    }


def _status(rows: Sequence[tuple[object, ...]]) -> tuple[str, int]:
    """State and last seqno."""
    found = {str(name).lower(): str(value) for name, value in rows}
    return found.get("wsrep_local_state_comment", ""), int(found.get("wsrep_last_committed") or -1)
