"""Branches, segments and their copies, and the runs that are folded while they are recorded."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import psycopg
import pytest

from backupd.catalog.session import Catalog, open_catalog
from backupd.model.binlog import Branch, BranchReason, Ending, Gap, Run, Segment, SegmentKey
from backupd.model.errors import NotFoundError
from backupd.model.server_facts import Position
from tests.support.catalog.postgresql import PostgreSQL
from tests.support.catalog.world import runs_of
from tests.support.dice import rounds, thrown

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SERVER = "shop"
FIRST = "20261121T120000Z-00000001"
SECOND = "20261122T120000Z-00000002"


def branch(name: str = FIRST, *, server: str = SERVER, flavour: str = "mariadb") -> Branch:
    return Branch(server, name, NOON, BranchReason.FIRST, "uuid", flavour, "binlog", 1)


def segment(
    number: int,
    start: int = 0,
    end: int = 100,
    ending: Ending = Ending.ROTATED,
    *,
    name: str = FIRST,
    remarks: tuple[str, ...] = (),
    before: str = "",
    after: str = "",
    server: str = SERVER,
) -> Segment:
    """File ``number`` commits one transaction each second, as many as it has bytes."""
    begin = NOON + timedelta(seconds=1_000 * number)
    return Segment(
        server,
        name,
        f"binlog.{number:06d}",
        number,
        start,
        end,
        ending,
        before or f"0-1-{100 * number + start}",
        after or f"0-1-{100 * number + end}",
        transactions=end - start,
        first_at=begin + timedelta(seconds=start),
        last_at=begin + timedelta(seconds=end),
        precise=False,
        server_ids=(1,),
        flavour="mariadb",
        server_version="10.11.19",
        sha256="0" * 64,
        remarks=remarks,
    )


def piece(number: int, start: int, end: int) -> Segment:
    return segment(number, start, end, Ending.OPEN)


def add(catalog: Catalog, *found: Segment, at: str = "local") -> None:
    for one in found:
        catalog.binlogs.add_segment(one, at, one.size // 2, NOON)


def spans(catalog: Catalog, destination: str | None = None) -> list[tuple[int, int, int, int]]:
    return [
        (run.first_number, run.first_pos, run.last_number, run.last_pos)
        for run in catalog.binlogs.runs(SERVER, destination)
    ]


@pytest.fixture
def logs(catalog: Catalog) -> Catalog:
    catalog.binlogs.add_branch(branch())
    return catalog


def test_branches_segments_and_copies_come_back_as_they_were_recorded(logs: Catalog) -> None:
    second = replace(
        branch(SECOND),
        noticed_at=NOON + timedelta(days=1),
        reason=BranchReason.LOST_TAIL,
        since=NOON,
        parent=FIRST,
        fork=Position("binlog.000002", 77, "0-1-5"),
        names_go_on=True,
        note="crashed",
    )
    logs.binlogs.add_branch(second)
    logs.binlogs.add_branch(branch("x", server="other"))
    assert logs.binlogs.branches(SERVER) == (branch(), second)
    entered = replace(second, names_go_on=False, entry=Position("other.000001", 88, "0-1-3"))
    logs.binlogs.add_branch(entered)
    assert logs.binlogs.branches(SERVER) == (branch(), entered)
    logs.binlogs.add_branch(second)
    assert logs.binlogs.branches(SERVER) == (branch(), second)
    logs.binlogs.add_branch(replace(second, note="twice"))
    assert [one.note for one in logs.binlogs.branches(SERVER)] == ["", "twice"]
    assert logs.binlogs.servers() == ("other", SERVER)
    one = replace(segment(1, remarks=("a statement",)), precise=True, server_ids=(1, 4_294_967_295))
    logs.binlogs.add_segment(one, "local", 60, NOON)
    logs.binlogs.add_segment(one, "offsite", 61, NOON + timedelta(seconds=9))
    (record,) = logs.binlogs.segments(SERVER, FIRST)
    assert record.segment == one
    assert (record.stored, sorted(record.destinations)) == (61, ["local", "offsite"])
    assert record.destinations["offsite"].stored_at == NOON + timedelta(seconds=9)
    assert logs.integrity() == []


def test_a_segment_of_an_unknown_branch_is_refused(catalog: Catalog) -> None:
    with pytest.raises(NotFoundError, match="knows no branch"):
        add(catalog, segment(1))
    catalog.binlogs.add_branch(branch())
    with pytest.raises(NotFoundError, match="knows no branch"):
        catalog.binlogs.add_segments([(segment(1), 9), (segment(1, name=SECOND), 9)], "local", NOON)
    assert catalog.binlogs.segments(SERVER, FIRST) == ()
    assert catalog.binlogs.runs(SERVER) == ()


def test_segments_are_given_by_places_in_log_order(logs: Catalog) -> None:
    add(logs, segment(2), piece(3, 0, 40), segment(1), piece(3, 40, 90))

    def keys(**wanted: object) -> list[tuple[int, int]]:
        return [(one.key.number, one.key.start) for one in logs.binlogs.segments(SERVER, FIRST, **wanted)]  # type: ignore[arg-type]  # any filter

    assert keys() == [(1, 0), (2, 0), (3, 0), (3, 40)]
    assert keys(from_position=(2, 99)) == [(2, 0), (3, 0), (3, 40)]
    assert keys(from_position=(2, 100)) == [(3, 0), (3, 40)]
    assert keys(to_position=(3, 0)) == [(1, 0), (2, 0)]
    assert keys(to_position=(3, 41)) == [(1, 0), (2, 0), (3, 0), (3, 40)]
    assert keys(from_position=(1, 50), to_position=(2, 1)) == [(1, 0), (2, 0)]
    add(logs, segment(3, 0, 95))
    assert [one.key.end for one in logs.binlogs.segments(SERVER, FIRST, from_position=(3, 0))] == [95, 40, 90]
    assert [one.key for one in logs.binlogs.each_segment(SERVER, FIRST)] == [
        one.key for one in logs.binlogs.segments(SERVER, FIRST)
    ]


def test_very_many_segments_are_given_one_by_one(logs: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backupd.catalog.binlogs._BATCH", 3)
    add(logs, *(segment(number) for number in range(1, 9)), piece(9, 0, 10), piece(9, 10, 20))
    assert [(one.key.number, one.key.start) for one in logs.binlogs.each_segment(SERVER, FIRST)] == [
        *((number, 0) for number in range(1, 10)),
        (9, 10),
    ]


def test_a_position_is_in_the_whole_file_rather_than_in_a_piece(logs: Catalog) -> None:
    add(logs, piece(1, 0, 40), piece(1, 40, 90), segment(1), piece(2, 0, 40))

    def key(number: int, pos: int) -> tuple[int, int] | None:
        found = logs.binlogs.holding(SERVER, FIRST, number, pos)
        return (found.key.start, found.key.end) if found else None

    assert key(1, 40) == (0, 100)
    assert key(1, 100) == (0, 100), "the end of all there is"
    assert key(1, 101) is None
    assert key(2, 40) == (0, 40)
    add(logs, piece(2, 40, 50))
    assert key(2, 40) == (40, 50)
    assert key(3, 4) is None
    assert logs.binlogs.holding(SERVER, "unknown", 1, 4) is None


def test_a_gtid_is_found_on_every_branch_that_has_it(logs: Catalog) -> None:
    logs.binlogs.add_branch(branch(SECOND))
    add(logs, *(segment(number) for number in range(1, 40) if number != 20), piece(40, 0, 10), piece(40, 10, 20))
    add(logs, segment(7, name=SECOND))

    def found(gtid: str) -> list[tuple[str, int, int]]:
        return [(one.key.branch, one.key.number, one.key.start) for one in logs.binlogs.holding_gtid(SERVER, gtid)]

    assert found("0-1-301") == [(FIRST, 3, 0)]
    assert found("0-1-800") == [(FIRST, 7, 0), (SECOND, 7, 0)]
    assert found("0-1-4011") == [(FIRST, 40, 10)]
    assert found("0-1-2050") == [], "in the gap"
    assert found("0-1-99999") == []
    assert found("5-1-1") == []
    with pytest.raises(ValueError, match="not a GTID"):
        logs.binlogs.holding_gtid(SERVER, "tomorrow")


def test_a_gtid_is_found_where_numbers_of_a_domain_go_back(logs: Catalog) -> None:
    add(
        logs,
        segment(1, before="0-1-1", after="0-1-90"),
        segment(2, before="0-1-90", after="0-2-30"),
        segment(3, before="0-2-30", after="0-2-60"),
    )
    assert [one.key.number for one in logs.binlogs.holding_gtid(SERVER, "0-1-80")] == [1]


def test_gtids_of_mysql_are_found_in_sets_with_holes(catalog: Catalog) -> None:
    uuid = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
    catalog.binlogs.add_branch(branch(flavour="mysql"))
    add(
        catalog,
        replace(segment(1), gtids_before="", gtids_after=""),
        segment(2, before=f"{uuid}:1-5", after=f"{uuid}:1-5:7-9"),
        segment(3, before=f"{uuid}:1-5:7-9", after=f"{uuid}:1-12"),
    )
    assert [one.key.number for one in catalog.binlogs.holding_gtid(SERVER, f"{uuid}:8")] == [2]
    assert [one.key.number for one in catalog.binlogs.holding_gtid(SERVER, f"{uuid}:6")] == [3]


def test_files_that_follow_each_other_are_one_run_and_a_hole_parts_them(logs: Catalog) -> None:
    add(logs, segment(1, remarks=("a",)), segment(2, remarks=("b", "a")), segment(4))
    first, second = logs.binlogs.runs(SERVER)
    assert (first.first_number, first.last_number, first.size, first.stored, first.segments, first.transactions) == (
        1,
        2,
        200,
        100,
        2,
        200,
    )
    assert (first.gtids_before, first.gtids_after, first.remarks) == ("0-1-100", "0-1-300", ("a", "b"))
    assert (first.first_at, first.last_at) == (NOON + timedelta(seconds=1_000), NOON + timedelta(seconds=2_100))
    assert (second.first_number, second.last_number) == (4, 4)
    add(logs, segment(3))
    assert spans(logs) == [(1, 0, 4, 100)]


def test_each_destination_has_its_own_runs(logs: Catalog) -> None:
    add(logs, segment(1), segment(2), segment(3))
    add(logs, segment(1), segment(3), at="offsite")
    assert spans(logs) == [(1, 0, 3, 100), (1, 0, 1, 100), (3, 0, 3, 100)]
    assert spans(logs, "local") == [(1, 0, 3, 100)]


def test_pieces_count_until_their_file_is_whole_and_then_once(logs: Catalog) -> None:
    add(logs, segment(1), piece(2, 0, 40), piece(2, 40, 70))
    assert spans(logs) == [(1, 0, 2, 70)]
    (run,) = logs.binlogs.runs(SERVER)
    assert (run.size, run.segments, run.transactions) == (170, 3, 170)
    add(logs, segment(2))
    (run,) = logs.binlogs.runs(SERVER)
    assert (run.size, run.segments, run.transactions, run.last_pos) == (200, 2, 200, 100)
    logs.binlogs.drop_segments(SERVER, [piece(2, 0, 40).key, piece(2, 40, 70).key], "local")
    assert logs.binlogs.runs(SERVER) == (run,)
    assert len(logs.binlogs.segments(SERVER, FIRST)) == 2


def test_a_piece_whose_file_ends_with_it_is_the_whole_file_everywhere(logs: Catalog) -> None:
    for place in ("local", "offsite"):
        add(logs, segment(1), piece(2, 0, 100), segment(3), at=place)
    assert spans(logs, "local") == [(1, 0, 2, 100), (3, 0, 3, 100)]
    add(logs, segment(2))
    assert spans(logs, "local") == spans(logs, "offsite") == [(1, 0, 3, 100)]
    (record,) = logs.binlogs.segments(SERVER, FIRST, from_position=(2, 0), to_position=(3, 0))
    assert record.segment.ending is Ending.ROTATED


def test_segments_of_a_time_are_given_one_by_one(logs: Catalog) -> None:
    add(logs, *(segment(number) for number in range(1, 6)))
    found = logs.binlogs.each_segment(
        SERVER, FIRST, since=NOON + timedelta(seconds=2_100), until=NOON + timedelta(seconds=4_000)
    )
    assert [one.key.number for one in found] == [2, 3, 4]


def test_a_file_does_not_follow_one_that_may_go_on(logs: Catalog) -> None:
    add(logs, segment(1), piece(2, 0, 40), segment(3))
    assert spans(logs) == [(1, 0, 2, 40), (3, 0, 3, 100)]


def test_a_file_does_not_follow_one_that_had_not_executed_the_same(logs: Catalog) -> None:
    add(logs, segment(1), segment(2, before="0-1-250"), segment(3))
    assert spans(logs) == [(1, 0, 1, 100), (2, 0, 3, 100)]


def test_a_damaged_copy_parts_a_run_and_one_that_was_mended_joins_it_again(logs: Catalog) -> None:
    add(logs, *(segment(number) for number in range(1, 6)))
    logs.binlogs.mark_damaged(SERVER, segment(3).key, "local")
    assert spans(logs) == [(1, 0, 2, 100), (4, 0, 5, 100)]
    assert logs.binlogs.segments(SERVER, FIRST)[2].destinations["local"].state == "damaged"
    whole = [one.key.number for one in logs.binlogs.segments(SERVER, FIRST) if one.destinations["local"].is_complete]
    assert whole == [1, 2, 4, 5]
    logs.binlogs.mark_damaged(SERVER, segment(3).key, "local")
    logs.binlogs.mark_verified(SERVER, [segment(3).key, segment(9).key], "local", NOON)
    assert spans(logs) == [(1, 0, 5, 100)]
    assert logs.binlogs.segments(SERVER, FIRST)[2].destinations["local"].verified_at == NOON
    logs.binlogs.mark_damaged(SERVER, segment(5).key, "local")
    add(logs, segment(5))
    assert spans(logs) == [(1, 0, 5, 100)], "stored afresh"
    with pytest.raises(NotFoundError, match="no copy"):
        logs.binlogs.mark_damaged(SERVER, segment(3).key, "offsite")


def test_the_oldest_files_go_and_the_run_begins_later(logs: Catalog) -> None:
    add(logs, *(segment(number) for number in range(1, 6)))
    add(logs, segment(2), at="offsite")
    logs.binlogs.drop_segments(SERVER, [segment(1).key, segment(2).key, SegmentKey("nowhere", 1, 0, 1)], "local")
    assert spans(logs, "local") == [(3, 0, 5, 100)]
    (run,) = logs.binlogs.runs(SERVER, "local")
    assert (run.first_at, run.size, run.gtids_before) == (NOON + timedelta(seconds=3_000), 300, "0-1-300")
    assert [sorted(one.destinations) for one in logs.binlogs.segments(SERVER, FIRST)] == [
        ["offsite"],
        ["local"],
        ["local"],
        ["local"],
    ], "one without any copy is forgotten"


def test_of_a_file_that_is_there_in_two_lengths_the_longer_one_counts(logs: Catalog) -> None:
    add(logs, segment(1), segment(2, 0, 50, Ending.CUT), segment(3), segment(2))
    (run,) = logs.binlogs.runs(SERVER)
    assert (run.first_number, run.last_number, run.size, run.segments) == (1, 3, 300, 3)
    logs.binlogs.drop_segments(SERVER, [segment(2).key], "local")
    assert spans(logs) == [(1, 0, 2, 50), (3, 0, 3, 100)]


def test_a_run_is_confirmed_up_to_the_servers_clock(logs: Catalog) -> None:
    later = NOON + timedelta(hours=1)
    logs.binlogs.confirm(SERVER, "local", FIRST, (1, 100), NOON)
    assert logs.binlogs.runs(SERVER) == ()
    add(logs, segment(1), piece(2, 0, 40))
    logs.binlogs.confirm(SERVER, "local", FIRST, (1, 100), NOON)
    logs.binlogs.confirm(SERVER, "local", FIRST, (2, 40), later)
    assert [run.confirmed_at for run in logs.binlogs.runs(SERVER)] == [later]
    add(logs, segment(4))
    logs.binlogs.confirm(SERVER, "local", FIRST, (5, 4), later + timedelta(hours=1))
    assert [run.confirmed_at for run in logs.binlogs.runs(SERVER)] == [later, later + timedelta(hours=1)]
    logs.binlogs.mark_damaged(SERVER, piece(2, 0, 40).key, "local")
    assert [run.confirmed_at for run in logs.binlogs.runs(SERVER)] == [None, later + timedelta(hours=1)]
    with pytest.raises(NotFoundError):
        logs.binlogs.confirm(SERVER, "local", "unknown", (1, 4), NOON)


def test_a_moment_of_which_the_logs_are_not_there_any_more_says_nothing(logs: Catalog) -> None:
    """The stream knows what it stored, and not what became of it."""
    later, confirm = NOON + timedelta(hours=1), logs.binlogs.confirm
    add(logs, segment(1), piece(2, 0, 40), piece(2, 40, 90))
    confirm(SERVER, "local", FIRST, (2, 90), NOON)
    logs.binlogs.mark_damaged(SERVER, piece(2, 40, 90).key, "local")
    confirm(SERVER, "local", FIRST, (2, 90), later)
    assert [run.confirmed_at for run in logs.binlogs.runs(SERVER)] == [None]
    logs.binlogs.drop_segments(SERVER, [piece(2, 40, 90).key], "local")
    confirm(SERVER, "local", FIRST, (2, 90), later)
    confirm(SERVER, "local", FIRST, (3, 5), later)
    assert [run.confirmed_at for run in logs.binlogs.runs(SERVER)] == [None]
    add(logs, piece(2, 90, 95))
    seen = logs.standings.count(SERVER)
    confirm(SERVER, "local", FIRST, (2, 60), later)
    assert logs.standings.count(SERVER) == seen
    confirm(SERVER, "local", FIRST, (2, 95), later)
    assert [run.confirmed_at for run in logs.binlogs.runs(SERVER)] == [None, later]
    assert logs.standings.count(SERVER).losses > seen.losses, "a hole came before it"
    logs.binlogs.drop_segments(SERVER, [piece(2, 90, 95).key], "local")
    confirm(SERVER, "local", FIRST, (3, 4), later)
    assert [run.confirmed_at for run in logs.binlogs.runs(SERVER)] == [later], "the head of the next file holds nothing"


def test_gaps_are_told_once_and_can_be_closed(logs: Catalog) -> None:
    gap = Gap(SERVER, FIRST, "", Position("binlog.000003", 400, "0-1-7"), None, NOON, None, "purged", NOON)
    logs.binlogs.add_gap(gap)
    known = replace(
        gap, before=Position("binlog.000005", 4), to_at=NOON + timedelta(hours=1), noticed_at=NOON + timedelta(hours=1)
    )
    logs.binlogs.add_gap(known)
    assert logs.binlogs.gaps(SERVER) == (replace(known, noticed_at=NOON),)
    logs.binlogs.remove_gap(gap)
    assert logs.binlogs.gaps(SERVER) == ()


def test_the_worst_lag_of_each_hour_is_kept(catalog: Catalog) -> None:
    for minute, seconds in ((1, 4.0), (2, 9.5), (3, 2.0), (61, 1.0)):
        catalog.lags.note(SERVER, "local", seconds, NOON + timedelta(minutes=minute))
    catalog.lags.note(SERVER, "offsite", 70.0, NOON)
    assert catalog.lags.worst(SERVER, NOON + timedelta(minutes=30)) == {"local": 9.5, "offsite": 70.0}
    catalog.lags.forget(NOON + timedelta(hours=1))
    assert catalog.lags.worst(SERVER, NOON) == {"local": 1.0}


def test_a_stream_tells_its_state(catalog: Catalog) -> None:
    assert catalog.binlogs.stream_state(SERVER) is None
    catalog.binlogs.set_stream_state(SERVER, {"pid": 7}, NOON)
    catalog.binlogs.set_stream_state(SERVER, {"pid": 8, "state": "streaming"}, NOON)
    assert catalog.binlogs.stream_state(SERVER) == ({"pid": 8, "state": "streaming"}, NOON)


# -- the property


def recomputed(found: Iterable[Segment], destination: str) -> list[Run]:
    """The runs of these segments, from nothing: byte by byte."""
    alive = list(found)
    alive = [
        one
        for one in alive
        if not any(
            other is not one
            and (other.branch, other.number) == (one.branch, one.number)
            and other.start <= one.start
            and one.end <= other.end
            for other in alive
        )
    ]
    alive.sort(key=lambda one: one.key)
    groups: list[list[Segment]] = []
    for one in alive:
        last = groups[-1][-1] if groups else None
        goes_on = (
            last is not None
            and last.branch == one.branch
            and (
                (last.number, last.end) == (one.number, one.start)
                or (
                    last.is_final
                    and last.number + 1 == one.number
                    and one.start == 0
                    and last.gtids_after == one.gtids_before
                )
            )
        )
        if goes_on:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [
        Run(
            SERVER,
            group[0].branch,
            destination,
            group[0].number,
            group[0].start,
            group[-1].number,
            group[-1].end,
            group[0].gtids_before,
            group[-1].gtids_after,
            min(one.first_at for one in group if one.first_at),
            max(one.last_at for one in group if one.last_at),
            None,
            sum(one.size for one in group),
            sum(one.size // 2 for one in group),
            len(group),
            sum(one.transactions for one in group),
            tuple(dict.fromkeys(word for one in group for word in one.remarks)),
            group[-1].ending,
        )
        for group in groups
    ]


def _candidates(rolls: random.Random) -> list[Segment]:
    found = []
    for name in (FIRST, SECOND):
        for number in range(1, 8):
            cuts = sorted({0, 100, *(rolls.randrange(1, 100) for _ in range(rolls.randrange(3)))})
            remarks = (rolls.choice("abc"),) if rolls.random() < 0.3 else ()
            found += [
                segment(number, start, end, Ending.OPEN, name=name, remarks=remarks)
                for start, end in pairwise(cuts)
                if end != 100
            ]
            found.append(
                segment(
                    number,
                    name=name,
                    remarks=remarks,
                    ending=rolls.choice([Ending.ROTATED, Ending.STOPPED, Ending.CUT]),
                    before="0-1-7" if rolls.random() < 0.1 else "",
                )
            )
    return found


def _sorted(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run.branch, run.first_number, run.first_pos))


@pytest.mark.parametrize("number", range(rounds(3)))
def test_runs_folded_on_the_way_are_those_of_all_segments(logs: Catalog, number: int) -> None:
    rolls = thrown(f"folded-{number}")
    logs.binlogs.add_branch(branch(SECOND))
    candidates = _candidates(rolls)
    state: dict[str, dict[SegmentKey, Segment]] = {"local": {}, "offsite": {}}
    damaged: dict[str, dict[SegmentKey, Segment]] = {"local": {}, "offsite": {}}
    for _step in range(60):
        place = rolls.choice(("local", "offsite"))
        here, bad = state[place], damaged[place]
        choice = rolls.random()
        if choice < 0.55 or not here:
            one = rolls.choice(candidates)
            add(logs, one, at=place)
            here[one.key] = one
            bad.pop(one.key, None)
        elif choice < 0.75:
            keys = rolls.sample(sorted(here), rolls.randint(1, min(4, len(here))))
            logs.binlogs.drop_segments(SERVER, keys, place)
            for key in keys:
                del here[key]
        elif choice < 0.9:
            key = rolls.choice(sorted(here))
            logs.binlogs.mark_damaged(SERVER, key, place)
            bad[key] = here.pop(key)
        elif bad:
            key = rolls.choice(sorted(bad))
            logs.binlogs.mark_verified(SERVER, [key], place, NOON)
            here[key] = bad.pop(key)
        for name in ("local", "offsite"):
            segments = state[name].values()
            folded = _sorted(logs.binlogs.runs(SERVER, name))
            assert logs.binlogs.any_at(name) == bool(folded)
            assert folded == recomputed(segments, name)
            assert folded == list(runs_of(segments, name, {one.key: one.size // 2 for one in segments}))


_HOLDING = """
CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
CREATE TRIGGER held BEFORE INSERT ON binlog_runs FOR EACH ROW EXECUTE FUNCTION held();
"""
"""From then on no run is written while somebody holds the advisory lock 1."""
_BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def test_several_writers_of_the_logs_of_one_server_fold_one_run(postgresql: PostgreSQL) -> None:
    """Each goes on from the same run, at one of its ends, and both see it before either has written."""
    url = postgresql.create("logs")
    with (
        open_catalog(url) as catalog,
        psycopg.connect(url, autocommit=True) as holder,
        psycopg.connect(url, autocommit=True) as watcher,
    ):
        catalog.binlogs.add_branch(branch())
        add(catalog, segment(5))
        holder.execute(_HOLDING)
        with ThreadPoolExecutor(3) as pool:
            with holder.transaction():
                holder.execute("SELECT pg_advisory_xact_lock(1)")
                writers = [pool.submit(add, catalog, segment(number)) for number in (4, 6, 6)]
                while watcher.execute(_BLOCKED).fetchone() != (3,):
                    assert [writer.exception() for writer in writers if writer.done()] == []
                    time.sleep(0.02)
            for writer in writers:
                writer.result(600)
        assert holder.execute("SELECT first_number, last_number FROM binlog_runs").fetchall() == [(4, 6)]
        assert spans(catalog) == [(4, 0, 6, 100)]
