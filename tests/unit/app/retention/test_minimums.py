"""What a storage class is paid for in any case is not deleted before, and every decision says so."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, timedelta

import pytest

from backupd.app.retention import preview as minimums
from backupd.app.retention.decisions import solve
from backupd.app.retention.rules import BinlogRun, Decisions, Minimum, Stored, View
from backupd.model.backup_record import BackupKind
from policies.policy import Keep
from tests.support.catalog.installation import SERVER, Installation
from tests.support.stores.stock import START

NOW = START + timedelta(days=400)


def stored(number: int, *, days: float, kept_for: float = 90.0, parent: int | None = None) -> Stored:
    at = NOW - timedelta(days=days)
    kind = BackupKind.PHYSICAL_FULL if parent is None else BackupKind.PHYSICAL_INCREMENTAL
    return Stored(
        f"b{number}",
        kind,
        None if parent is None else f"b{parent}",
        at - timedelta(minutes=5),
        at,
        minimum=Minimum("GLACIER", at + timedelta(days=kept_for), 0.01, "USD"),
    )


def decided(*backups: Stored, runs: tuple[BinlogRun, ...] = (), early: bool = False) -> Decisions:
    keep = Keep.model_validate({"keep_fulls": 1, "early_deletion": early})
    return solve(
        View("shop", "vault", backups, runs, logs_minimum=("GLACIER", timedelta(days=90))), keep, now=NOW, zone=UTC
    )


def test_a_backup_stays_until_its_minimum_is_over_and_says_what_deleting_it_would_cost() -> None:
    found = decided(stored(1, days=100), stored(2, days=30), stored(3, days=1))
    reasons = {one.backup.id: one for one in found.backups}
    assert [one.backup.id for one in found.kept] == ["b3", "b2"]
    assert [ground.rule for ground in reasons["b2"].grounds] == ["minimum"]
    assert (
        reasons["b2"]
        .reasons[0]
        .startswith("deleting it now costs 60 days of minimum storage (GLACIER is paid for until")
    )
    assert "at most 0.60 USD" in reasons["b2"].reasons[0]
    assert not any("minimum" in text for text in reasons["b1"].reasons)
    assert found.stopped == ()


def test_where_the_policy_allows_early_deletion_it_goes_and_the_cost_is_shown() -> None:
    found = decided(stored(2, days=30), stored(3, days=1), early=True)
    assert [one.backup.id for one in found.expired] == ["b2"]
    assert any("costs 60 days of minimum storage" in text for text in found.expired[0].reasons)


def test_what_a_paid_increment_builds_on_stays_with_it() -> None:
    found = decided(stored(1, days=95), stored(2, days=80, parent=1), stored(3, days=1))
    assert {one.backup.id for one in found.kept} == {"b1", "b2", "b3"}


def test_no_binary_logs_are_kept_for_what_is_only_paid_for_and_their_cost_is_shown() -> None:
    runs = (BinlogRun("bin.000001 to bin.000009", NOW - timedelta(days=40), NOW - timedelta(days=20), 10),)
    found = decided(stored(2, days=30), stored(3, days=1), runs=runs)
    assert [one.keep for one in found.runs] == [False]
    assert "costs 70 days of minimum storage" in found.runs[0].reason


def test_the_minimum_of_a_copy_comes_from_the_class_of_its_destination(
    installation: Callable[..., Installation], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installation("{local: {keep_fulls: 1}}")
    for number, days in ((1, 200.0), (2, 100.0), (3, 1.0)):
        here.add(number, days=days)
    record = here.catalog.backups.list(SERVER)[0]
    assert minimums.minimum_of(here.wiring, record.copies[0], record.stats) is None
    assert minimums.logs_minimum(here.wiring, "local") is None
    monkeypatch.setattr("storage.config.BaseDestinationConfig.kept_in", lambda _self, logs: "DEEP_ARCHIVE")
    assert minimums.logs_minimum(here.wiring, "local") == ("DEEP_ARCHIVE", timedelta(days=180))
    assert minimums.logs_minimum(here.wiring, "gone") is None
    (found,) = minimums.preview(here.wiring, SERVER, now=here.clock())
    assert [one.keep for one in found.backups] == [True, True, False]
    assert found.backups[1].as_json()["rules"] == ["minimum"]
