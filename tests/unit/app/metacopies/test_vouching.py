"""Where a policy says `signed: true`: what anybody can make with a public key is not believed, and nobody vouches for
it by mistake."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backupd.alerts.rules import NOT_OURS
from backupd.app.backup_records import adopt_unknown, record_of
from backupd.app.context.settings import load_settings
from backupd.app.context.trust import signed_servers
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.catalog_copies import write_copies
from backupd.app.metacopies.signing_keys import vouch
from backupd.app.restores.catalog_rebuild import rebuild
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import HoldKind
from backupd.model.job import silent
from backupd.model.manifest import Header, StoredObject, bound, decode_header, encode_header
from backupd.transfer import log_segments
from backupd.transfer.fsck import Invariant, examine
from backupd.transfer.records import proofs as proofdoc
from backupd.transfer.records.authenticity import SignedDestination
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.manifests import described, get_bytes, put_bytes
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.catalog.samples import proof
from tests.support.keys import Keys
from tests.support.logs.log_store import BRANCH, SERVER, wired
from tests.support.stores.signed import signing
from tests.support.stores.stock import Stock, backup_id, commit_header, facts

OURS, FORGED = "20261121T180000Z-0000000a", "20261121T185000Z-deadbeef"


@pytest.fixture
def wiring(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, keys) as found:
        yield found


@pytest.fixture
def beneath(tmp_path: Path) -> FilesystemDestination:
    """The place ``local`` as somebody sees it who can write there, and has no key but public ones."""
    return FilesystemDestination("local", tmp_path / "local")


def mistaken(wiring: Wiring) -> Wiring:
    """The same installation, after somebody made a mistake in its policy."""
    file = wiring.settings.configuration.policies / "gold.yaml"
    file.write_text(file.read_text() + "nonsense: 1\n")
    return Wiring(load_settings(wiring.settings.file, strict=False), wiring.catalog, wiring.clock)


def credulous(strict: Wiring, beneath: FilesystemDestination) -> Wiring:
    """The same installation before its policy said that anything has to be signed."""
    found = replace(strict)
    found._opened["local"] = beneath
    return found


def sealer_of(wiring: Wiring) -> Sealer:
    return Sealer(wiring.recipients()[1], wiring.settings.encryption.gnupg_home)


def stored(place: FilesystemDestination, sealer: Sealer, number: int) -> Header:
    """A backup whose body is sealed as a true one is, in the place, unsigned."""
    stock = Stock(place, server=SERVER)
    header = stock.add(number, {"a": b"a", "b": b"b"})
    header, plain = bound(header, stock.body(header))
    sealed = sealer.seal(plain)
    put_bytes(place, layout.body_key(SERVER, header.backup_id), sealed)
    header = replace(header, body=described(layout.BODY, sealed))
    commit_header(place, header)
    return header


def manifest(number: int) -> str:
    return layout.manifest_key(SERVER, backup_id(number))


def test_a_catalog_and_a_proof_that_anybody_can_seal_are_passed_over_by_a_rebuild(
    wiring: Wiring, beneath: FilesystemDestination, tmp_path: Path
) -> None:
    with signing(wiring, opens=True) as strict:
        strict.catalog.proofs.add(replace(proof(), id=OURS, server=SERVER))
        for told in write_copies(strict, now=True):
            assert told.problem == ""
        sealer = sealer_of(strict)
        with open_catalog(f"sqlite:///{tmp_path}/evil.db") as evil:
            evil.holds.set(SERVER, HoldKind.PAUSE, "attacker", "nobody", strict.clock())
        sealer.seal_file(tmp_path / "evil.db", tmp_path / "evil.gpg")
        forged = layout.catalog_key(strict.clock().replace(year=2090), "a" * 12)
        put_bytes(beneath, forged, (tmp_path / "evil.gpg").read_bytes())
        proofdoc.put(beneath, replace(proof(), id=FORGED, server=SERVER), sealer)
        with open_catalog(f"sqlite:///{tmp_path}/new.db") as catalog:
            done = rebuild(replace(strict, catalog=catalog), "local", silent)
            assert [one.id for one in catalog.proofs.list(SERVER)] == [OURS]
            assert catalog.holds.all() == ()
        assert len(done.catalog_of) == 1, "our own copy is believed"
        assert len(done.problems) == 2
        for key in (forged, layout.proof_key(SERVER, FORGED)):
            assert [problem for problem in done.problems if key in problem and "it has no signature" in problem]


def test_proofs_and_copies_that_are_older_than_the_signatures_are_put_anew_signed(
    wiring: Wiring, beneath: FilesystemDestination
) -> None:
    wiring.catalog.proofs.add(replace(proof(), id=OURS, server=SERVER))
    assert write_copies(wiring, now=True)[0].proofs == 1
    assert proofdoc.unsigned(beneath, SERVER) == {OURS}
    with signing(wiring) as strict:
        assert [one.proofs for one in write_copies(strict, now=True)] == [1, 1]
        assert proofdoc.unsigned(beneath, SERVER) == set()
        assert [(one.proofs, one.configuration) for one in write_copies(strict, now=True)] == [(0, ""), (0, "")]
        (signature,) = [info.key for info in beneath.list(layout.CONFIGURATIONS) if info.key.endswith(layout.SIGNATURE)]
        beneath.delete(signature)
        assert write_copies(strict, now=True)[0].configuration != "", "what nobody would believe is no copy"


@pytest.mark.parametrize(
    ("signed", "announced", "foreign"),
    [(True, False, False), (True, True, False), (False, True, False), (False, False, True)],
)
def test_a_backup_whose_row_was_lost_is_ours_by_its_signature_or_by_what_was_announced(
    wiring: Wiring, beneath: FilesystemDestination, signed: bool, announced: bool, foreign: bool
) -> None:
    """Killed between manifest and row. Of format 2."""
    with contextlib.ExitStack() as stack:
        house = stack.enter_context(signing(wiring, opens=True)) if signed else wiring
        header = stored(beneath, sealer_of(house), 1)
        assert header.is_bound
        if signed:
            commit_header(house.destination("local"), header)
        if announced:
            house.catalog.backups.announce(header.backup_id, hashlib.sha256(encode_header(header)).hexdigest())
        assert adopt_unknown(house, house.destination("local")) == [header.backup_id]
        assert house.catalog.backups.get(header.backup_id).foreign is foreign
        assert len(house.catalog.events.list(kind=NOT_OURS.broken)) == foreign, "what is ours is taken in silently"


def test_another_manifest_than_was_announced_and_one_without_a_signature_are_not_ours(
    wiring: Wiring, beneath: FilesystemDestination
) -> None:
    header = stored(beneath, sealer_of(wiring), 1)
    wiring.catalog.backups.announce(header.backup_id, "0" * 64)
    assert adopt_unknown(wiring, wiring.destination("local")) == [header.backup_id]
    assert wiring.catalog.backups.get(header.backup_id).foreign
    with signing(wiring, opens=True) as strict:
        other = stored(beneath, sealer_of(strict), 2)
        strict.catalog.backups.announce(other.backup_id, hashlib.sha256(encode_header(other)).hexdigest())
        assert adopt_unknown(strict, strict.destination("local")) == [], "unsigned, it is not believed at all"


def test_without_the_secret_key_copies_fail_in_words(wiring: Wiring) -> None:
    with signing(wiring) as strict:
        file = strict.settings.file
        text = file.read_text().replace("signing_key: ", "trusted_signers: [")
        file.write_text(text.replace("}\nrestore", "]}\nrestore"))
        for told in write_copies(Wiring(load_settings(file), wiring.catalog, wiring.clock), now=True):
            assert "encryption.signing_key is not set" in told.problem


def test_the_row_of_a_backup_has_the_digest_of_the_manifest_that_its_run_stored(
    wiring: Wiring, beneath: FilesystemDestination
) -> None:
    assert wiring.destination("local").is_initialised()
    header = Stock(beneath, server=SERVER).add(1, {"a": b"a"})
    spec = cast(Any, SimpleNamespace(destinations=(beneath,)))
    record = record_of(spec, header, facts(header.backup_id, header), ())
    assert record.manifest == hashlib.sha256(get_bytes(beneath, manifest(1))).hexdigest()


@pytest.fixture
def strict(wiring: Wiring) -> Iterator[Wiring]:
    with signing(wiring, opens=True) as found:
        yield found


def known_by_its_run(wiring: Wiring, header: Header) -> None:
    record = wiring.catalog.backups.get(header.backup_id)
    digest = hashlib.sha256(encode_header(header)).hexdigest()
    wiring.catalog.backups.add(replace(record, manifest=digest), replace=True)
    assert wiring.catalog.backups.get(header.backup_id).manifest == digest


def other_body(header: Header) -> Header:
    return replace(header, body=replace(header.body, sha256="0" * 64))


def other_objects(header: Header) -> Header:
    return replace(header, objects=header.objects[:1])


def other_object_digest(header: Header) -> Header:
    first, *rest = header.objects
    return replace(header, objects=(StoredObject(first.name, first.size, "0" * 64), *rest))


def other_recipients(header: Header) -> Header:
    return replace(header, recipients=("B" * 40,))


@pytest.mark.parametrize(
    "alter", [other_body, other_objects, other_object_digest, other_recipients], ids=lambda alter: alter.__name__
)
def test_nobody_vouches_for_a_manifest_that_is_not_the_one_of_the_run(
    wiring: Wiring, beneath: FilesystemDestination, strict: Wiring, alter: Any
) -> None:
    headers = [stored(beneath, sealer_of(strict), number) for number in (1, 2)]
    rebuild(wiring, "local", silent)
    for header in headers:
        known_by_its_run(wiring, header)
    commit_header(beneath, alter(headers[0]))
    for unproven in (False, True):
        done = vouch(strict, "local", unproven=unproven)
        assert done.signed == (0 if unproven else 1), "the other one, once"
        (left,) = done.left
        assert "it differs from what the backup run stored" in left
        assert manifest(1) in left
    commit_header(beneath, headers[0])
    assert vouch(strict, "local").left == ()
    put_bytes(beneath, manifest(1) + ".sig", b"garbage")
    assert vouch(replace(strict), "local").signed == 1, "the digest proves it, whatever became of its signature"


def test_what_was_taken_in_from_a_place_proves_nothing_about_it(beneath: FilesystemDestination, strict: Wiring) -> None:
    stored(beneath, sealer_of(strict), 1)
    log_segments.put_branch(beneath, BRANCH)
    rebuild(credulous(strict, beneath), "local", silent)
    done = vouch(strict, "local")
    assert done.signed == 0
    assert len(done.left) == 2
    assert all("the catalog holds no digest of it" in left for left in done.left)


def test_asked_for_only_what_agrees_in_everything_is_signed(beneath: FilesystemDestination, strict: Wiring) -> None:
    header = stored(beneath, sealer_of(strict), 1)
    rebuild(credulous(strict, beneath), "local", silent)
    rows = strict.catalog.backups
    rows.add(replace(rows.get(header.backup_id), found=""), replace=True)  # as catalogs of earlier versions are
    assert vouch(strict, "local").signed == 0
    for alter, words in (
        (other_body, "its body.jsonl.zst.gpg holds other bytes"),
        (other_objects, "the object list in the clear is not the one that was sealed"),
        (other_object_digest, "the object list in the clear is not the one that was sealed"),
        (lambda one: replace(one, tables_missing=3), "sizes, times or positions differ"),
    ):
        commit_header(beneath, alter(header))
        (left,) = vouch(strict, "local", unproven=True).left
        assert words in left
    commit_header(beneath, header)
    (left,) = vouch(strict, "local").left
    assert "--unproven" in left
    gone = layout.object_key(header.objects[0].name)
    content = get_bytes(beneath, gone)
    put_bytes(beneath, gone, content + b"more")
    (left,) = vouch(strict, "local", unproven=True).left
    assert "1 of its 2 objects are missing" in left
    put_bytes(beneath, gone, content)
    assert vouch(strict, "local", unproven=True).signed == 1
    assert decode_header(get_bytes(strict.destination("local"), manifest(1))) == header


def test_a_mistake_in_a_policy_does_not_switch_signatures_off(beneath: FilesystemDestination, strict: Wiring) -> None:
    Stock(beneath, server=SERVER).add(1, {"a": b"forged"})
    broken = mistaken(strict)
    assert signed_servers(broken.settings) == {SERVER}
    place = broken.destination("local")
    assert [
        found.subject
        for found in examine(place, None, clock=broken.clock)
        if found.invariant is Invariant.MANIFEST_INTACT
    ] == [backup_id(1)]
    done = rebuild(broken, "local", silent)
    assert (done.backups, len(done.problems)) == (0, 1)
    (left,) = vouch(broken, "local", unproven=True).left
    assert "its policy cannot be used; correct it first" in left
    assert [info.key for info in beneath.list("") if info.key.endswith(".sig")] == []


def test_where_no_keys_for_signatures_are_configured_a_mistake_in_a_policy_changes_nothing(wiring: Wiring) -> None:
    broken = mistaken(wiring)
    assert signed_servers(broken.settings) == frozenset()
    assert not isinstance(broken.destination("local"), SignedDestination)
