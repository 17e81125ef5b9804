"""Moments behind what is known to be archived: a transaction may carry any time, and shows nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.model.backup import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.binlog import Branch, BranchReason, Ending, Run, SegmentKey, Stop
from backupd.model.errors import RefusedError
from backupd.model.manifest import Stats
from backupd.model.server import Position
from backupd.recovery.route import RouteLeg
from backupd.recovery.runs import Place
from restore.history import History, Material
from restore.plan import Plan
from restore.planner import Preferences, make_plan
from restore.target import parse_target

BEGIN = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
NOW = BEGIN + timedelta(minutes=20)
BRANCH = Branch("shop", "20261121T110000Z-00000001", BEGIN - timedelta(hours=1), BranchReason.FIRST, "", "mariadb",
                "bin", 1)
BASE = BackupRecord(
    id="20261121T120000Z-00000000", server="shop", kind=BackupKind.PHYSICAL_FULL, state=BackupState.COMPLETE,
    parent=None, started_at=BEGIN, finished_at=BEGIN, stats=Stats(1, 1, 1, 1, 0),
    position=Position("bin.000001", 400, "0-1-1"), flavour="mariadb", server_version="10.11.19",
    tool_version="10.11.19", copies=(Copy("local", "complete", BEGIN),))


def at(minutes: float) -> datetime:
    return BEGIN + timedelta(minutes=minutes)


@dataclass
class Log:
    """Transactions of 100 bytes from 400 on, by their stamps."""

    stamps: tuple[datetime, ...]

    def stop_for_time(self, branch: str, _start: Place, _end: Place, moment: datetime) -> Stop | None:
        for number, stamp in enumerate(self.stamps):
            if stamp > moment:
                return Stop(branch, "bin.000001", 400 + 100 * number, f"0-1-{number + 1}", None, f"0-1-{number + 2}",
                            stamp)
        return None

    def later_before(self, _branch: str, _place: Place, _moment: datetime, _since: datetime) -> Stop | None:
        return None

    def stop_for_gtid(self, _branch: str, _gtid: str, *, before: bool) -> Stop | None:
        del before
        return None

    def stop_for_position(self, _branch: str, _number: int, _pos: int) -> Stop | None:
        return None

    def doubts(self, _branch: str, _start: Place, _stop: Place, _end: Place, _moment: datetime) -> tuple[str, ...]:
        return ()

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        return Material((SegmentKey(leg.branch, 1, 0, stop.pos),), stop.pos, 1, (1,))


def plan(target: str, *stamps: datetime, confirmed: datetime | None, branches: tuple[Branch, ...] = (BRANCH,)) -> Plan:
    run = Run("shop", BRANCH.id, "local", 1, 0, 1, 400 + 100 * len(stamps), "", f"0-1-{len(stamps) + 1}", BEGIN,
              max(stamps), confirmed, 1000, 500, 1, len(stamps), ending=Ending.OPEN)
    return make_plan("shop", [BASE], parse_target(target), Preferences(), now=NOW,
                     history=History(branches, [run], (), Log(stamps)))


def test_a_moment_between_the_confirmation_and_a_transaction_of_the_future_is_refused_with_what_is_certain() -> None:
    for stamp in (at(30), at(19)):  # it is later than now; it has become earlier than now
        with pytest.raises(RefusedError) as refused:
            plan(at(10).isoformat(), at(1), stamp, confirmed=at(5))
        assert "everything up to 2026-11-21T12:05:00Z is there" in refused.value.message
        assert "--to 2026-11-21T12:05:00Z is the last moment that is certain, --to latest all" in refused.value.hint
        assert "`backupd timeline shop`" in refused.value.hint
        assert "nearest recoverable before: 2026-11-21T12:05:00Z" in refused.value.detail


def test_a_moment_that_was_confirmed_is_planned_and_so_is_the_latest() -> None:
    found = plan(at(5).isoformat(), at(1), at(30), confirmed=at(5)).until
    assert found is not None
    assert found.pos == 500
    latest = plan("latest", at(1), at(30), confirmed=at(5)).until
    assert latest is not None
    assert latest.pos == 600


def test_where_the_server_was_never_asked_only_a_time_that_has_come_shows_anything() -> None:
    found = plan(at(10).isoformat(), at(1), at(15), confirmed=None).until
    assert found is not None
    assert found.pos == 500
    with pytest.raises(RefusedError, match="more may have been committed by then"):
        plan(at(10).isoformat(), at(1), at(30), confirmed=None)


def test_a_confirmation_that_has_not_come_yet_shows_nothing() -> None:
    with pytest.raises(RefusedError, match="more may have been committed by then"):
        plan(at(19).isoformat(), at(1), at(2), confirmed=at(25))


def test_the_latest_of_a_branch_that_the_server_left_is_told_to_be_none_of_the_present() -> None:
    later = replace(BRANCH, id="20261121T121500Z-00000002", noticed_at=at(15), since=at(12), parent=BRANCH.id)
    (warning,) = (text for text in plan("latest", at(1), confirmed=at(12), branches=(BRANCH, later)).warnings
                  if "present" in text)
    assert warning.startswith("this is not the server's present history: since 2026-11-21T12:15:00Z it goes on as")
    assert "of which nothing can be restored yet; take a full backup now: backupd backup shop --kind full" in warning
