from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import cast

import pytest

from backupd.engine.sql.client import Connection
from backupd.engine.witness import take
from backupd.model.job import Progress
from backupd.model.proof import Check, Tally, Witness
from backupd.model.server_facts import Position
from backupd.process.run_context import RunContext
from restore.datadir.checks import LISTED, SKIPPED, check_sql, check_tables, compare_with_witness, fill_in, verdict
from restore.fetch.sources import Loaded
from restore.whole_server import listed
from tests.support import sample
from tests.support.servers.mariadb import PrivateServer

MOMENT = datetime(2026, 11, 21, 9, 41, 3, 250000, UTC)


@pytest.fixture(scope="module")
def connection(shared_server: PrivateServer) -> Connection:
    return Connection(socket=str(shared_server.socket), user="root")


@pytest.fixture(scope="module")
def witness(connection: Connection) -> Witness:
    return take(connection, server="shop", max_seconds=60)


def test_every_table_of_a_healthy_server_passes_also_its_own(connection: Connection) -> None:
    seen: list[Progress] = []
    check = check_tables(connection, RunContext(workers=2, report=seen.append))
    assert check.outcome == "passed", check.detail
    assert any("mysql" in progress.note for progress in seen)
    assert any("таблица" in progress.note for progress in seen)
    assert max(p.files_done for p in seen) == seen[0].files_total == int(check.detail.split()[0])


def test_a_table_whose_file_is_gone_or_broken_is_named() -> None:
    with PrivateServer() as server:
        server.execute(
            "CREATE DATABASE d",
            "CREATE TABLE d.`gone``t` (a INT PRIMARY KEY)",
            "CREATE TABLE d.broken (a INT PRIMARY KEY, b VARCHAR(2000))",
            "INSERT INTO d.broken SELECT seq, REPEAT('x', 1900) FROM mysql.seq_1_to_200",
            "CREATE TABLE d.good (a INT PRIMARY KEY) ENGINE=MyISAM",
        )
        server.stop()
        (server.datadir / "d/gone@0060t.ibd").unlink()
        with (server.datadir / "d/broken.ibd").open("r+b") as file:
            file.seek(8 * 16384 + 500)
            file.write(b"\xff" * 300)
        server.start()
        check = check_tables(Connection(socket=str(server.socket), user="root"), RunContext(workers=2))
    assert check.outcome == "failed"
    assert "`d`.`gone``t`" in check.detail
    assert "`d`.`broken`" in check.detail
    assert "good" not in check.detail


def test_the_same_data_at_the_same_position_is_proved_equal(connection: Connection, witness: Witness) -> None:
    checks, tally = compare_with_witness(connection, witness, witness.position, RunContext(workers=2))
    assert [check.outcome for check in checks] == ["passed", "passed", "passed"], checks
    assert tally == Tally(len(witness.checksums), 0, 0)
    assert f"tables equal: {tally.equal}, present: 0, not looked at: 0" in checks[0].detail


def test_one_changed_row_one_missing_table_and_one_missing_view_are_named(witness: Witness) -> None:
    with PrivateServer() as copy:
        sample.create(copy)
        copy.execute(
            "UPDATE bank.accounts SET balance = balance + 1 WHERE id = 7",
            "DROP TABLE shop.sales",
            "DROP VIEW shop.order_totals",
        )
        checks, compared = compare_with_witness(
            Connection(socket=str(copy.socket), user="root"),
            witness,
            witness.position,
            RunContext(workers=2),
        )
    assert [check.outcome for check in checks] == ["failed", "failed", "failed"]
    assert "2 of" in checks[0].detail
    assert "`bank`.`accounts`" in checks[0].detail
    assert "`shop`.`sales`" in checks[0].detail
    assert "view `shop`.`order_totals` is not there" in checks[1].detail
    assert "views, not" in checks[2].detail
    assert compared.equal == len(witness.checksums)


