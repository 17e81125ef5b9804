"""A catalog made anew from one destination alone."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.trust import trusting
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.catalog_copies import own_copies, write_copies
from backupd.app.metacopies.signing_keys import vouch
from backupd.app.restores.catalog_rebuild import Rebuilt, rebuild
from backupd.app.service.facade import Service
from backupd.app.views.timeline import timeline
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import BackupState, Copy, Hold, HoldKind
from backupd.model.binlog import Gap
from backupd.model.errors import DestinationError, RefusedError
from backupd.model.event import Event, Severity
from backupd.model.job import Progress, silent
from backupd.model.manifest import Header, encode_header
from backupd.model.server_facts import Position
from backupd.transfer import log_segments
from backupd.transfer.deletion import mark
from backupd.transfer.holds_and_locks import put_hold, put_keep
from backupd.transfer.records.manifests import get_bytes
from storage import layout, objects
from storage.destination import as_tree
from storage.filesystem import FilesystemDestination
from tests.support.catalog.samples import backup, proof, witness
from tests.support.dice import size
from tests.support.keys import Keys
from tests.support.logs.log_store import BRANCH, DESTINATIONS, SERVER, key_of, store, wired
from tests.support.logs.real_logs import RealLog, real_logs
from tests.support.stores.cold import Cooled
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.signed import signing
from tests.support.stores.stock import Stock, backup_id


@pytest.fixture
def wiring(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, keys) as found:
        yield found


@pytest.fixture(scope="module")
def logs() -> tuple[RealLog, ...]:
    return real_logs()


@contextmanager
def lost(wiring: Wiring, *, key: bool = True, name: str = "new") -> Iterator[Wiring]:
    """The same destinations, on a machine that knows nothing."""
    base = wiring.settings.spool.parent
    text = wiring.settings.file.read_text().replace("catalog.db", f"{name}.db").replace("/spool", f"/{name}-spool")
    if not key:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("restore:"))
    file = base / f"{name}.yaml"
    file.write_text(text)
    with open_catalog(f"sqlite:///{base}/{name}.db") as catalog:
        yield Wiring(load_settings(file), catalog, wiring.clock)


def shown(wiring: Wiring) -> dict[str, Any]:
    """The timeline, without the moment at which it was asked for."""
    found = timeline(wiring, SERVER).as_json()
    del found["at"]
    for part in (*found["destinations"], found["objectives"]):
        part.pop("rpo_seconds", None)
        part.pop("achieved_rpo", None)
    return found


def filled(wiring: Wiring) -> None:
    """A full backup with two increments at both places, and one full that is only at ``local``."""
    for place in DESTINATIONS:
        stock = Stock(wiring.destination(place), server=SERVER)
        stock.add(1, {"a": b"a"})
        stock.add(2, {"a": b"b"}, parent=1)
        stock.add(3, {"a": b"c"}, parent=2)
    Stock(wiring.destination("local"), server=SERVER).add(4, {"b": b"d"})


def test_backups_chains_marks_keeps_holds_and_damage_come_back_without_a_private_key(wiring: Wiring) -> None:
    filled(wiring)
    local = wiring.destination("local")
    mark(local, SERVER, backup_id(4), wiring.clock())
    put_keep(local, SERVER, backup_id(2), wiring.clock())
    hold = Hold(SERVER, HoldKind.HOLD, "audit", "anna", wiring.clock())
    put_hold(local, hold)
    found = {info.key for info in local.list(layout.OBJECTS)}
    last = next(record for record in Stock(local, server=SERVER).header(3, ()).side_files if record.name == layout.BODY)
    local.put(layout.body_key(SERVER, backup_id(3)), io.BytesIO(b"x" * last.size))
    assert found
    with lost(wiring, key=False) as new:
        done = rebuild(new, "local", silent)
        assert (done.backups, done.closed, done.damaged, done.holds) == (4, 4, (backup_id(3),), 1)
        (problem,) = done.problems
        assert backup_id(3) in problem
        records = {record.id: record for record in new.catalog.backups.every()}
        assert [(records[backup_id(number)].state, records[backup_id(number)].parent) for number in range(1, 5)] == [
            (BackupState.COMPLETE, None),
            (BackupState.COMPLETE, backup_id(1)),
            (BackupState.DAMAGED, backup_id(2)),
            (BackupState.DELETED, None),
        ]
        assert [number for number in range(1, 5) if records[backup_id(number)].pinned] == [2]
        assert new.catalog.holds.all() == (hold,)
        assert [event.kind for event in new.catalog.events.list()] == ["catalog-rebuilt"]


def test_what_is_in_quarantine_or_missing_makes_a_backup_damaged(wiring: Wiring) -> None:
    filled(wiring)
    local = wiring.destination("local")
    (one, *_), (other, *_) = (
        [item.name for item in Stock(local, server=SERVER).add(number, {"x": content}).objects]
        for number, content in ((5, b"e"), (6, b"f"))
    )
    objects.quarantine(local, one, "rot", wiring.clock())
    local.delete(layout.object_key(other))
    with lost(wiring) as new:
        assert rebuild(new, "local", silent).damaged == (backup_id(5), backup_id(6))


def test_a_catalog_that_is_not_empty_is_left_alone_unless_asked_and_a_second_place_adds_its_copies(
    wiring: Wiring,
) -> None:
    filled(wiring)
    with lost(wiring) as new:
        rebuild(new, "offsite", silent)
        with pytest.raises(RefusedError, match="is not empty") as caught:
            rebuild(new, "local", silent)
        assert "--into-existing" in caught.value.hint
        new.catalog.backups.mark_copy_verified(backup_id(1), "offsite", new.clock())
        before = new.catalog.backups.get(backup_id(1))
        assert rebuild(new, "local", silent, merge=True).backups == 4
        assert rebuild(new, "offsite", silent, merge=True).backups == 3
        record = new.catalog.backups.get(backup_id(1))
        assert [copy.destination for copy in record.copies] == ["local", "offsite"]
        assert record.copies[1] == before.copies[0], "when it was read again is not forgotten"
        assert [copy.destination for copy in new.catalog.backups.get(backup_id(4)).copies] == ["local"]


def test_a_place_that_is_empty_or_not_ours_is_refused(wiring: Wiring, tmp_path: Path) -> None:
    (tmp_path / "local" / "repository.json").unlink()
    with lost(wiring) as new, pytest.raises(RefusedError, match="holds no backups"):
        rebuild(new, "local", silent)


def test_the_timeline_and_the_gaps_are_those_of_before(wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]) -> None:
    store(wiring, keys, logs[:1])
    store(wiring, keys, logs[2:4])
    last = logs[3].transactions[-1].at
    for place in DESTINATIONS:
        wiring.catalog.binlogs.confirm(
            SERVER, place, BRANCH.id, (logs[3].number, logs[3].size), last + timedelta(minutes=7)
        )
        wiring.catalog.binlogs.add_gap(
            Gap(
                SERVER,
                BRANCH.id,
                place,
                Position(logs[0].name, logs[0].size),
                Position(logs[2].name, 4),
                None,
                None,
                "the server had removed it",
                BRANCH.noticed_at,
            )
        )
    filled(wiring)
    rebuild(wiring, "local", silent, merge=True)
    rebuild(wiring, "offsite", silent, merge=True)
    wiring.catalog.proofs.add(replace(proof(), id="20261122T120100Z-0000000a", server=SERVER))
    wiring.catalog.witnesses.add("20261121T120500Z-0000000c", replace(witness(), server=SERVER), backup_id=backup_id(1))
    wiring.catalog.events.add(Event(wiring.clock(), "something", Severity.INFO, "happened"))
    write_copies(wiring)
    before = shown(wiring)
    assert before["gaps"][0]["reason"] == "the server had removed it"
    with lost(wiring) as new:
        done = rebuild(new, "offsite", silent)
        assert (done.branches, done.segments, done.proofs, done.witnesses, done.problems) == (1, 3, 1, 1, ())
        assert len(done.catalog_of) == 1
        rebuild(new, "local", silent, merge=True)
        assert json.dumps(shown(new)) == json.dumps(before)
        assert new.catalog.binlogs.runs(SERVER) == wiring.catalog.binlogs.runs(SERVER)
        assert new.catalog.proofs.list() == wiring.catalog.proofs.list()
        assert new.catalog.witnesses.of_backup(backup_id(1)) == wiring.catalog.witnesses.of_backup(backup_id(1))
        assert "something" in [event.kind for event in new.catalog.events.list()]


def test_a_copy_of_the_catalog_promises_nothing_about_logs_that_are_gone_since(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:3])
    at = logs[2].transactions[-1].at + timedelta(minutes=7)
    wiring.catalog.binlogs.confirm(SERVER, "local", BRANCH.id, (logs[2].number, logs[2].size), at)
    write_copies(wiring)
    log_segments.remove(wiring.destination("local"), SERVER, key_of(logs[2]))
    with lost(wiring) as new:
        rebuild(new, "local", silent)
        (run,) = new.catalog.binlogs.runs(SERVER)
        assert (run.last_number, run.confirmed_at) == (logs[1].number, None)


def test_a_copy_that_is_damaged_is_told_and_everything_else_is_taken_in(wiring: Wiring) -> None:
    filled(wiring)
    wiring.destination("local").put(layout.catalog_key(wiring.clock(), "0123456789ab"), io.BytesIO(b"nonsense"))
    with lost(wiring) as new:
        done = rebuild(new, "local", silent)
        assert done.backups == 4
        assert any("a copy of the lost catalog" in problem for problem in done.problems)


def happened(wiring: Wiring, *kinds: str) -> None:
    for kind in kinds:
        wiring.catalog.events.add(Event(wiring.clock(), kind, Severity.INFO, kind))
    write_copies(wiring, now=True)


def kinds_of(wiring: Wiring) -> set[str]:
    return {event.kind for event in wiring.catalog.events.list()}


def test_a_copy_of_a_catalog_that_was_made_after_the_loss_hides_nothing_of_the_lost_one(wiring: Wiring) -> None:
    filled(wiring)
    happened(wiring, "before")
    base = wiring.settings.spool.parent
    with open_catalog(f"sqlite:///{base}/fresh.db") as fresh:
        later = wiring.clock() + timedelta(minutes=5)
        happened(replace(wiring, catalog=fresh, clock=lambda: later), "after")
    with lost(wiring) as new:
        done = rebuild(new, "local", silent)
        assert done.problems == ()
        assert len(done.catalog_of) == 2
        assert {"before", "after"} <= kinds_of(new)


def test_a_copy_that_is_damaged_is_named_and_the_next_older_one_is_taken(wiring: Wiring) -> None:
    filled(wiring)
    happened(wiring, "first")
    later = wiring.clock() + timedelta(minutes=5)
    happened(replace(wiring, clock=lambda: later), "second")
    local = wiring.destination("local")
    newest = own_copies(local, layout.CATALOGS)[-1].key
    local.delete(newest)
    local.put(newest, io.BytesIO(b"nonsense"))
    local.put(layout.catalog_key(later + timedelta(days=9), "0123456789ab-0123456789ab"), io.BytesIO(b"nonsense"))
    with lost(wiring) as new:
        done = rebuild(new, "local", silent)
        assert len(done.catalog_of) == 1
        assert "first" in kinds_of(new)
        assert len(done.problems) == 2
        assert newest in done.problems[1]


def test_a_backup_that_has_vanished_is_named_and_what_was_deleted_is_not(wiring: Wiring) -> None:
    filled(wiring)
    local = wiring.destination("local")
    rebuild(wiring, "local", silent, merge=True)
    wiring.catalog.backups.set_copy_state(backup_id(3), "local", "deleted")
    happened(wiring, "before")
    for number in (3, 4):
        local.delete(layout.manifest_key(SERVER, backup_id(number)))
    for key in [info.key for info in local.list(f"{layout.SERVERS}{SERVER}/{backup_id(3)}/")]:
        local.delete(key)
    tree = as_tree(local)
    assert tree is not None
    tree.remove_tree(layout.tree_name(SERVER, backup_id(3)))
    with lost(wiring) as new:
        done = rebuild(new, "local", silent)
        assert done.backups == 2
        (problem,) = done.problems
        assert backup_id(4) in problem
        assert "is missing" in problem
    with lost(wiring, key=False, name="keyless") as new:
        assert any(
            backup_id(4) in problem and "no manifest" in problem for problem in rebuild(new, "local", silent).problems
        )


def known(wiring: Wiring, number: int, header: Header) -> None:
    """The row that its run wrote."""
    wiring.catalog.backups.add(
        replace(
            backup(server=SERVER),
            id=backup_id(number),
            manifest=hashlib.sha256(encode_header(header)).hexdigest(),
            copies=tuple(Copy(place, "complete", header.finished_at) for place in DESTINATIONS),
        )
    )


@pytest.mark.parametrize("signed", [True, False])
def test_a_manifest_that_the_lost_catalog_knows_otherwise_is_told_and_not_used(wiring: Wiring, signed: bool) -> None:
    """The attacker had the signing key for a while, or nothing is signed."""
    with signing(wiring, opens=True) if signed else nullcontext(wiring) as house:
        for number in (1, 2):
            headers = [
                Stock(house.destination(place), server=SERVER).add(number, {"a": b"a"}) for place in DESTINATIONS
            ]
            known(house, number, headers[0])
        write_copies(house, now=True)
        unknowing = Wiring(house.settings, house.catalog, house.clock)
        unknowing._opened["local"] = trusting(
            house.settings, FilesystemDestination("local", house.settings.spool.parent / "local")
        )
        Stock(unknowing.destination("local"), server=SERVER).add(2, {"b": b"forged"})
        with lost(house) as new:
            done = rebuild(new, "local", silent)
            (problem,) = [one for one in done.problems if "knows it as" in one]
            assert backup_id(2) in problem
            assert {one.id: str(one.state) for one in new.catalog.backups.every()} == {
                backup_id(1): "complete",
                backup_id(2): "damaged",
            }
            if signed:
                rebuild(new, "offsite", silent, merge=True)
                assert {one.id: str(one.state) for one in new.catalog.backups.every()}[backup_id(2)] == "complete"
                assert [new.catalog.backups.digest(backup_id(2))] == [house.catalog.backups.digest(backup_id(2))]


def test_what_one_place_has_more_of_than_another_is_named(wiring: Wiring) -> None:
    filled(wiring)
    with lost(wiring) as new:
        done = Service(new, "").maintenance.rebuild("offsite", silent)
        assert done.elsewhere == (f"local holds 1 backup of {SERVER} that offsite does not: {backup_id(4)}",)
        assert done.as_json()["elsewhere"] == list(done.elsewhere)


def test_logs_that_came_after_the_last_copy_of_the_catalog_count_although_it_confirms_less(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    store(wiring, keys, logs[:2])
    at = logs[0].transactions[0].at - timedelta(seconds=1)  # times of transactions are whole seconds
    wiring.catalog.binlogs.confirm(SERVER, "local", BRANCH.id, (logs[1].number, logs[1].size), at)
    write_copies(wiring)
    store(wiring, keys, logs[2:4])
    with lost(wiring) as new:
        rebuild(new, "local", silent)
        (run,) = new.catalog.binlogs.runs(SERVER)
        assert (run.last_number, run.confirmed_at) == (logs[3].number, None)


def test_one_that_broke_off_in_the_middle_is_begun_again(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(wiring)
    with lost(wiring) as new:
        real = new.catalog.backups.add
        left = threading.Semaphore(2)

        def add(*args: Any, **options: Any) -> None:
            if not left.acquire(blocking=False):
                raise DestinationError("the network is gone")
            real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(new.catalog.backups, "add", add)
            with pytest.raises(DestinationError):
                rebuild(new, "local", silent)
        assert len(tuple(new.catalog.backups.every())) == 2
        assert rebuild(new, "local", silent, merge=True).backups == 4
        assert len(tuple(new.catalog.backups.every())) == 4


def test_of_very_many_manifests_the_progress_is_told_and_each_is_taken_in(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = MemoryDestination("local", tree=False)
    stock = Stock(many, server=SERVER)
    count = size(300, 10_000)
    for number in range(1, count + 1):
        stock.add(number, {"a": b"a"})
    with lost(wiring, key=False) as new:
        new._opened["local"] = many
        told: list[Progress] = []
        assert rebuild(new, "local", told.append).backups == count
        assert len(tuple(new.catalog.backups.every())) == count
        assert told[-1].files_done == told[-1].files_total == count
        assert len(told) > count / 100


def test_a_forged_backup_is_not_taken_in_and_older_ones_are_once_somebody_vouched_for_them(
    wiring: Wiring, keys: Keys, logs: tuple[RealLog, ...]
) -> None:
    filled(wiring)
    store(wiring, keys, logs[:2], destinations=("local",))
    rebuild(wiring, "local", silent, merge=True)
    beneath = wiring.destination("local")
    for record in wiring.catalog.backups.every():
        digest = hashlib.sha256(get_bytes(beneath, layout.manifest_key(SERVER, record.id))).hexdigest()
        wiring.catalog.backups.add(replace(record, manifest=digest), replace=True)
    with signing(wiring) as strict:
        with lost(strict) as new:
            done = rebuild(new, "local", silent)
            assert (done.backups, done.segments) == (0, 0)
            assert all("has no signature" in problem for problem in done.problems)
            assert len(done.problems) == 5
        forged = Stock(beneath, server=SERVER).add(9, {"a": b"forged"})
        assert vouch(strict, "local").signed == 4, "of logs the catalog has no digest"
        vouched = vouch(strict, "local", unproven=True)
        assert vouched.signed == 1 + 2
        (left,) = vouched.left
        assert forged.backup_id in left
        assert vouch(strict, "local").signed == 0
        Stock(strict.destination("local"), server=SERVER).add(10, {"a": b"signed at once"})
        with lost(strict, name="second") as new:
            done = rebuild(new, "local", silent)
            assert (done.backups, done.branches, done.segments) == (5, 1, 2)
            (problem,) = done.problems
            assert forged.backup_id in problem
    with pytest.raises(RefusedError, match="no policy sets"):
        vouch(wiring, "local")


def test_a_manifest_or_body_in_an_archive_class_is_one_problem_and_the_others_come_in(wiring: Wiring) -> None:
    cold = {layout.manifest_key(SERVER, backup_id(1)), layout.body_key(SERVER, backup_id(2))}
    place = Cooled(cold.__contains__, wiring.clock)
    stock = Stock(place, server=SERVER)
    for number in (1, 2, 3):
        stock.add(number, {"a": b"a"})
    with lost(wiring, key=False) as new:
        new._opened["local"] = place
        done = rebuild(new, "local", silent)
        assert (done.backups, done.damaged) == (2, (backup_id(2),))
        told = [problem for problem in done.problems if "archive class" in problem]
        assert [name in problem for name, problem in zip((backup_id(1), backup_id(2)), told, strict=True)] == [True] * 2


def test_told_as_a_document_it_has_everything(wiring: Wiring) -> None:
    told = Rebuilt("local", catalog_of=(wiring.clock(),)).as_json()
    assert json.loads(json.dumps(told)) == told
