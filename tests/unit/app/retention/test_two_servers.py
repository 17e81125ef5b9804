"""Two installations that call different servers by one name, at one place: neither costs the other a backup."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from backupd.alerts.rules import FOREIGN
from backupd.app.backup_records import adopt, adopt_unknown
from backupd.app.retention.deletion import delete
from backupd.app.service.check import check
from backupd.app.verify.verification import fsck
from backupd.model.errors import RefusedError
from backupd.model.manifest import Header, encode_header
from backupd.transfer.deletion import mark, sweep
from backupd.transfer.records.manifests import read
from storage import layout
from tests.support.catalog.installation import SERVER, Installation
from tests.support.service.shop import apply
from tests.support.stores.stock import believed, put, wanted

Make = Callable[..., Installation]


def of(one: Installation, name: str, uuid: str, *, made: bool = True) -> str:
    """The backup is of server ``uuid``; ``made``: by this installation, which knows it."""
    found = read(one.at(), SERVER, name)
    assert found is not None
    assert isinstance(found.header, Header)
    record = one.catalog.backups.get(name)
    ended = record.finished_at if made else found.header.finished_at
    document = encode_header(replace(found.header, server_uuid=uuid, started_at=ended, finished_at=ended))
    put(one.at(), layout.manifest_key(SERVER, name), document)
    if made:
        digest = hashlib.sha256(document).hexdigest()
        one.catalog.backups.add(replace(record, server_uuid=uuid, manifest=digest), replace=True)
    return name


def strange(one: Installation, number: int, *, days: float, uuid: str = "A") -> str:
    """A backup of another installation's server, not in the catalog yet."""
    name = one.add(number, days=days, known=False)
    found = read(one.at(), SERVER, name)
    assert found is not None
    assert isinstance(found.header, Header)
    ended = one.clock() - timedelta(days=days)
    put(
        one.at(),
        layout.manifest_key(SERVER, name),
        encode_header(replace(found.header, server_uuid=uuid, started_at=ended, finished_at=ended)),
    )
    return name


def test_rules_neither_count_nor_delete_backups_of_another_server_of_that_name(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    old, newest = of(one, one.add(1, days=3), "B"), of(one, one.add(2, days=2), "B")
    theirs = [strange(one, 3, days=2.5), strange(one, 4, days=1)]
    applied = apply(one.wiring, SERVER, one.run(), really=True)
    assert applied.marked == {"local": (old,)}
    said = {decision.backup.id: decision for decision in applied.decisions[0].backups}
    assert "newest" in [ground.rule for ground in said[newest].grounds]
    assert {ground.rule for ground in said[theirs[0]].grounds} == {"foreign"}
    assert "a different server (A)" in said[theirs[0]].reasons[0]


def test_backups_that_say_to_be_of_our_server_and_that_nobody_took_push_nothing_out(installation: Make) -> None:
    """Whoever can write to the place can lay them there: its uuid is in every clear header."""
    one = installation("{local: {keep_fulls: 2}}")
    ours = [of(one, one.add(number, days=9 - number), "B") for number in (1, 2, 3)]
    for number in (4, 5):
        strange(one, number, days=1, uuid="B")
    applied = apply(one.wiring, SERVER, one.run(), really=True)
    assert applied.marked == {"local": (ours[0],)}
    said = {decision.backup.id: decision for decision in applied.decisions[0].backups}
    assert "newest" in [ground.rule for ground in said[ours[-1]].grounds]
    delete(one.wiring, ours[1], now=False)
    with pytest.raises(RefusedError, match="only restorable"):
        delete(one.wiring, ours[2], now=False)


def test_what_is_taken_in_of_another_server_is_told_once_and_by_fsck_with_both_uuids(installation: Make) -> None:
    one = installation()
    of(one, one.add(1, days=3), "B")
    theirs = strange(one, 2, days=1)
    assert adopt_unknown(one.wiring, one.at(), SERVER) == [theirs]
    adopt_unknown(one.wiring, one.at(), SERVER)
    (event,) = one.events(FOREIGN.broken)
    assert "of server A; ours is B" in event.message
    assert theirs in event.detail
    (finding,) = [
        item for _place, item in fsck(one.wiring, mend=False).findings if item.invariant == "one-server-of-a-name"
    ]
    assert "of server A; ours is B" in finding.message
    told = [item for item in check(one.wiring, SERVER) if item.subject == "backups"]
    assert [(item.severity, "of server A; ours is B" in item.message) for item in told] == [("error", True)]
    one.at().delete(layout.manifest_key(SERVER, theirs))
    one.catalog.backups.remove(theirs)
    adopt_unknown(one.wiring, one.at(), SERVER)
    assert len(one.events(FOREIGN.mended)) == 1


def test_the_last_own_backup_is_not_deleted_by_hand_because_a_strange_one_is_there(installation: Make) -> None:
    one = installation()
    ours = of(one, one.add(1, days=3), "B")
    theirs = strange(one, 2, days=1)
    with pytest.raises(RefusedError, match="only restorable"):
        delete(one.wiring, ours, now=False)
    with pytest.raises(RefusedError, match="is foreign"):
        delete(one.wiring, theirs, now=False)
    assert [found.id for found in adopt(one.wiring, [theirs])] == [theirs]
    delete(one.wiring, theirs, now=False)
    assert one.marked() == {theirs}


def test_a_sweep_leaves_the_last_whole_backup_of_each_uuid_unless_a_person_wants_it_gone(installation: Make) -> None:
    one = installation()
    ours, theirs = of(one, one.add(1, days=3), "B"), of(one, one.add(2, days=1), "A")
    at = one.clock()
    mark(one.at(), SERVER, ours, at, reason="retention: x")
    done = sweep(one.at(), clock=one.clock, grace=timedelta(0), sightings=believed)
    assert done.backups == []
    assert any("the last whole backup of this server B here" in text for text in done.held)
    assert sweep(one.at(), clock=one.clock, grace=timedelta(0), sightings=wanted).backups == [ours]
    assert one.present() == {theirs}
