"""`backupd verify` over several destinations: what rots is put right, in rotation, and archive classes are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.service.dispatch import of_verification
from backupd.app.verify.verification import VerifyOutcome, fsck, together, verify
from backupd.catalog.session import Catalog, open_catalog
from backupd.cli.output import Screen
from backupd.cli.render import show_damages, show_disagreements
from backupd.model.backup_record import BackupState
from backupd.model.job import silent
from backupd.transfer.deletion import is_whole
from backupd.transfer.fsck import examine
from backupd.transfer.records.manifests import read
from backupd.transfer.scrub_and_repair import Damage
from storage import layout, objects
from storage.destination import Tier, as_tree
from tests.support.catalog.installation import SERVER, Installation
from tests.support.stores.stock import Stock, backup_id, named, put, sealed
from tests.support.stores.strict import ColdDestination

MONTH = timedelta(days=30)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


@pytest.fixture
def installation(tmp_path: Path, catalog: Catalog) -> Installation:
    return Installation(tmp_path, catalog, destinations=("local", "offsite"))


def look(installation: Installation, **how: object) -> VerifyOutcome:
    return verify(installation.wiring, SERVER, None, silent, **how)  # type: ignore[arg-type]  # as named there


def spoil(installation: Installation, key: str, place: str = "local") -> None:
    """One bit, in place: what a hard link shows changes, too."""
    path = installation.base / place / key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def key_of(content: bytes) -> str:
    return layout.object_key(named(content).name)


def test_a_rotten_object_is_replaced_by_another_places_copy_and_shown_again(installation: Installation) -> None:
    one = installation.add(1, days=2, content=b"same")
    two = installation.add(2, days=1, content=b"same")
    spoil(installation, key_of(b"same"))
    done = look(installation)
    (damage,) = done.damages
    assert (damage.key, damage.backups, damage.repaired_from) == (key_of(b"same"), (one, two), "offsite")
    assert (done.ok, of_verification(done).problem) == (True, None)
    assert objects.fetch(installation.at(), named(b"same")) == sealed(b"same")
    assert objects.quarantined(installation.at()) == frozenset()
    tree = as_tree(installation.at())
    assert tree is not None
    for name in (one, two):
        ((path, inode),) = tree.tree_files(layout.tree_name(SERVER, name))
        assert inode == tree.identity(key_of(b"same"))
        with tree.open_tree_file(layout.tree_name(SERVER, name), path) as stream:
            assert stream.read() == sealed(b"same")
    assert examine(installation.at(), None, clock=installation.clock) == []
    assert {copy.state for name in (one, two) for copy in installation.catalog.backups.get(name).copies} == {"complete"}
    (event,) = installation.events("rot-repaired")
    assert "1 damaged files of shop at destination local were replaced by those of offsite" in event.message
    assert look(installation).damages == ()


def test_missing_objects_side_files_and_manifests_come_back(installation: Installation) -> None:
    name = installation.add(1, days=2)
    other = installation.add(2, days=1)
    third = installation.add(3, days=0.5)
    local = installation.at()
    local.delete(key_of(b"1 of shop"))
    spoil(installation, layout.body_key(SERVER, name))
    local.delete(layout.runbook_key(SERVER, name))
    spoil(installation, layout.manifest_key(SERVER, other))
    local.delete(layout.manifest_key(SERVER, third))
    done = look(installation)
    assert {damage.key.rpartition("/")[2]: damage.repaired_from for damage in done.damages} == {
        named(b"1 of shop").name: "offsite",
        "body.jsonl.zst.gpg": "offsite",
        "RUNBOOK.md": "offsite",
        "manifest.json": "offsite",
    }
    assert len(done.damages) == 5
    for backup in (name, other, third):
        assert is_whole(local, SERVER, backup)
        assert read(local, SERVER, backup) == read(installation.at("offsite"), SERVER, backup)
    assert look(installation).damages == ()
    assert not [item for item in examine(local, None, clock=installation.clock) if not item.repairable]


def test_a_backup_that_somebody_else_removed_is_not_brought_back(installation: Installation) -> None:
    name = installation.add(1, days=2)
    installation.add(2, days=1)
    local = installation.at()
    for info in list(local.list(layout.backup_folder(SERVER, name))):
        local.delete(info.key)
    (damage,) = look(installation).damages
    assert (damage.problem, damage.repaired_from) == ("missing", "")
    assert damage.trouble == (
        "it is completely missing there, and no deletion is recorded: `backupd replicate shop --to local` copies it "
        "again where another destination has it, `backupd fsck --repair` forgets it"
    )
    assert read(local, SERVER, name) is None


def test_without_a_good_copy_it_is_damaged_everywhere_it_is_named_until_one_turns_up(
    installation: Installation,
) -> None:
    one = installation.add(1, days=2, content=b"same")
    two = installation.add(2, days=1, content=b"same")
    for place in ("local", "offsite"):
        spoil(installation, key_of(b"same"), place)
    done = look(installation)
    assert {damage.repaired_from for damage in done.damages} == {""}
    assert "not those that were stored" in done.damages[0].trouble
    assert of_verification(done).problem is not None
    for place in ("local", "offsite"):
        assert objects.quarantined(installation.at(place)) == {named(b"same").name}
        assert {installation.copies(name)[place] for name in (one, two)} == {"damaged"}
    assert installation.state(one) is BackupState.DAMAGED
    assert len(installation.events("rot-found")) == 2
    look(installation)
    assert len(installation.events("rot-found")) == 2, "told once"
    put(installation.at("offsite"), layout.object_key(named(b"same").name), sealed(b"same"))
    objects.release(installation.at("offsite"), named(b"same").name)
    done = look(installation, period=MONTH)
    assert [(damage.destination, damage.repaired_from) for damage in done.damages] == [("local", "offsite")]
    assert objects.quarantined(installation.at()) == frozenset(), "what is in quarantine is tried again in every run"
    assert (installation.copies(one), installation.state(one)) == (
        {"local": "complete", "offsite": "complete"},
        BackupState.COMPLETE,
    )


def test_within_the_period_everything_is_read_and_then_the_copies_count_as_verified(installation: Installation) -> None:
    name = backup_id(1)
    for place in installation.destinations:
        Stock(installation.at(place)).add(1, {str(number): b"file %d" % number for number in range(60)})
    installation.add(2, days=1)
    fsck(installation.wiring, mend=True)  # takes the first one in
    spoil(installation, key_of(b"file 7"))
    reads: list[int] = []
    found: list[Damage] = []
    for _day in range(16):
        done = look(installation, period=MONTH / 2)
        reads.append(done.objects)
        found += done.damages
        installation.clock.move(days=1)
    assert max(reads) < 70, "two places, 61 objects and 6 side files each"
    assert [damage.repaired_from for damage in found] == ["offsite"]
    copies = installation.catalog.backups.get(name).copies
    assert all(
        copy.verified_at is not None and copy.verified_at >= installation.clock() - timedelta(days=16)
        for copy in copies
    )


def test_a_lost_object_is_noticed_in_the_next_run_whatever_turn_it_is(installation: Installation) -> None:
    for place in installation.destinations:
        Stock(installation.at(place)).add(1, {str(number): b"file %d" % number for number in range(40)})
    fsck(installation.wiring, mend=True)
    installation.at().delete(key_of(b"file 3"))
    put(installation.at(), key_of(b"file 4"), b"too short")
    done = look(installation, period=timedelta(days=365))
    assert {(damage.key, damage.repaired_from) for damage in done.damages} == {
        (key_of(b"file 3"), "offsite"),
        (key_of(b"file 4"), "offsite"),
    }
    assert done.objects < 20


def test_a_run_that_is_told_shows_what_was_repaired_and_what_was_not(
    installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    installation.add(1, days=2)
    two = installation.add(2, days=1)
    spoil(installation, key_of(b"1 of shop"))
    for place in installation.destinations:
        spoil(installation, layout.body_key(SERVER, two), place)
    show_damages(Screen(as_json=False), look(installation).as_json())
    text = capsys.readouterr().out
    assert "3 damaged, 1 of them repaired" in text
    assert "repaired: replaced by the copy of offsite" in text
    assert "not repaired: no other destination has the original" in text


def test_manifests_that_are_not_believed_are_told_with_what_to_do_and_their_objects_in_one_line(
    installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    one = installation.add(1, days=1)
    for place in installation.destinations:
        spoil(installation, layout.manifest_key(SERVER, one), place)
    document = fsck(installation.wiring, mend=False).as_json()
    assert sum(found["invariant"] == "no-orphan-object" for found in document["findings"]) > 0
    show_disagreements(Screen(as_json=False), document, repaired=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "no-orphan-object" not in text
    assert "objects are not referenced by any readable manifest; backupd does not remove them" in text
    assert "`backupd verify` repairs them from another destination" in text


def test_what_has_no_signature_is_told_with_the_command_that_signs_it(capsys: pytest.CaptureFixture[str]) -> None:
    damage = Damage(
        "local",
        "servers/shop/x/manifest.json",
        "local: servers/shop/x/manifest.json: it has no signature",
        ("x",),
        trouble="no other destination has the manifest of x",
    )
    show_damages(Screen(as_json=False), VerifyOutcome(("x",), 0, 0, (damage,)).as_json())
    text = " ".join(capsys.readouterr().out.split())
    assert "`backupd catalog sign DESTINATION`, then `backupd verify` again" in text
    assert "take a full backup" not in text


# Archive classes


@pytest.fixture
def vault(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> ColdDestination:
    """In the place of the second destination: everything in its pool is cold."""
    cold = ColdDestination("offsite", clock=installation.clock)
    monkeypatch.setitem(installation.wiring._opened, "offsite", cold)
    return cold


def written(installation: Installation, verify_rules: str) -> None:
    path = installation.base / "policies" / "gold.yaml"
    path.write_text(path.read_text() + f"verify: {verify_rules}\n")
    opened = dict(installation.wiring._opened)
    installation.reread()
    installation.wiring._opened.update(opened)


def test_what_is_cold_is_compared_by_the_places_checksum(installation: Installation, vault: ColdDestination) -> None:
    one = installation.add(1, days=2)
    done = look(installation)
    assert (done.ok, done.cold, done.unseen, vault.asked) == (True, 1, 0, [])
    assert all(copy.verified_at is not None for copy in installation.catalog.backups.get(one).copies)
    vault.recorded[key_of(b"1 of shop")] = "0" * 64
    (damage,) = look(installation).damages
    assert (damage.destination, damage.repaired_from) == ("offsite", "local")
    assert "by the destination's SHA-256" in damage.problem


def test_a_copy_of_which_nothing_can_be_known_is_not_verified(
    installation: Installation, vault: ColdDestination
) -> None:
    one = installation.add(1, days=2)
    del vault.recorded[key_of(b"1 of shop")]
    done = look(installation)
    assert (done.ok, done.cold, done.unseen) == (True, 1, 1)
    assert {
        copy.destination: copy.verified_at is not None for copy in installation.catalog.backups.get(one).copies
    } == {
        "local": True,
        "offsite": False,
    }


def test_one_object_a_year_is_thawed_and_read(installation: Installation, vault: ColdDestination) -> None:
    written(installation, '{schedule: "0 12 * * *", period: 30d, cold_sample: 1}')
    for number in range(1, 6):
        installation.add(number, days=6 - number)
    told: list[str] = []
    for _day in range(400):
        done = look(installation)
        told += done.samples
        assert done.ok
        vault.thawed |= vault.thawing
        installation.clock.move(days=1)
        if done.samples:
            vault.thawing.clear()
        elif len(vault.asked) == 2:
            break
        elif vault.asked:
            installation.clock.move(days=180)
            vault.thawed.clear()
    assert [tier for _key, tier in vault.asked] == [Tier.BULK, Tier.BULK]
    assert "is thawed at the tier bulk, about 0.00" in told[0]
    assert "thawed as a sample, was read, and is as it was stored" in told[1]
    assert len(told) == 4


def test_a_sample_that_went_cold_unread_is_asked_for_again_and_one_that_rots_is_repaired(
    installation: Installation, vault: ColdDestination
) -> None:
    written(installation, '{schedule: "0 12 * * *", cold_sample: 1}')
    installation.add(1, days=2)
    look(installation)
    assert "is being thawed" in look(installation).samples[0]
    assert len(vault.asked) == 1
    vault.thawing.clear()
    look(installation)
    assert len(vault.asked) == 2
    key = vault.asked[0][0]
    vault._blobs[key] = replace(vault._blobs[key], data=b"rot" + vault._blobs[key].data[3:])
    vault.thawed.add(key)
    done = look(installation)
    assert "is damaged" in done.samples[0]
    assert [damage.repaired_from for damage in done.damages] == ["local"]


def test_what_was_read_of_several_servers_is_one_report(installation: Installation) -> None:
    installation.add(1, days=1)
    one = look(installation)
    assert (one.backups, one.ok) == (tuple(one.backups), True)
    both = together([one, replace(one, damages=(Damage("local", "k", "rotten", ("b",)),), unseen=3)])
    assert (both.backups, both.objects, both.bytes) == (one.backups * 2, one.objects * 2, one.bytes * 2)
    assert (both.unseen, both.ok) == (one.unseen + 3, False)
    assert together([one]) == one
