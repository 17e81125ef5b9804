"""What `check` says of a server whose commits are to wait until backupd has them: settings that are not as they must
be, with the statements to run. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from backupd.backup.finding import Finding, error, fine, warning
from backupd.engine.server.semi_sync import AFTER_SYNC, SemiSync
from backupd.model.server_facts import Flavour, Version
from backupd.model.text import format_duration

ACKNOWLEDGEMENT = "acknowledgement"
_NEW_WORDS = Version(8, 0, 26)
_PERSISTED = Version(8, 0)
_SHORTEST = 5.0
"""Seconds. A stream that connects again needs one or two."""


def examine_acknowledgement(found: SemiSync, flavour: Flavour, version: Version) -> Iterator[Finding]:
    """``found``: of the server. The worst first."""
    mariadb = flavour is Flavour.MARIADB
    set_ = "SET PERSIST" if not mariadb and version >= _PERSISTED else "SET GLOBAL"
    kept = "" if set_ == "SET PERSIST" else "; and set it in the server's option file"

    def statement(name: str, value: object) -> str:
        return f"{set_} {found.variable(name)} = {value}{kept}"

    if not found.is_known:
        word = "source" if version >= _NEW_WORDS else "master"
        yield error(
            ACKNOWLEDGEMENT,
            "the policy has commits wait for backupd (binlog.acknowledge), and the server's plugin for "
            "semi-synchronous replication is not installed",
            f"INSTALL PLUGIN rpl_semi_sync_{word} SONAME 'semisync_{word}.so'; "
            f"{set_} rpl_semi_sync_{word}_enabled = ON",
        )
        return
    if not found.on:
        yield error(
            ACKNOWLEDGEMENT,
            "the policy has commits wait for backupd (binlog.acknowledge), and semi-synchronous replication is off at "
            "the server: no commit waits",
            statement("enabled", "ON"),
        )
    if found.wait_point != AFTER_SYNC:
        yield error(
            ACKNOWLEDGEMENT,
            f"{found.variable('wait_point')} is {found.wait_point}: other sessions see a commit before backupd has it, "
            "and RPO 0 is not claimed",
            statement("wait_point", AFTER_SYNC),
        )
    yield from _others(found, statement(f"wait_for_{found.replica}_count", max(found.clients, 1)), mariadb=mariadb)
    if not found.waits_alone:
        yield warning(
            ACKNOWLEDGEMENT,
            f"{found.variable(f'wait_no_{found.replica}')} is OFF: the server stops waiting as soon as it notices that "
            "backupd is not connected, so each interruption of the stream ends RPO 0",
            statement(f"wait_no_{found.replica}", "ON"),
        )
    if found.sync_binlog != 1:
        yield warning(
            ACKNOWLEDGEMENT,
            f"sync_binlog is {found.sync_binlog}: after a crash the server may have less than what was acknowledged, "
            "and its history then branches off the archived one",
            f"{set_} sync_binlog = 1{kept}",
        )
    yield _timeout(found, statement("timeout", 10_000))


def _others(found: SemiSync, statement: str, *, mariadb: bool) -> Iterator[Finding]:
    if found.clients > 1 and found.needed < found.clients:
        hint = "switch rpl_semi_sync_slave_enabled off on the other replicas, and restart their IO threads"
        yield error(
            ACKNOWLEDGEMENT,
            f"{found.clients} semi-synchronous replicas are connected, and a commit is answered when {found.needed} of "
            "them has it: that need not be backupd, and RPO 0 is not claimed",
            f"MariaDB cannot wait for more than one: {hint}" if mariadb else f"{statement}; or {hint}",
        )
    elif found.needed > max(found.clients, 1):
        yield warning(
            ACKNOWLEDGEMENT,
            f"the server waits for {found.needed} replicas, and {found.clients} are connected: each commit waits for "
            "the timeout until it gives up",
            statement,
        )


def _timeout(found: SemiSync, statement: str) -> Finding:
    span = format_duration(found.timeout)
    text = (
        f"commits wait {span} for backupd at most. While the stream is stopped, those under way wait that long once; "
        "then the server goes on without waiting (RPO 0 ends, and is reported) until the stream is back"
    )
    if found.timeout < _SHORTEST:
        return warning(ACKNOWLEDGEMENT, f"{text}. A stream that connects again takes a second or two", statement)
    return fine(ACKNOWLEDGEMENT, f"{text} (by the settings of the server; not probed)")
