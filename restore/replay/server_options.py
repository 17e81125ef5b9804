"""How the server of a restored copy is set up so that logs can be replayed onto it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from backupd.engine.instance.launch import Options, ServerConfig, zone_of
from backupd.model.server_facts import Flavour, ServerInfo, Version

_MOST_WORKERS = 8
_RELAY_SPACE = 1024 * 1024 * 1024

_ALWAYS: Options = {
    # Lost work is done again from the backup; only a clean stop makes the copy a restored server.
    "innodb_flush_log_at_trx_commit": "0",
    "sync_relay_log": "0",
    "relay_log": "backupd-relay",
    "relay_log_space_limit": str(_RELAY_SPACE),
    "loose_slave_max_allowed_packet": "1073741824",
    "loose_replica_max_allowed_packet": "1073741824",
    "loose_slave_exec_mode": "STRICT",
    "loose_replica_exec_mode": "STRICT",
    "loose_slave_transaction_retries": "100",
    "loose_replica_transaction_retries": "100",
    # Of plugins that the copied tables name: it must not write anybody's audit.
    "loose_server_audit": "OFF",
    "loose_audit_log": "OFF",
    "loose_group_replication": "OFF",
}
_MARIADB: Options = {
    "sync_master_info": "0",
    "sync_relay_log_info": "0",
    "slave_parallel_mode": "optimistic",
    "slave_parallel_max_queued": str(16 * 1024 * 1024),
    "slave_run_triggers_for_rbr": "NO",
    "gtid_strict_mode": "OFF",
}
_MYSQL: Options = {
    "loose_persisted_globals_load": "OFF",
    # Takes events with GTIDs and without, and turns no statement away that the source executed.
    "gtid_mode": "OFF_PERMISSIVE",
    "enforce_gtid_consistency": "OFF",
    # For the applier's own tables, which tell what its workers do; nothing else is measured.
    "performance_schema": "ON",
    "performance_schema_instrument": "%=OFF",
    "loose_slave_parallel_type": "LOGICAL_CLOCK",
}
_MYSQL_57: Options = {
    # Its own default, FILE, allows no channel besides the unnamed one (error 3077).
    "master_info_repository": "TABLE",
    "relay_log_info_repository": "TABLE",
}
_TABLES_BY_DEFAULT = Version(8, 0)


def replay_options(info: ServerInfo, server_ids: Sequence[int], workers: int) -> Options:
    """Options of a copy that logs with events of ``server_ids`` can be replayed onto, in parallel by ``workers`` (0: as
    this machine can). ``replay_config`` sets them, and what is no option of the server."""
    cores = os.cpu_count() or 1
    number = str(workers or min(_MOST_WORKERS, cores))
    if info.flavour is Flavour.MARIADB:
        # It runs transactions side by side that may turn out to be in each other's way: with few cores that costs more
        # than it gains (2 cores, 30,000 transactions: 3.6 s with one worker, 5.0 with two, 5.9 with four).
        number = str(workers or min(_MOST_WORKERS, max(1, cores // 2)))
        return {**_ALWAYS, **_MARIADB, "slave_parallel_threads": number, "server_id": str(_own_id(server_ids))}
    ordered = "ON" if info.version >= Version(8, 0, 19) else "OFF"  # before that it needed a binary log
    old = {} if info.version >= _TABLES_BY_DEFAULT else _MYSQL_57
    return {
        **_ALWAYS,
        **_MYSQL,
        **old,
        "server_id": str(_own_id(server_ids)),
        "loose_slave_parallel_workers": number,
        "loose_replica_parallel_workers": number,
        "loose_slave_preserve_commit_order": ordered,
        "loose_replica_preserve_commit_order": ordered,
    }


def replay_config(
    config: ServerConfig, info: ServerInfo, server_ids: Sequence[int], workers: int, *, since: datetime, until: datetime
) -> ServerConfig:
    """``config`` changed so that logs can be replayed: ``replay_options``, a server id that occurs in no event, its
    accounts known (GRANT and CREATE EVENT must work), one of ours among them until the server is stopped, and the time
    zone that the source had when it wrote them, from ``since`` to ``until``."""
    options = dict(replay_options(info, server_ids, workers))
    return replace(
        config,
        skip_grants=False,
        own_account=True,
        server_id=int(options.pop("server_id") or 0),
        options={**config.options, **options},
        zone=zone_of(info.variables, since, until),
    )


def _own_id(server_ids: Sequence[int]) -> int:
    taken = set(server_ids)
    return next(number for number in iter(lambda: secrets.randbelow(2**31) + 2**30, 0) if number not in taken)
