"""Searching the archive, checking it, and telling how it is: with the logs of a real server and real seals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backupd.app.binlogs.search import Found, TooLongError, search
from backupd.app.binlogs.status import NOT_RUNNING, OFF, status
from backupd.app.context.wiring import Wiring, owner
from backupd.app.verify import scrubbing as logcheck
from backupd.app.verify.verification import fsck, verify
from backupd.cli.commands import binlog
from backupd.model.binlog import BranchReason, ChangeKind
from backupd.model.errors import ConfigurationError, DamagedError, NotFoundError, UsageError
from backupd.transfer import log_segments
from backupd.transfer.fsck import Invariant
from storage import layout
from tests.support.keys import Keys
from tests.support.logs.log_store import BRANCH, SERVER, key_of, store, wired
from tests.support.logs.real_logs import RealLog, real_logs


@pytest.fixture
def wiring(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, keys) as found:
        yield found


@pytest.fixture(scope="module")
def logs() -> tuple[RealLog, ...]:
    return real_logs()


def spoil(wiring: Wiring, destination: str, log: RealLog, name: str = "index-00000.zst.gpg") -> None:
    key = layout.segment_folder(SERVER, key_of(log)) + name
    path = wiring.settings.spool.parent / destination / key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def kinds(found: list[Found]) -> list[tuple[str, str]]:
    return [(str(change.kind), change.name) for one in found for change in one.changes]


def test_transactions_are_found_by_table_kind_time_and_gtid(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:3])
    everything = [one for log in logs[:3] for one in log.transactions]
    assert [one.transaction for one in search(wiring, SERVER)] == everything
    updates = list(search(wiring, SERVER, tables=["shop.orders"], kinds=[ChangeKind.UPDATE]))
    assert kinds(updates) == [("update", "orders")] * 3
    assert [one.file for one in updates] == [log.name for log in logs[:3]]
    assert all(one.changes[0].rows > 0 for one in updates)
    assert kinds(list(search(wiring, SERVER, kinds=[ChangeKind.CREATE], tables=["orders"]))) == [("create", "orders")]
    assert list(search(wiring, SERVER, tables=["shop.nothing", "other.*"])) == []
    wanted = everything[5]
    assert [one.transaction for one in search(wiring, SERVER, gtid=wanted.gtid)] == [wanted]
    (one,) = search(wiring, SERVER, gtid=wanted.gtid)
    assert one.target == f"before-gtid:{wanted.gtid}"
    late = [one.transaction for one in search(wiring, SERVER, since=wanted.at, until=wanted.at)]
    assert late == [one for one in everything if one.at == wanted.at]
    assert len(list(search(wiring, SERVER, limit=4))) == 4
    assert list(search(wiring, SERVER, until=everything[0].at - timedelta(days=1))) == []


def test_a_search_goes_on_behind_what_it_found(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    other = replace(BRANCH, id="20261122T040000Z-0000000b", noticed_at=BRANCH.noticed_at + timedelta(days=1))
    cut = logs[1].cuts[2]
    store(wiring, keys, logs[:1])
    store(wiring, keys, logs[1:2], end=cut)
    store(wiring, keys, logs[1:2], start=cut)
    store(wiring, keys, logs[:1], destinations=("local",), branch=other)
    whole = list(search(wiring, SERVER))
    found: list[Found] = []
    while part := list(search(wiring, SERVER, limit=3, after=found[-1].cursor if found else None)):
        found += part
    assert found == whole
    gtid = logs[0].transactions[2].gtid
    first, second = search(wiring, SERVER, gtid=gtid)
    assert list(search(wiring, SERVER, gtid=gtid, after=first.cursor)) == [second]
    assert list(search(wiring, SERVER, gtid=gtid, after=second.cursor)) == []
    for wrong in ("", "nothing", f"{BRANCH.id}:1", f"{BRANCH.id}:1:x", "elsewhere:1:4"):
        with pytest.raises(UsageError, match="is not a cursor"):
            search(wiring, SERVER, after=wrong)


def test_a_search_that_takes_too_long_says_how_far_it_came(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:2])
    with pytest.raises(TooLongError) as raised:
        list(search(wiring, SERVER, seconds=-1))
    assert logs[0].name in raised.value.detail
    assert "since and until" in raised.value.hint


def test_what_pieces_and_whole_files_hold_is_told_once(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    cut = logs[1].cuts[2]
    store(wiring, keys, logs[1:2], end=cut)
    store(wiring, keys, logs[1:2])
    store(wiring, keys, logs[2:3], end=logs[2].cuts[1])
    store(wiring, keys, logs[2:3], start=logs[2].cuts[1], end=logs[2].cuts[3])
    assert [one.transaction for one in search(wiring, SERVER)] == [*logs[1].transactions, *logs[2].transactions[:4]]


def test_the_same_gtid_of_two_branches_is_told_with_the_branch(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    other = replace(BRANCH, id="20261122T040000Z-0000000b", noticed_at=BRANCH.noticed_at + timedelta(days=1))
    store(wiring, keys, logs[:1], destinations=("local",))
    store(wiring, keys, logs[:1], destinations=("local",), branch=other)
    gtid = logs[0].transactions[2].gtid
    assert [one.target for one in search(wiring, SERVER, gtid=gtid)] == [
        f"before-gtid:{gtid}@{BRANCH.id}",
        f"before-gtid:{gtid}",
    ]
    assert [one.branch for one in search(wiring, SERVER, gtid=gtid, branch=other.id)] == [other.id]


def test_a_damaged_index_is_read_elsewhere_and_where_none_is_good_the_rest_is_told_before_it_fails(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:3])
    spoil(wiring, "local", logs[1])
    assert len(list(search(wiring, SERVER))) == sum(len(log.transactions) for log in logs[:3])
    spoil(wiring, "offsite", logs[1])
    told = []
    with pytest.raises(DamagedError, match="may be missing in this list") as failed:
        for one in search(wiring, SERVER):
            told.append(one)
    assert [one.transaction for one in told] == [*logs[0].transactions, *logs[2].transactions]
    assert logs[1].name in failed.value.detail


def test_a_search_says_what_it_lacks(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    with pytest.raises(NotFoundError, match="no binary log of shop"):
        search(wiring, SERVER)
    store(wiring, keys, logs[:1], destinations=("local",))
    with pytest.raises(NotFoundError, match="branch nowhere"):
        search(wiring, SERVER, branch="nowhere")
    with pytest.raises(UsageError, match="is no GTID"):
        list(search(wiring, SERVER, gtid="yesterday"))
    blind = replace(
        wiring,
        settings=replace(
            wiring.settings, configuration=wiring.settings.configuration.model_copy(update={"restore": None})
        ),
    )
    with pytest.raises(ConfigurationError):
        list(search(blind, SERVER))


def test_the_command_line_tells_what_to_restore_to(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:2])
    config = ["--config", str(wiring.settings.spool.parent / "backupd.yaml")]
    plain = CliRunner().invoke(binlog.app, ["search", SERVER, "--table", "shop.*", "--kind", "create,update", *config])
    assert plain.exit_code == 0, plain.output
    update = next(one for one in logs[0].transactions if one.changes and one.changes[0].kind is ChangeKind.UPDATE)
    assert (
        f"restore before it: backupd restore shop --to before-gtid:{update.gtid} --tables shop.orders --into shop "
        "--compare\n"
    ) in plain.output
    assert f"update of {update.changes[0].rows} rows in shop.orders" in plain.output
    assert f"{logs[0].name}:{update.start}" in plain.output
    found = CliRunner().invoke(binlog.app, ["search", SERVER, "--limit", "2", "--json", *config])
    assert [one["gtid"] for one in json.loads(found.stdout)] == [one.gtid for one in logs[0].transactions[:2]]
    assert json.loads(found.stdout)[0]["restore_before"] == f"before-gtid:{logs[0].transactions[0].gtid}"
    assert CliRunner().invoke(binlog.app, ["search", SERVER, "--kind", "explode", *config]).exit_code == 2
    assert CliRunner().invoke(binlog.app, ["search", SERVER, "--since", "yesterday", *config]).exit_code == 2
    state = CliRunner().invoke(binlog.app, ["status", "--json", *config])
    (one,) = json.loads(state.stdout)
    assert [destination["segments"] for destination in one["destinations"]] == [2, 2]
    shown = CliRunner().invoke(binlog.app, ["status", *config])
    assert f"{logs[1].name}:{logs[1].size}" in shown.output


def test_the_status_tells_how_far_each_destination_is(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    (before,) = status(wiring)
    assert (before.state, [held.latest for held in before.destinations]) == (NOT_RUNNING, ["", ""])
    store(wiring, keys, logs[:2])
    now = wiring.clock()
    binlogs = wiring.catalog.binlogs
    binlogs.confirm(SERVER, "local", BRANCH.id, (2, logs[1].size), now - timedelta(seconds=8))
    binlogs.set_stream_state(
        SERVER,
        {
            "state": "streaming",
            "owner": owner(),
            "destinations": {"offsite": {"bytes_behind": 77, "error": "it is full"}},
        },
        now,
    )
    wiring.catalog.lags.note(SERVER, "local", 12.5, now)
    (found,) = status(wiring, SERVER)
    local, offsite = found.destinations
    assert found.state == "streaming"
    assert (local.segments, local.latest, local.worst) == (2, f"{logs[1].name}:{logs[1].size}", 12.5)
    assert local.behind is not None
    assert 8 <= local.behind < 60
    assert (offsite.behind, offsite.waiting, offsite.error) == (None, 77, "it is full")
    binlogs.set_stream_state(SERVER, {"state": "streaming", "owner": f"{owner()}0"}, now)
    assert status(wiring)[0].state == NOT_RUNNING
    binlogs.add_branch(replace(BRANCH, server="gone"))
    assert [one.state for one in status(wiring)] == [OFF, NOT_RUNNING]
    with pytest.raises(NotFoundError):
        status(wiring, "nobody")


# -- verify and fsck


def progress(_progress: object) -> None:
    pass


def test_verify_reads_the_logs_and_the_catalog_learns_which_copies_are_good(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logcheck, "_BATCH", 2)
    store(wiring, keys, logs[:3])
    done = verify(wiring, None, None, progress)
    assert (done.ok, done.binlogs) == (True, 6)
    assert all(
        copy.verified_at is not None
        for record in wiring.catalog.binlogs.segments(SERVER, BRANCH.id)
        for copy in record.destinations.values()
    )
    for destination in ("local", "offsite"):
        spoil(wiring, destination, logs[1], "part-00000.zst.gpg")
    done = verify(wiring, SERVER, None, progress)
    assert [(damage.destination, damage.problem.partition(" ")[0]) for damage in done.damages] == [
        ("local", "holds"),
        ("offsite", "holds"),
    ]
    assert not done.ok
    assert [(run.destination, run.first_number, run.last_number) for run in wiring.catalog.binlogs.runs(SERVER)] == [
        ("local", 1, 1),
        ("local", 3, 3),
        ("offsite", 1, 1),
        ("offsite", 3, 3),
    ]
    spoil(wiring, "local", logs[1], "part-00000.zst.gpg")
    assert verify(wiring, None, None, progress).ok
    assert [run.segments for run in wiring.catalog.binlogs.runs(SERVER)] == [3, 3], "good again"


def test_verify_puts_logs_right_from_another_destination(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:3])  # sealed for each destination alone: no part is like that of the other one
    spoil(wiring, "local", logs[1], "part-00000.zst.gpg")
    spoil(wiring, "local", logs[0], "segment.json")
    log_segments.remove(wiring.destination("offsite"), SERVER, key_of(logs[2]))
    done = verify(wiring, SERVER, None, progress)
    assert done.ok
    assert sorted((damage.destination, damage.repaired_from) for damage in done.damages) == [
        ("local", "offsite"),
        ("local", "offsite"),
        ("offsite", "local"),
    ]
    again = verify(wiring, SERVER, None, progress)
    assert (again.damages, again.binlogs) == ((), 6)
    assert [run.segments for run in wiring.catalog.binlogs.runs(SERVER)] == [3, 3]
    (event,) = wiring.catalog.events.list(kind="rot-repaired", server=SERVER)[-1:]
    assert "replaced by those of offsite" in event.message
    assert fsck(wiring, mend=False).ok


def test_logs_that_were_removed_from_the_beginning_are_not_brought_back(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:3])
    log_segments.remove(wiring.destination("offsite"), SERVER, key_of(logs[0]))
    (damage,) = verify(wiring, SERVER, None, progress).damages
    assert (damage.destination, damage.repaired_from) == ("offsite", "")
    assert "all earlier ones of its branch are missing" in damage.trouble
    assert log_segments.of_file(wiring.destination("offsite"), SERVER, BRANCH.id, logs[0].number) == []


def test_verify_of_a_share_reads_every_log_in_as_many_days(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:3], destinations=("local",))
    tomorrow = wiring.clock() + timedelta(days=1)
    read = [verify(one, None, 0.5, progress).binlogs for one in (wiring, replace(wiring, clock=lambda: tomorrow))]
    assert sum(read) == 3


def test_fsck_takes_in_what_the_catalog_does_not_know(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:3], known=False)
    found = fsck(wiring, mend=False)
    assert {finding.invariant for _place, finding in found.findings} == {Invariant.CATALOG_HAS_SEGMENT}
    assert len(found.findings) == 8, "three logs and a branch at each of two destinations"
    mended = fsck(wiring, mend=True)
    assert mended.ok
    assert len(mended.repaired) == 7, "both destinations describe the same branch"
    assert wiring.catalog.binlogs.branches(SERVER) == (BRANCH,)
    assert [(run.destination, run.segments) for run in wiring.catalog.binlogs.runs(SERVER)] == [
        ("local", 3),
        ("offsite", 3),
    ]
    assert fsck(wiring, mend=False).ok
    assert kinds(list(search(wiring, SERVER, kinds=[ChangeKind.CREATE], tables=["*.orders"]))) == [("create", "orders")]


def test_fsck_takes_in_logs_whose_branch_nothing_describes(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:2], destinations=("local",), known=False)
    wiring.destination("local").delete(layout.branch_key(SERVER, BRANCH.id))
    left = fsck(wiring, mend=True)
    assert [finding.invariant for _place, finding in left.findings] == [Invariant.SEGMENT_HAS_BRANCH]
    (found,) = wiring.catalog.binlogs.branches(SERVER)
    assert (found.id, found.reason, found.first_number) == (BRANCH.id, BranchReason.UNKNOWN, 1)


def test_fsck_forgets_what_is_gone_and_records_the_gap(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:3])
    log_segments.remove(wiring.destination("local"), SERVER, key_of(logs[1]))
    found = fsck(wiring, mend=False)
    assert [(destination, finding.invariant) for destination, finding in found.findings] == [
        ("local", Invariant.SEGMENT_IS_STORED)
    ]
    assert fsck(wiring, mend=True).ok
    (gap,) = wiring.catalog.binlogs.gaps(SERVER)
    assert (gap.destination, gap.after.file, gap.after.pos) == ("local", logs[0].name, logs[0].size)
    assert gap.before is not None
    assert (gap.before.file, gap.before.pos) == (logs[2].name, 0)
    store(wiring, keys, logs[1:2], destinations=("local",), known=False)
    assert fsck(wiring, mend=True).ok
    assert wiring.catalog.binlogs.gaps(SERVER) == (), "what was missing is back"


def test_what_a_stream_is_just_storing_is_no_finding(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:1], destinations=("local",))
    store(wiring, keys, logs[1:2], destinations=("local",), known=False)
    assert not fsck(wiring, mend=False).ok
    wiring.catalog.binlogs.set_stream_state(SERVER, {"state": "streaming"}, wiring.clock())
    assert fsck(wiring, mend=False).ok


def test_a_destination_that_is_not_there_is_told(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:1])
    folder = wiring.settings.spool.parent / "offsite"
    folder.rename(folder.with_name("unplugged"))
    found = fsck(wiring, mend=True)
    assert [(destination, finding.invariant) for destination, finding in found.findings] == [
        ("offsite", Invariant.SEGMENT_IS_STORED)
    ]
    assert [run.destination for run in wiring.catalog.binlogs.runs(SERVER)] == ["local", "offsite"]
