"""Which promise is tried on which stack: derived from the tests themselves, so that none loses its stacks unnoticed.

``pytest tests/e2e/service/test_coverage.py -s`` prints the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, MYSQL_XTRABACKUP

_ROOT = Path(__file__).parents[3]
STACKS = sorted(str(stack) for stack in (MARIADB, MYSQL_CLONE, MYSQL_XTRABACKUP))
PROMISES: dict[str, tuple[str, ...]] = {
    "backup under load, log from its place": ("e2e/service/test_stacks.py::test_a_backup_under_load",),
    "proof against the witness": ("e2e/service/test_stacks.py::test_a_test_restore_proves",),
    "runbook by hand": ("e2e/service/test_stacks.py::test_the_runbook_followed",),
    "damaged objects": ("e2e/service/test_stacks.py::test_a_damaged_object",),
    "hostile names": ("e2e/backups/test_names.py::test_hostile_names",),
    "increments": ("e2e/service/test_stacks.py::test_each_increment",),
    "increments, definitions change": ("e2e/backups/test_chains.py::test_each_member",),
    "damaged chains": ("e2e/backups/test_chains.py::test_a_removed_swapped_or_foreign",),
    "retention of chains and logs": ("e2e/stores/test_retention.py::test_a_chain_goes",),
    "tables with a DATA DIRECTORY": ("e2e/service/test_stacks.py::test_tables_with_a_data_directory",),
    "encrypted tables": (
        "e2e/stores/test_places.py::test_encrypted",
        "e2e/service/test_stacks.py::test_tables_that_the_server_encrypts",
    ),
    "definitions change meanwhile": ("e2e/backups/test_ddl_soak.py::",),
    "a replica's copy connects nowhere": ("e2e/stores/test_places.py::test_a_copy_of_a_replica",),
    "point in time": (
        "e2e/restores/test_point_in_time.py::test_just_before",
        "e2e/restores/test_point_in_time_mysql.py::test_just_before",
    ),
    "damaged logs": (
        "e2e/restores/test_every_second.py::test_what_is_lost",
        "e2e/restores/test_point_in_time_mysql.py::test_what_is_lost",
    ),
    "statements over temporary tables": (
        "e2e/restores/test_statements.py::test_statements",
        "e2e/restores/test_statements.py::test_mysqls",
    ),
    "log rotates meanwhile": ("e2e/backups/test_rotating.py::",),
    "streams": ("unit/binlog/test_supervisor.py::test_every_file",),
    "streams that are killed": ("unit/binlog/test_killed.py::",),
    "damage in the spool": ("unit/binlog/test_mending.py::test_damage_in_the_spool",),
    "failover": ("e2e/streams/test_branches.py::test_after_a_failover",),
    "failover, never rotated": ("e2e/streams/test_branches.py::test_a_failover_to_a_replica",),
    "crash that lost its tail": ("e2e/streams/test_branches.py::test_after_a_crash",),
    "RESET": (
        "e2e/streams/test_branches.py::test_after_a_reset",
        "e2e/streams/test_branches_mysql.py::test_after_a_reset",
    ),
    "restore in place": (
        "e2e/streams/test_branches.py::test_after_a_restore",
        "e2e/streams/test_branches_mysql.py::test_a_server_that_was_restored",
    ),
    "who answers": ("e2e/restores/test_other_server.py::", "e2e/streams/test_branches_mysql.py::test_who_answers"),
    "one table before a mistake": (
        "e2e/restores/test_one_table.py::test_a_table_comes",
        "e2e/restores/test_one_table_mysql.py::test_a_table_comes",
    ),
    "one schema, tables made since": (
        "e2e/restores/test_one_table.py::test_a_whole_schema",
        "e2e/restores/test_one_table_mysql.py::test_a_whole_schema",
    ),
    "every type of column": ("e2e/restores/test_tables_round_trip.py::test_the_whole_zoo",),
    "disaster, also by hand": ("e2e/stores/test_disaster.py::test_from_a_folder",),
}
"""Of each promise: the beginnings of the names of its tests."""
NOT_BY_CLONE = {"increments, definitions change", "damaged chains", "tables with a DATA DIRECTORY", "encrypted tables"}
"""It takes full backups only, and refuses such tables: tests/unit/engine/physical/test_capture.py."""


@pytest.fixture(scope="module")
def collected() -> dict[str, set[str]]:
    """By name of a test, the stacks of its parameters; one without is MariaDB's."""
    environment = {name: value for name, value in os.environ.items() if name != "BACKUPD_TEST_MYSQLD"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/e2e",
            "tests/unit/binlog",
        ],
        cwd=_ROOT,
        text=True,
        capture_output=True,
        check=True,
        env=environment,
    )
    found: dict[str, set[str]] = defaultdict(set)
    for line in done.stdout.splitlines():
        name, _, parameters = line.removeprefix("tests/").partition("[")
        words = [str(stack) for stack in (MYSQL_CLONE, MYSQL_XTRABACKUP) if str(stack) in parameters]
        found[name] |= set(words or [str(MARIADB)])
    return found


def test_every_promise_is_tried_on_every_stack_that_it_is_made_for(collected: dict[str, set[str]]) -> None:
    missing = {}
    for promise, tests in PROMISES.items():
        there = set[str]().union(*(stacks for name, stacks in collected.items() if name.startswith(tests)))
        print(f"{promise:40}", *(f"{stack if stack in there else '-':18}" for stack in STACKS))
        missing[promise] = set(STACKS) - there
    assert {name for name, stacks in missing.items() if stacks} == NOT_BY_CLONE
    assert all(missing[name] == {str(MYSQL_CLONE)} for name in NOT_BY_CLONE)