def test_at_another_position_nothing_is_compared_and_both_places_are_told(
    connection: Connection, witness: Witness
) -> None:
    other = replace(witness.position, pos=witness.position.pos + 1, gtid="0-9-1")
    (check,), compared = compare_with_witness(connection, witness, other, RunContext(workers=1))
    assert (check.outcome, compared) == ("skipped", Tally())
    assert f":{witness.position.pos}" in check.detail
    assert f":{other.pos}" in check.detail
    (check,), _ = compare_with_witness(connection, None, other, RunContext(workers=1))
    assert (check.outcome, check.detail) == (
        "skipped",
        "there is no witness between this backup and the target, so there is nothing to compare with",
    )
    (check,), _ = compare_with_witness(
        connection, replace(witness, position=Position()), Position(), RunContext(workers=1)
    )
    assert "no binary log" in check.detail


def test_statements_of_the_policy_pass_when_their_first_value_is_true(connection: Connection) -> None:
    checks = check_sql(
        connection,
        [
            "SELECT COUNT(*) > 0 FROM shop.orders WHERE created_at > {target} - INTERVAL 1 YEAR",
            "SELECT COUNT(*)\n  FROM shop.customers WHERE id = -1",
            "SELECT NULL",
            "SELECT id FROM shop.customers WHERE id = -1",
            "SELECT ' 1.5 '",
            "SELECT 1 AS a, '%', {target} = '2026-11-21 09:41:03.25'",
            "SELECT * FROM shop.no_such_table",
            "SELECT @@time_zone = '+00:00'",
            "DELETE FROM shop.orders",
        ],
        target=MOMENT,
    )
    assert [check.outcome for check in checks] == [
        "passed",
        "failed",
        "failed",
        "failed",
        "passed",
        "passed",
        "failed",
        "passed",
        "failed",
    ]
    assert checks[1].name == "SELECT COUNT(*) FROM shop.customers WHERE id = -1"
    assert "returned no row" in checks[3].detail
    assert "no_such_table" in checks[6].detail
    assert "READ ONLY" in checks[8].detail


def test_a_statement_that_takes_too_long_answers_many_rows_or_no_number_fails_and_says_why(
    connection: Connection,
) -> None:
    (late,) = check_sql(
        connection,
        ["SELECT COUNT(*) FROM mysql.seq_1_to_1000000 a JOIN mysql.seq_1_to_1000000 b ON MD5(a.seq) = b.seq + 0.5"],
        target=MOMENT,
        seconds=0.3,
    )
    many, *texts, zero = check_sql(
        connection,
        [
            "SELECT id FROM shop.customers",
            "SELECT 'false'",
            "SELECT 'yes'",
            "SELECT NOW()",
            "SELECT '0.00'",
        ],
        target=MOMENT,
    )
    assert {check.outcome for check in (late, many, zero, *texts)} == {"failed"}
    assert "no answer within 0.3 s" in late.detail
    assert "rows: a check must return one row" in many.detail
    assert all("not a number" in check.detail for check in texts)
    assert zero.detail == "answered '0.00'"


def test_the_moment_is_put_in_as_a_quoted_literal_in_utc_wherever_it_stands() -> None:
    berlin = MOMENT.astimezone(timezone(timedelta(hours=1)))
    for written in ("a > {target}", "a > '{target}'", 'a > "{target}"'):
        assert fill_in(written, berlin) == "a > '2026-11-21 09:41:03.250000'"
    assert fill_in("SELECT '{not this}'", MOMENT) == "SELECT '{not this}'"


def test_a_proof_is_proved_restored_or_failed() -> None:
    def outcome(checks: list[Check], compared: int, error: str = "", unseen: int = 0) -> tuple[str, str]:
        return verdict(checks, Tally(compared, 2, unseen), error=error)

    good, bad = Check("a", "passed"), Check("b", "failed", "2 tables differ")
    assert outcome([good], 3) == ("proved", "")
    assert outcome([good], 3, unseen=1) == ("restored", "")
    assert outcome([good, Check("c", "skipped")], 0) == ("restored", "")
    assert outcome([good, bad], 3) == ("failed", "b: 2 tables differ")
    assert outcome([], 0, "gpg was killed") == ("failed", "gpg was killed")


def test_a_backup_that_lists_no_tables_does_not_pass_the_comparison_with_its_list() -> None:
    """Manifests of earlier versions list none: "passed" would say that all of them are there."""
    last = SimpleNamespace(body=SimpleNamespace(facts=SimpleNamespace(inventory=None)))
    check = listed(cast("Connection", None), cast("Loaded", last))
    assert (check.name, check.outcome) == (LISTED, SKIPPED)
