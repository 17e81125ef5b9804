"""Settings with which a recovery to a point in time lacks transactions without anybody noticing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

from backupd.model.server_facts import Flavour


def recovery_risks(variables: Mapping[str, str], flavour: Flavour, *, replica: bool = False) -> tuple[str, ...]:
    """One sentence per risk. ``variables``: the server's global variables, as text, names in lower case;
    ``replica``: does it follow another server?"""
    log_bin = variables.get("log_bin", "").upper()
    if log_bin in ("OFF", "0"):
        missing = (
            "the server writes no binary log (log_bin is off): only the moments of backups can be recovered, "
            "and each is taken in full, because nothing shows that an increment belongs to the same history"
        )
        return (missing, *_crash_risks(variables))
    return (*_log_risks(variables, flavour, replica), *_crash_risks(variables))


def _log_risks(variables: Mapping[str, str], flavour: Flavour, replica: bool) -> Iterator[str]:
    def value(name: str) -> str:
        return variables.get(name, "").upper()

    if value("sync_binlog") not in ("1", ""):
        yield (
            f"sync_binlog is {value('sync_binlog')}, not 1: a crash of the host loses the end of the binary "
            "log, and the server then continues on another branch of history"
        )
    for name in ("binlog_do_db", "binlog_ignore_db"):
        if variables.get(name):
            yield f"{name} is set ({variables[name]}): the binary log lacks the changes of other schemas"
    if value("binlog_format") in ("STATEMENT", "MIXED"):
        yield (
            f"binlog_format is {value('binlog_format')}: statements may replay to other rows, as those do that "
            "use a temporary table which was open at the backup's position; ROW is exact"
        )
    if value("binlog_checksum") == "NONE":
        yield "binlog_checksum is NONE: damage of the binary log is not noticed before it is replayed"
    if value("binlog_row_image") in ("MINIMAL", "NOBLOB"):
        yield f"binlog_row_image is {value('binlog_row_image')}: changes cannot be searched or undone in full"
    if replica and "OFF" in (value("log_slave_updates"), value("log_replica_updates")):
        yield ("log_slave_updates is off: what this replica replicates is not in its own binary log")
    if flavour is not Flavour.MARIADB and value("gtid_mode") in ("OFF", "OFF_PERMISSIVE", "ON_PERMISSIVE"):
        yield f"gtid_mode is {value('gtid_mode')}: positions are file names and offsets, good here alone"


def kept_for(variables: Mapping[str, str]) -> timedelta | None:
    """After which time the server removes a binary log by itself; None: never. ``variables`` as above."""
    if variables.get("binlog_expire_logs_auto_purge", "").upper() in ("OFF", "0"):
        return None
    seconds = float(variables.get("binlog_expire_logs_seconds") or 0)
    if not seconds:
        seconds = float(variables.get("expire_logs_days") or 0) * 86_400
    return timedelta(seconds=seconds) if seconds else None


def _crash_risks(variables: Mapping[str, str]) -> Iterator[str]:
    flush = variables.get("innodb_flush_log_at_trx_commit", "1")
    if flush != "1":
        yield f"innodb_flush_log_at_trx_commit is {flush}, not 1: a crash loses committed transactions"
