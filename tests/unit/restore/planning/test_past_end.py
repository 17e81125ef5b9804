"""Moments behind what is known to be archived: a transaction may carry any time, and shows nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.binlog import Branch, BranchReason, Ending, FilePosition, Run, SegmentKey, Stop
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position
from backupd.recovery.windows import RouteLeg
from restore.planning.plan import Plan
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import OlderError, Stream, parse_target
from restore.planning.target_resolution import History, Material

BEGIN = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
NOW = BEGIN + timedelta(minutes=20)
BRANCH = Branch(
    "shop", "20261121T110000Z-00000001", BEGIN - timedelta(hours=1), BranchReason.FIRST, "", "mariadb", "bin", 1
)
BASE = BackupRecord(
    id="20261121T120000Z-00000000",
    server="shop",
    kind=BackupKind.PHYSICAL_FULL,
    state=BackupState.COMPLETE,
    parent=None,
    started_at=BEGIN,
    finished_at=BEGIN,
    stats=Stats(1, 1, 1, 1, 0),
    position=Position("bin.000001", 400, "0-1-1"),
    flavour="mariadb",
    server_version="10.11.19",
    tool_version="10.11.19",
    copies=(Copy("local", "complete", BEGIN),),
)
DEFAULT = Preferences()


def at(minutes: float) -> datetime:
    return BEGIN + timedelta(minutes=minutes)


@dataclass
class Log:
    """Transactions of 100 bytes from 400 on, by their stamps."""

    stamps: tuple[datetime, ...]

    def stop_for_time(
        self, branch: str, _start: FilePosition, _end: FilePosition, moment: datetime, _since: datetime
    ) -> Stop | None:
        for number, stamp in enumerate(self.stamps):
            if stamp > moment:
                return Stop(
                    branch, "bin.000001", 400 + 100 * number, f"0-1-{number + 1}", None, f"0-1-{number + 2}", stamp
                )
        return None

    def later_before(self, _branch: str, _place: FilePosition, _moment: datetime, _since: datetime) -> Stop | None:
        return None

    def stop_for_gtid(self, _branch: str, _gtid: str, *, before: bool) -> Stop | None:
        del before
        return None

    def stop_for_position(self, _branch: str, _number: int, _pos: int) -> Stop | None:
        return None

    def doubts(
        self, _branch: str, _start: FilePosition, _stop: FilePosition, _end: FilePosition, _moment: datetime
    ) -> tuple[str, ...]:
        return ()

    def repeats(self, _leg: RouteLeg) -> bool:
        return False

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        return Material((SegmentKey(leg.branch, 1, 0, stop.pos),), stop.pos, 1, (1,))


def plan(
    target: str,
    *stamps: datetime,
    confirmed: datetime | None,
    branches: tuple[Branch, ...] = (BRANCH,),
    preferences: Preferences = DEFAULT,
    more: tuple[Run, ...] = (),
) -> Plan:
    run = Run(
        "shop",
        BRANCH.id,
        "local",
        1,
        0,
        1,
        400 + 100 * len(stamps),
        "",
        f"0-1-{len(stamps) + 1}",
        BEGIN,
        max(stamps),
        confirmed,
        1000,
        500,
        1,
        len(stamps),
        ending=Ending.OPEN,
    )
    return make_plan(
        "shop",
        [BASE],
        parse_target(target),
        preferences,
        now=NOW,
        history=History(branches, [run, *more], (), Log(stamps)),
    )


def test_a_moment_between_the_confirmation_and_a_transaction_of_the_future_is_refused_with_what_is_certain() -> None:
    for stamp in (at(30), at(19)):  # it is later than now; it has become earlier than now
        with pytest.raises(RefusedError) as refused:
            plan(at(10).isoformat(), at(1), stamp, confirmed=at(5))
        assert "everything up to 2026-11-21T12:05:00Z is there" in refused.value.message
        assert "--to 2026-11-21T12:05:00Z is the last certain moment, --to latest all" in refused.value.hint
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


LATER = replace(
    BRANCH,
    id="20261121T121500Z-00000002",
    noticed_at=at(15),
    since=at(12),
    parent=BRANCH.id,
    reason=BranchReason.FAILOVER,
)
ACCEPTED = Preferences(accept_older=True)


def test_the_latest_of_a_branch_that_the_server_left_is_refused_with_both_moments() -> None:
    beyond = Run("shop", LATER.id, "local", 1, 0, 1, 900, "", "0-2-9", at(16), at(17), at(18), 900, 500, 1, 3)
    with pytest.raises(OlderError) as refused:
        plan("latest", at(1), confirmed=at(12), branches=(BRANCH, LATER), more=(beyond,))
    assert str(refused.value) == (
        "--to latest would end at 2026-11-21T12:12:00Z, but later transactions are known to exist, up to "
        "2026-11-21T12:18:00Z\n"
        "detail: shop: this is not the server's present history: since 2026-11-21T12:15:00Z it continues as branch "
        "20261121T121500Z-00000002 (failover), of which nothing can be restored yet\n"
        "hint: take a full backup now: backupd backup shop --kind full; to restore up to "
        "2026-11-21T12:12:00Z anyway: --accept-older"
    )
    accepted = plan("latest", at(1), confirmed=at(12), branches=(BRANCH, LATER), more=(beyond,), preferences=ACCEPTED)
    assert accepted.older is not None
    assert (accepted.older.ends, accepted.older.known) == (at(12), at(18))
    assert accepted.warnings[0].startswith(
        "not the newest data: the restore ends at 2026-11-21T12:12:00Z; later "
        "transactions are known to exist, up to 2026-11-21T12:18:00Z: this is not the"
    )
    assert plan(f"latest@{BRANCH.id}", at(1), confirmed=at(12), branches=(BRANCH, LATER)).older is None, "it was named"


def test_a_latest_in_front_of_a_gap_is_refused_unless_nothing_is_missing_in_it() -> None:
    def behind(gtids: str, transactions: int) -> Run:
        return Run(
            "shop", BRANCH.id, "local", 5, 0, 5, 900, "0-1-40", gtids, at(6), at(7), at(19), 900, 500, 1, transactions
        )

    with pytest.raises(OlderError, match=r"end at 2026-11-21T12:05:00Z, .* up to 2026-11-21T12:19:00Z") as refused:
        plan("latest", at(1), confirmed=at(5), more=(behind("0-1-44", 4),))
    assert "gap: the binary logs between bin.000001:500 and bin.000005:0 are missing" in refused.value.detail
    with pytest.raises(OlderError):  # nor does a name help against it
        plan(f"latest@{BRANCH.id}", at(1), confirmed=at(5), more=(behind("0-1-44", 4),))
    assert plan("latest", at(1), confirmed=at(5), more=(behind("0-1-2", 0),)).older is None, "no transaction is there"


def test_a_stream_that_failed_or_is_late_is_refused_and_one_that_is_behind_for_a_moment_is_not() -> None:
    def latest(stream: Stream, minutes: float = 5) -> Plan:
        return plan("latest", at(1), confirmed=at(minutes), preferences=Preferences(stream=stream))

    with pytest.raises(OlderError) as refused:
        latest(Stream("the stream of shop is failed since 2026-11-21T12:04:00Z: the account is gone", failed=True))
    assert str(refused.value) == (
        "--to latest would end at 2026-11-21T12:05:00Z, but later transactions may exist, up to 2026-11-21T12:20:00Z\n"
        "detail: shop: the stream of shop is failed since 2026-11-21T12:04:00Z: the account is gone\n"
        "hint: to find the cause: backupd binlog status shop; to restore up to 2026-11-21T12:05:00Z anyway: "
        "--accept-older"
    )
    with pytest.raises(OlderError) as refused:
        latest(Stream(limit=timedelta(minutes=10), promised=True))
    assert refused.value.detail == ("shop: the newest recoverable moment is 15m old; objectives.rpo is 10m")
    within = latest(Stream("the stream of shop is paused", limit=timedelta(minutes=20), promised=True))
    assert within.older is None
    assert within.warnings == ("the stream of shop is paused; the newest recoverable moment is 15m old",)
    assert latest(Stream(limit=timedelta(minutes=20))).warnings == ("the newest recoverable moment is 15m old",)
    assert latest(Stream(limit=timedelta(minutes=20)), 19.5).warnings == ()


def test_a_server_that_does_not_answer_has_committed_nothing_that_is_known() -> None:
    """It is down, say, which is why it is restored."""
    gone = Stream(
        "the stream of shop is waiting since 2026-11-21T12:05:03Z: the server cannot be reached",
        unseen_since=at(5.05),
        limit=timedelta(minutes=1),
        promised=True,
    )
    found = plan("latest", at(1), confirmed=at(5), preferences=Preferences(stream=gone))
    assert found.older is None
    assert found.warnings == (f"{gone.trouble}; the newest recoverable moment is 15m old",)
    unknown = Stream("the binary log of shop has never been streamed", limit=None)  # a catalog made anew elsewhere
    assert plan("latest", at(1), confirmed=None, preferences=Preferences(stream=unknown)).older is None


def test_a_backup_alone_is_late_only_where_its_stream_does_not_go_on() -> None:
    def latest(stream: Stream | None) -> Plan:
        return make_plan("shop", [BASE], parse_target("latest"), Preferences(stream=stream), now=NOW)

    limit = timedelta(minutes=1)
    assert latest(None).older is None
    assert latest(Stream(limit=limit)).older is None
    with pytest.raises(OlderError, match="later transactions may exist"):
        latest(Stream("the binary log of shop is not streamed now", limit=limit, promised=True))
