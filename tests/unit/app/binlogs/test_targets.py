"""Where targets lie in archived logs: made up transactions, really sealed, stored and recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.binlogs.targets import Targets
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import open_catalog
from backupd.model.binlog import STATEMENTS, TEMPORARY, Ending, FilePosition, ReplayLeg, Stop, Transaction
from backupd.model.errors import ConfigurationError, DamagedError, RefusedError
from backupd.model.server_facts import Position
from backupd.recovery.windows import RouteLeg, Span
from storage import layout
from tests.support.catalog.installation import SERVER, Installation
from tests.support.keys import Keys
from tests.support.restores.stored_segments import BASE, BRANCH, branch, segment, store_segment, transaction

FIRST = [transaction(1, 200, 300, 1), transaction(2, 300, 400, 2), transaction(3, 450, 600, 3)]
SECOND = [transaction(4, 150, 250, 3), transaction(5, 250, 400, 9), transaction(6, 400, 500, 4)]
THIRD = [transaction(7, 500, 650, 10), transaction(8, 650, 700, 12)]


@dataclass
class Archived:
    installation: Installation
    targets: Targets
    folder: Path


@pytest.fixture
def archived(tmp_path: Path, keys: Keys) -> Iterator[Archived]:
    """bin.000001 whole; of bin.000002 two pieces, and what both hold as one."""
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        installation = Installation(tmp_path, catalog, destinations=("local", "offsite"))
        file = tmp_path / "backupd.yaml"
        scratch = f"restore: {{gnupg_home: {keys.secret_home}, scratch: {{path: {tmp_path}/scratch}}}}\n"
        file.write_text(file.read_text() + scratch)
        installation.wiring = Wiring(load_settings(file), catalog, installation.clock)
        for name in ("local", "offsite"):
            assert installation.wiring.destination(name).is_initialised()
        catalog.binlogs.add_branch(branch())
        put(installation, keys, 1, 0, 640, Ending.ROTATED, FIRST, "", "0-1-3")
        put(installation, keys, 2, 0, 500, Ending.OPEN, SECOND, "0-1-3", "0-1-6")
        put(installation, keys, 2, 500, 700, Ending.OPEN, THIRD, "0-1-6", "0-1-8")
        put(installation, keys, 2, 0, 700, Ending.OPEN, [*SECOND, *THIRD], "0-1-3", "0-1-8")
        yield Archived(installation, Targets(installation.wiring, SERVER, [branch()], prefer=("local",)), tmp_path)


def put(
    installation: Installation,
    keys: Keys,
    number: int,
    start: int,
    end: int,
    ending: Ending,
    transactions: Sequence[Transaction],
    before: str,
    after: str,
    **values: object,
) -> None:
    draft = replace(segment(number, start, end, ending, transactions, before=before, after=after), server=SERVER)
    draft = replace(draft, **values)  # type: ignore[arg-type]  # fields by name
    destinations = [installation.wiring.destination(name) for name in ("local", "offsite")]
    found = store_segment(draft, transactions, destinations, keys, installation.base)
    for destination in destinations:
        installation.wiring.catalog.binlogs.add_segment(found, destination.name, 100, BASE + timedelta(hours=1))


def test_a_time_lies_before_the_first_transaction_in_log_order_that_committed_later(archived: Archived) -> None:
    def at(seconds: float) -> Stop | None:
        return archived.targets.stop_for_time(BRANCH, (1, 300), (2, 700), BASE + timedelta(seconds=seconds), BASE)

    assert at(2) == Stop(
        BRANCH, "bin.000001", 450, "0-1-2", BASE + timedelta(seconds=2), "0-1-3", BASE + timedelta(seconds=3)
    )
    # bin.000002 holds a later one before an earlier one: everything from there on is left out.
    stop = at(5)
    assert stop is not None
    assert (stop.file, stop.pos, stop.gtids, stop.next_gtid) == ("bin.000002", 250, "0-1-4", "0-1-5")
    before_all = at(0)
    assert before_all is not None
    assert (before_all.pos, before_all.at) == (300, None)
    assert at(12) is None
    assert archived.targets.stop_for_time(BRANCH, (1, 300), (2, 250), BASE + timedelta(seconds=5), BASE) is None


def test_whole_seconds_and_clocks_that_went_back_leave_doubts_that_are_named(archived: Archived) -> None:
    moment = BASE + timedelta(seconds=4, milliseconds=250)
    (turned,) = archived.targets.doubts(BRANCH, (1, 300), (2, 250), (2, 700), moment)
    assert "0-1-6 at bin.000002:400" in turned
    same, *_ = archived.targets.doubts(BRANCH, (1, 300), (2, 250), (2, 250), BASE + timedelta(seconds=3))
    assert "2 transactions" in same
    assert "from 0-1-3 at bin.000001:450" in same
    assert "0-1-4 at bin.000002:150" in same
    assert archived.targets.doubts(BRANCH, (1, 300), (2, 500), (2, 700), BASE + timedelta(seconds=7)) == ()


def test_a_time_that_a_session_set_into_the_future_ends_no_replay_and_is_named(archived: Archived, keys: Keys) -> None:
    put(
        archived.installation,
        keys,
        3,
        0,
        900,
        Ending.OPEN,
        [
            transaction(9, 150, 250, 13),
            transaction(10, 250, 400, 10**9),
            transaction(11, 400, 500, 14),
            transaction(12, 500, 600, 10**9),
            transaction(13, 600, 700, 20),
        ],
        "0-1-8",
        "0-1-13",
    )
    moment = BASE + timedelta(seconds=15)
    stop = archived.targets.stop_for_time(BRANCH, (1, 300), (3, 900), moment, BASE)
    assert stop is not None
    assert (stop.file, stop.pos, stop.next_gtid) == ("bin.000003", 500, "0-1-12")
    assert stop.at == BASE + timedelta(seconds=14)
    before, behind = archived.targets.doubts(BRANCH, (1, 300), (3, 500), (3, 900), moment)
    assert "0-1-10 at bin.000003:250" in before
    assert "it is replayed" in before
    assert "0-1-12 at bin.000003:500" in behind
    assert "not replayed" in behind
    late = BASE + timedelta(seconds=30)
    assert archived.targets.stop_for_time(BRANCH, (1, 300), (3, 900), late, BASE) is None


def test_a_time_that_a_session_set_into_the_past_right_behind_a_target_is_not_replayed(
    archived: Archived, keys: Keys
) -> None:
    put(
        archived.installation,
        keys,
        3,
        0,
        900,
        Ending.OPEN,
        [
            transaction(9, 150, 250, -(10**9)),
            transaction(10, 250, 400, 14),
            transaction(11, 400, 500, -(10**9)),
            transaction(12, 500, 600, -(10**9)),
            transaction(13, 600, 700, 20),
        ],
        "0-1-8",
        "0-1-13",
    )
    put(
        archived.installation,
        keys,
        3,
        900,
        1000,
        Ending.OPEN,
        [transaction(14, 900, 1000, -(10**9))],
        "0-1-13",
        "0-1-14",
    )

    def at(seconds: float, end: tuple[int, int] = (3, 1000), start: tuple[int, int] = (1, 300)) -> Stop | None:
        return archived.targets.stop_for_time(BRANCH, start, end, BASE + timedelta(seconds=seconds), BASE)

    first = at(15)
    assert first is not None
    assert (first.file, first.pos, first.next_gtid) == ("bin.000003", 400, "0-1-11"), "what may be the mistake"
    assert first.at == BASE + timedelta(seconds=14)
    told = "\n".join(archived.targets.doubts(BRANCH, (1, 300), (3, 400), (3, 1000), BASE + timedelta(seconds=15)))
    for gtid in ("0-1-11", "0-1-12", "0-1-14"):
        assert f"{gtid} at bin.000003" in told
    # Behind the last of all, too, and where a replay begins with it; but for what was archived by then.
    assert (last := at(25)) is not None
    assert last.next_gtid == "0-1-14"
    assert (only := at(25, start=(3, 900))) is not None
    assert only.next_gtid == "0-1-14"
    assert at(7200) is None


def test_a_time_some_hours_ahead_ends_no_replay_where_all_that_follows_contradicts_it(
    archived: Archived, keys: Keys
) -> None:
    late = [transaction(9, 150, 200, 7200), *(transaction(10 + n, 200 + n, 201 + n, 20 + n) for n in range(30))]
    put(archived.installation, keys, 3, 0, 900, Ending.OPEN, late, "0-1-8", "0-1-39")
    moment = BASE + timedelta(seconds=40.5)
    stop = archived.targets.stop_for_time(BRANCH, (1, 300), (3, 900), moment, BASE)
    assert stop is not None
    assert stop.next_gtid == "0-1-31"
    told = archived.targets.doubts(BRANCH, (1, 300), (3, stop.pos), (3, 900), moment)
    assert any("0-1-9 at" in line and "it is replayed" in line for line in told)
    assert archived.targets.later_before(BRANCH, (3, 230), BASE + timedelta(seconds=60), BASE) is None
    # Two hours later it is no longer ahead of the target, and what follows it is not behind it.
    put(
        archived.installation,
        keys,
        3,
        900,
        1000,
        Ending.OPEN,
        [transaction(40, 900, 950, 8000), transaction(41, 950, 1000, 9000)],
        "0-1-39",
        "0-1-41",
    )
    passed = archived.targets.stop_for_time(BRANCH, (1, 300), (3, 1000), BASE + timedelta(seconds=8500), BASE)
    assert passed is not None
    assert passed.next_gtid == "0-1-41"
    passed = archived.targets.stop_for_time(BRANCH, (1, 300), (3, 1000), BASE + timedelta(seconds=7500), BASE)
    assert passed is not None
    assert passed.next_gtid == "0-1-40"
    # A few that follow say nothing, nor does a clock that was set back, nor what is stamped with older times.
    few = archived.targets.stop_for_time(BRANCH, (1, 300), (3, 900), BASE + timedelta(seconds=25), BASE)
    assert few is not None
    assert few.next_gtid == "0-1-9"
    back = [transaction(40 + n, 20 + n, 21 + n, 3600 * n) for n in range(2)]
    back += [transaction(50 + n, 50 + n, 51 + n, -1 - n) for n in range(30)]
    put(archived.installation, keys, 4, 0, 900, Ending.OPEN, back, "0-1-39", "0-1-79")
    earliest = archived.targets.stop_for_time(BRANCH, (4, 4), (4, 900), BASE + timedelta(seconds=5), BASE)
    assert earliest is not None
    assert earliest.next_gtid == "0-1-41"


def test_a_gtid_lies_where_it_begins_or_where_all_of_it_is_executed(archived: Archived) -> None:
    before = archived.targets.stop_for_gtid(BRANCH, "0-1-7", before=True)
    assert before is not None
    assert (before.file, before.pos, before.gtids, before.next_gtid) == ("bin.000002", 500, "0-1-6", "0-1-7")
    after = archived.targets.stop_for_gtid(BRANCH, "0-1-3", before=False)
    assert after is not None
    assert (after.file, after.pos, after.gtids, after.next_gtid) == ("bin.000001", 600, "0-1-3", "0-1-4")
    assert archived.targets.stop_for_gtid(BRANCH, "0-1-9", before=True) is None
    assert archived.targets.stop_for_gtid(BRANCH, "0-1-9", before=False) is None
    # A transaction of another server with the same number, on another branch, is not this one.
    for other in ("0-2-3", "0-2-5", "0-2-8"):
        assert archived.targets.stop_for_gtid(BRANCH, other, before=False) is None


def put_out_of_order(archived: Archived, keys: Keys) -> None:
    """As a server of MariaDB that is not in strict mode writes what other servers, or sessions, number."""
    installation = archived.installation
    put(
        installation,
        keys,
        3,
        0,
        500,
        Ending.ROTATED,
        [transaction(0, 200, 300, 20, gtid="0-1-1000"), transaction(0, 300, 400, 21, gtid="0-1-1001")],
        "0-1-8",
        "0-1-1001",
    )
    put(
        installation,
        keys,
        4,
        0,
        500,
        Ending.ROTATED,
        [transaction(0, 200, 300, 22, gtid="0-77-500"), transaction(0, 300, 400, 23, gtid="0-1-1002")],
        "0-1-1001",
        "0-1-1002",
        server_ids=(1, 77),
    )
    put(
        installation,
        keys,
        5,
        0,
        600,
        Ending.ROTATED,
        [
            transaction(0, 200, 300, 24, gtid="5-1-1"),
            transaction(0, 300, 400, 25, gtid="0-1-1003"),
            transaction(0, 400, 500, 26, gtid="0-1-2000"),
            transaction(0, 500, 600, 27, gtid="0-1-1003"),
        ],
        "0-1-1002",
        "0-1-1003,5-1-1",
    )


def test_a_gtid_is_the_transaction_of_that_very_name_where_numbers_go_back(archived: Archived, keys: Keys) -> None:
    put_out_of_order(archived, keys)

    def after(gtid: str) -> tuple[str, int, str, str] | None:
        stop = archived.targets.stop_for_gtid(BRANCH, gtid, before=False)
        return (stop.file, stop.pos, stop.gtids, stop.next_gtid) if stop else None

    assert after("0-77-500") == ("bin.000004", 300, "0-77-500", "0-1-1002")
    assert after("0-1-1002") == ("bin.000004", 400, "0-1-1002", "5-1-1")
    assert after("0-1-3") == ("bin.000001", 600, "0-1-3", "0-1-4")
    for gtid, pos in (("0-77-500", 200), ("0-1-1002", 300)):
        before = archived.targets.stop_for_gtid(BRANCH, gtid, before=True)
        assert before is not None
        assert (before.file, before.pos, before.next_gtid) == ("bin.000004", pos, gtid)
    # The state that both domains were in, though no single transaction is named so.
    assert after("0-1-1002,5-1-1") == ("bin.000005", 300, "0-1-1002,5-1-1", "0-1-1003")
    for invented in ("0-4242-1001", "0-4242-700", "0-1-700", "0-77-501", "0-1-9999", "0-1-1002,5-2-1", "7-1-1"):
        assert after(invented) is None, invented
        if "," not in invented:
            assert archived.targets.stop_for_gtid(BRANCH, invented, before=True) is None
    with pytest.raises(RefusedError) as refused:
        after("0-1-1003")
    assert "bin.000005:300" in refused.value.detail
    assert "bin.000005:500" in refused.value.detail


def test_a_state_that_the_archive_begins_with_is_a_place_though_its_transactions_are_not_there(
    archived: Archived, keys: Keys
) -> None:
    put(archived.installation, keys, 8, 0, 500, Ending.ROTATED, [transaction(30, 200, 300, 30)], "0-1-29", "0-1-30")
    stop = archived.targets.stop_for_gtid(BRANCH, "0-1-29", before=False)
    assert stop is not None
    assert (stop.file, stop.pos, stop.gtids) == ("bin.000008", 4, "0-1-29")
    for other in ("0-2-29", "0-1-28"):
        assert archived.targets.stop_for_gtid(BRANCH, other, before=False) is None
    assert archived.targets.stop_for_gtid(BRANCH, "0-1-29", before=True) is None


def test_a_gtid_is_found_without_looking_through_all_segments(
    archived: Archived, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    binlogs = archived.installation.catalog.binlogs
    whole = type(binlogs).each_segment

    def each(self: object, server: str, branch: str, **where: object) -> object:
        asked.append(where.get("from_position"))
        return whole(self, server, branch, **where)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(type(binlogs), "each_segment", each)
    assert archived.targets.stop_for_gtid(BRANCH, "0-1-7", before=False) is not None
    assert archived.targets.stop_for_gtid(BRANCH, "0-1-7", before=True) is not None
    assert asked
    assert set(asked) == {(2, 0)}


def test_times_later_than_a_moment_are_found_in_front_of_a_place_as_far_as_the_log_is_young(archived: Archived) -> None:
    def before(position: FilePosition, seconds: float, since: float) -> str | None:
        stop = archived.targets.later_before(
            BRANCH, position, BASE + timedelta(seconds=seconds), BASE + timedelta(seconds=since)
        )
        return stop.next_gtid if stop else None

    assert before((2, 500), 5, -100) == "0-1-5"
    assert before((2, 250), 5, -100) is None  # it lies behind the position
    assert before((2, 500), 9, -100) is None
    assert before((2, 500), 5, 3.5) == "0-1-5"
    assert before((2, 500), 5, 4) is None  # 0-1-6, behind it, is of before then
    assert before((2, 700), 5, 4) == "0-1-7"
    assert before((2, 500), 1, -100) == "0-1-2"
    assert before((2, 500), 1, 2) == "0-1-3"


def test_a_place_is_one_between_two_transactions_or_refused_with_both(archived: Archived) -> None:
    for number, pos, gtids in (
        (1, 4, ""),
        (1, 300, "0-1-1"),
        (1, 400, "0-1-2"),
        (1, 450, "0-1-2"),
        (1, 640, "0-1-3"),
        (2, 4, "0-1-3"),
        (2, 700, "0-1-8"),
    ):
        found = archived.targets.stop_for_position(BRANCH, number, pos)
        assert found is not None, (number, pos)
        assert (found.pos, found.gtids) == (pos, gtids)
    for pos, below, above in ((350, 300, 400), (420, 400, 450), (620, 600, 640), (100, 4, 200)):
        with pytest.raises(RefusedError) as refused:
            archived.targets.stop_for_position(BRANCH, 1, pos)
        assert refused.value.detail.split() == [
            "nearest",
            "before:",
            f"bin.000001:{below}",
            "nearest",
            "after:",
            f"bin.000001:{above}",
        ]
    assert archived.targets.stop_for_position(BRANCH, 2, 701) is None
    assert archived.targets.stop_for_position(BRANCH, 3, 4) is None


def test_what_a_leg_replays_is_counted_to_the_transaction_and_whole_files_go_before_pieces(archived: Archived) -> None:
    start, end = Position("bin.000001", 300, "0-1-1"), (2, 400)
    stop = Stop(BRANCH, "bin.000002", 400, "0-1-5")
    leg = RouteLeg(BRANCH, (Span(BRANCH, (1, 300), end),), start, stop.position)
    found = archived.targets.material(leg, stop)
    assert [(key.number, key.start, key.end) for key in found.segments] == [(1, 0, 640), (2, 0, 700)]
    assert (found.size, found.transactions, found.server_ids, found.repeated) == (340 + 400, 4, (1,), 0)


def test_a_leg_tells_in_how_many_of_its_segments_statements_changed_data(archived: Archived, keys: Keys) -> None:
    for number, remarks in ((3, ()), (4, (STATEMENTS,)), (5, (TEMPORARY, STATEMENTS))):
        put(
            archived.installation,
            keys,
            number,
            0,
            500,
            Ending.ROTATED,
            [transaction(number, 200, 300, 9)],
            "0-1-8",
            "0-1-8",
            remarks=remarks,
        )
    stop = Stop(BRANCH, "bin.000005", 500, "0-1-8")
    leg = RouteLeg(BRANCH, (Span(BRANCH, (3, 4), (5, 500)),), Position("bin.000003", 4, "0-1-8"), stop.position)
    assert archived.targets.material(leg, stop).by_statements == 2


def test_a_sequence_of_files_that_is_entered_at_its_beginning_tells_what_it_repeats(archived: Archived) -> None:
    stop = Stop(BRANCH, "bin.000002", 700, "0-1-8")
    leg = RouteLeg(BRANCH, (Span(BRANCH, (1, 0), (2, 700)),), Position("bin.000001", 4, "0-1-4"), stop.position)
    assert archived.targets.material(leg, stop).repeated == 4


def test_a_leg_is_cut_where_a_witness_was_taken(archived: Archived) -> None:
    stop = Stop(BRANCH, "bin.000002", 650, "0-1-7")
    start = Position("bin.000001", 300, "0-1-1")
    material = archived.targets.material(
        RouteLeg(BRANCH, (Span(BRANCH, (1, 300), (2, 650)),), start, stop.position), stop
    )
    leg = ReplayLeg(material.segments, start, stop, material.size, material.transactions)
    first, rest = archived.targets.split(leg, Position("bin.000002", 400, "0-1-5"))
    assert (first.stop.gtids, first.transactions, rest.transactions) == ("0-1-5", 4, 2)
    assert first.size + rest.size == leg.size
    assert rest.start == Position("bin.000002", 400, "0-1-5")
    assert [key.number for key in rest.segments] == [2]
    assert archived.targets.split(leg, Position("bin.000002", 650, "0-1-7")) == (leg,)
    for elsewhere in (
        Position("bin.000002", 410, ""),
        Position("bin.000001", 300, "0-1-1"),
        Position(),
        Position("bin.000002", 400, "0-1-99"),
        Position("other.000002", 400, ""),
    ):
        assert archived.targets.split(leg, elsewhere) == ()


def test_an_index_is_read_from_another_place_where_one_has_it_no_more(archived: Archived) -> None:
    damage(archived, "local")
    assert archived.targets.stop_for_gtid(BRANCH, "0-1-7", before=True) is not None
    damage(archived, "offsite")
    again = Targets(archived.installation.wiring, SERVER, [branch()], prefer=("local",))
    with pytest.raises(DamagedError) as bad:
        again.stop_for_gtid(BRANCH, "0-1-7", before=True)
    assert "bin.000002" in bad.value.message
    assert {"local", "offsite"} <= set(" ".join(bad.value.damages).replace(":", " ").split())


def damage(archived: Archived, destination: str) -> None:
    for path in (archived.folder / destination / layout.binlogs_folder(SERVER)).rglob("index-*"):
        path.write_bytes(b"rotten")


def test_without_a_private_key_only_what_needs_no_index_is_answered(archived: Archived) -> None:
    file = archived.folder / "backupd.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if "restore:" not in line))
    blind = Targets(
        Wiring(load_settings(file), archived.installation.catalog, archived.installation.clock), SERVER, [branch()]
    )
    end = Stop(BRANCH, "bin.000002", 700, "0-1-8")
    leg = RouteLeg(BRANCH, (Span(BRANCH, (1, 300), (2, 700)),), Position("bin.000001", 300, "0-1-1"), end.position)
    assert blind.material(leg, end).transactions == 8
    with pytest.raises(ConfigurationError):
        blind.stop_for_gtid(BRANCH, "0-1-7", before=True)
