"""What `check` says of a server whose commits are to wait, with the statements to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backupd.backup.acknowledgement_checks import examine_acknowledgement
from backupd.backup.finding import Finding, Severity
from backupd.engine.server.semi_sync import SemiSync
from backupd.model.server_facts import Flavour, Version

MYSQL = SemiSync("source", "replica", True, True, "AFTER_SYNC", 10.0, waits_alone=True, clients=1)
MARIADB = replace(MYSQL, source="master", replica="slave")


def findings(found: SemiSync, version: tuple[int, ...] = (9, 7, 0)) -> list[Finding]:
    flavour = Flavour.MARIADB if found.source == "master" and version >= (10, 5) else Flavour.MYSQL
    return list(examine_acknowledgement(found, flavour, Version(*version)))


def worst(found: SemiSync, version: tuple[int, ...] = (9, 7, 0)) -> Finding:
    return findings(found, version)[0]


@pytest.mark.parametrize(("found", "version"), [(MYSQL, (9, 7, 0)), (MARIADB, (10, 11, 19))])
def test_a_server_that_is_as_it_must_be_is_told_how_long_its_commits_wait(
    found: SemiSync, version: tuple[int, ...]
) -> None:
    (only,) = findings(found, version)
    assert only.severity is Severity.OK
    assert "commits wait 10.0s for backupd at most" in only.message


@pytest.mark.parametrize(
    ("version", "statement"),
    [
        ((9, 7, 0), "rpl_semi_sync_source SONAME 'semisync_source.so'; SET PERSIST rpl_semi_sync_source_enabled = ON"),
        ((8, 0, 25), "rpl_semi_sync_master SONAME 'semisync_master.so'; SET PERSIST rpl_semi_sync_master_enabled = ON"),
        ((5, 7, 44), "rpl_semi_sync_master SONAME 'semisync_master.so'; SET GLOBAL rpl_semi_sync_master_enabled = ON"),
    ],
)
def test_a_plugin_that_is_not_there_comes_with_the_statement_of_the_version(
    version: tuple[int, ...], statement: str
) -> None:
    (only,) = findings(SemiSync(), version)
    assert (only.severity, only.hint) == (Severity.ERROR, f"INSTALL PLUGIN {statement}")


@pytest.mark.parametrize(
    ("changes", "severity", "words", "hint"),
    [
        ({"on": False}, Severity.ERROR, "no commit waits", "SET PERSIST rpl_semi_sync_source_enabled = ON"),
        (
            {"wait_point": "AFTER_COMMIT"},
            Severity.ERROR,
            "RPO 0 is not claimed",
            "SET PERSIST rpl_semi_sync_source_wait_point = AFTER_SYNC",
        ),
        (
            {"clients": 3, "needed": 2},
            Severity.ERROR,
            "answered when 2 of them has it",
            "SET PERSIST rpl_semi_sync_source_wait_for_replica_count = 3; or ",
        ),
        (
            {"clients": 1, "needed": 2},
            Severity.WARNING,
            "waits for 2 replicas, and 1 are connected",
            "SET PERSIST rpl_semi_sync_source_wait_for_replica_count = 1",
        ),
        (
            {"waits_alone": False},
            Severity.WARNING,
            "each interruption of the stream ends RPO 0",
            "SET PERSIST rpl_semi_sync_source_wait_no_replica = ON",
        ),
        ({"sync_binlog": 100}, Severity.WARNING, "sync_binlog is 100", "SET PERSIST sync_binlog = 1"),
        ({"timeout": 1.0}, Severity.WARNING, "commits wait 1", "SET PERSIST rpl_semi_sync_source_timeout = 10000"),
    ],
)
def test_what_is_not_as_it_must_be_comes_with_the_statement_to_run(
    changes: dict[str, Any], severity: Severity, words: str, hint: str
) -> None:
    found = worst(replace(MYSQL, **changes))
    assert found.severity is severity
    assert words in found.message
    assert found.hint.startswith(hint)


def test_all_replicas_that_are_waited_for_are_well() -> None:
    assert worst(replace(MYSQL, clients=2, needed=2)).severity is Severity.OK


def test_mariadb_cannot_wait_for_more_than_one_and_forgets_what_is_set() -> None:
    found = worst(replace(MARIADB, clients=2), (10, 11, 19))
    assert found.severity is Severity.ERROR
    assert found.hint.startswith("MariaDB cannot wait for more than one: ")
    found = worst(replace(MARIADB, wait_point="AFTER_COMMIT"), (10, 11, 19))
    assert found.hint == (
        "SET GLOBAL rpl_semi_sync_master_wait_point = AFTER_SYNC; and set it in the server's option file"
    )
