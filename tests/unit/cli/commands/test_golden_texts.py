"""Sentences that were once false or glued together, word for word."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.app.restores.execution import refuse_unconfirmed
from backupd.app.restores.request import RestoreRequest
from backupd.backup.finding import from_error
from backupd.cli.commands.binlog import _points
from backupd.model.errors import DestinationError, RefusedError
from backupd.recovery.windows import Window
from tests.support.catalog import samples

NIGHT = datetime(2026, 11, 22, 3, 4, 5, tzinfo=UTC)
UNREACHABLE = DestinationError(
    "the destination vault cannot be reached",
    hint="look at its host",
    detail="no SSH connection came about:\n [Errno 104] connection reset by peer",
)


def test_a_backup_without_logs_behind_it_is_one_moment_and_no_window_of_no_length() -> None:
    one = Window(NIGHT, NIGHT, "no binary log follows it", "", samples.backup(), None, ("local", "vault"))
    assert _points([one]) == ("2026-11-22 03:04:05Z •", "local,vault", "", "no binary log follows it")
    later = replace(one, begin=NIGHT + timedelta(hours=1), end=NIGHT + timedelta(hours=1), destinations=("local",))
    assert _points([one, later]) == (
        "2026-11-22 03:04:05Z •• 2026-11-22 04:04:05Z",
        "local,vault",
        "",
        "only the moments of 2 backups: no binary log follows it",
    )


def test_what_is_asked_before_tables_are_replaced_claims_no_more_than_is_known() -> None:
    wanted = RestoreRequest("shop-db1", "latest", mode="tables", tables=("shop.orders",), into="shop-db1")
    with pytest.raises(RefusedError) as refused:
        refuse_unconfirmed(wanted, None, asked=False)
    assert str(refused.value) == (
        "the restore replaces live tables on shop-db1 and needs --confirm shop-db1\n"
        "hint: compare first (--compare), then give --confirm shop-db1, or restore under other names (--as)"
    )
    with pytest.raises(RefusedError) as refused:
        refuse_unconfirmed(wanted, "shop-db2", asked=False)
    assert str(refused.value) == (
        "--confirm shop-db2 does not match the target server shop-db1\n"
        "hint: check the name; to replace tables of shop-db1 give --confirm shop-db1"
    )


def test_a_finding_of_check_has_the_evidence() -> None:
    found = from_error("destination vault", UNREACHABLE)
    assert (found.message, found.hint) == (
        "the destination vault cannot be reached: no SSH connection came about:\n [Errno 104] connection reset by peer",
        "look at its host",
    )


def test_a_message_and_its_detail_are_not_glued_together() -> None:
    assert UNREACHABLE.line == (
        "the destination vault cannot be reached: no SSH connection came about: [Errno 104] connection reset by peer"
    )
    assert DestinationError("the destination vault is full").line == "the destination vault is full"
