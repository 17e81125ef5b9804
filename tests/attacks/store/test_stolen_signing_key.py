"""A signing key in a thief's hands, or lost: another one comes into its place, and what only the former has signed
counts for nothing, however old it says that it is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from backupd.app.backup_records import adopt_unknown, record_of_manifest
from backupd.app.context.settings import load_settings
from backupd.app.context.trust import recovery_page, signing
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies import signed_heads as heads
from backupd.app.metacopies.catalog_copies import write_copies
from backupd.app.metacopies.signed_heads import noted
from backupd.app.metacopies.signing_keys import ROTATED, rotate_signing
from backupd.app.restores.catalog_rebuild import Rebuilt, rebuild
from backupd.app.retention.deletion import sweep_destination
from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import Copy
from backupd.model.errors import KeyUnusableError, RefusedError, UsageError
from backupd.model.job import silent
from backupd.model.manifest import Header, bound
from backupd.transfer.records.authenticity import SignedDestination, Signing, make_key, sign
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.manifests import described, get_bytes, put_bytes, read
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.catalog.samples import proof
from tests.support.keys import Keys, gpg
from tests.support.logs.log_store import SERVER, store, wired
from tests.support.logs.real_logs import real_logs
from tests.support.stores.signed import signing as signing_house
from tests.support.stores.stock import Stock, backup_id, commit_header, everything, facts

DESTINATIONS = ("local", "offsite")
PROOF = "20261121T180000Z-0000000a"


@dataclass
class House:
    wiring: Wiring
    base: Path

    @property
    def former(self) -> str:
        return signing(self.wiring.settings).key or ""

    def beneath(self, place: str = "local") -> FilesystemDestination:
        """The place as somebody sees it who can write there."""
        return FilesystemDestination(place, self.base / place)

    def renamed(self, key: str) -> Wiring:
        """The same installation, after somebody wrote ``key`` into the configuration."""
        file = self.wiring.settings.file
        file.write_text(file.read_text().replace(self.former, key))
        return Wiring(load_settings(file), self.wiring.catalog, self.wiring.clock)

    def rebuilt(self, wiring: Wiring, name: str) -> tuple[Rebuilt, set[str]]:
        """A new catalog out of ``local``, and which backups are native in it."""
        with open_catalog(f"sqlite:///{self.base}/{name}.db") as catalog:
            done = rebuild(replace(wiring, catalog=catalog), "local", silent)
            return done, {one.id for one in catalog.backups.list(SERVER)}


@pytest.fixture
def house(tmp_path: Path, keys: Keys) -> Iterator[House]:
    """Two backups, a binary log, a proof, a head, and copies of the catalog, all signed, at two places."""
    with wired(tmp_path, keys) as plain, signing_house(plain, opens=True) as wiring:
        found = House(wiring, tmp_path)
        for number in (1, 2):
            header = put(found, number, DESTINATIONS)
            row = record_of_manifest(
                wiring, wiring.destination("local"), header, Copy("local", "complete", header.finished_at), pinned=False
            )
            wiring.catalog.backups.add(
                replace(
                    row,
                    manifest=row.found,
                    found="",
                    copies=tuple(Copy(place, "complete", header.finished_at) for place in DESTINATIONS),
                )
            )
        store(
            wiring, Keys(signing(wiring.settings).home, signing(wiring.settings).home, found.former), (real_logs()[0],)
        )
        wiring.catalog.proofs.add(replace(proof(), id=PROOF, server=SERVER))
        heads.renew(wiring)
        yield found


def put(house: House, number: int, places: tuple[str, ...], signer: Signing | None = None) -> Header:
    """A backup whose body is sealed as a true one is; signed by this installation, or by ``signer`` beneath it."""
    sealer = Sealer(house.wiring.recipients()[1], signing(house.wiring.settings).home)
    stock = Stock(house.beneath(places[0]), server=SERVER)
    header, plain = bound(
        header := stock.add(number, {"a": b"%d" % number}, commit=False),
        replace(stock.body(header), facts=facts(backup_id(number), header)),
    )
    sealed = sealer.seal(plain)
    header = replace(header, body=described(layout.BODY, sealed))
    key = manifest(number)
    for place in map(house.beneath, places):
        Stock(place, server=SERVER).add(number, {"a": b"%d" % number}, commit=False)
        put_bytes(place, layout.body_key(SERVER, header.backup_id), sealed)
        if signer is None:
            commit_header(house.wiring.destination(place.name), header)
        else:
            commit_header(place, header)
            put_bytes(place, layout.signature_key(key), sign(signer, get_bytes(place, key)))
    return header


def manifest(number: int) -> str:
    return layout.manifest_key(SERVER, backup_id(number))


def unbelieved(wiring: Wiring) -> list[str]:
    """Every document at the places that is signed and that nobody whom ``wiring`` trusts vouches for."""
    found = []
    for name in DESTINATIONS:
        place = wiring.destination(name)
        assert isinstance(place, SignedDestination)
        found += [
            f"{name}: {info.key}"
            for info in place.list("")
            if layout.signed_of(info.key) is not None and place.problem(info.key, place.as_it_lies(info.key))
        ]
    return found


def page_says(house: House, wiring: Wiring, command: str) -> str:
    return subprocess.run(
        ["sh", "-c", command],
        cwd=house.base / "local",
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "GNUPGHOME": str(signing(wiring.settings).home)},
    ).stdout.strip()


def thief_of(house: House) -> Signing:
    """Has a copy of the keyring from the day of the theft."""
    return replace(signing(house.wiring.settings), trusted=(house.former,))


def test_what_a_thief_signs_is_believed_until_the_key_is_replaced_and_never_after(house: House) -> None:
    old, former = house.wiring, house.former
    assert {one.problem for one in write_copies(old, now=True)} == {""}
    put(house, 3, DESTINATIONS, thief_of(house))
    assert isinstance(read(old.destination("local"), SERVER, backup_id(3)).header, Header)  # type: ignore[union-attr]
    assert house.rebuilt(old, "before")[1] == {backup_id(1), backup_id(2), backup_id(3)}, "the attack works"
    former_page = recovery_page(old.settings).command

    begun = rotate_signing(old)
    assert (begun.ok, begun.finished, begun.former) == (False, False, former)
    for place in begun.destinations.values():
        assert [text.split(": ", 2)[1:] for text in place.left] == [[manifest(3), "the catalog knows no such backup"]]
    assert unbelieved(old) == [], "the running service goes on"
    new = house.renamed(begun.key)
    assert unbelieved(new) == [f"{place}: {manifest(3)}" for place in DESTINATIONS]

    put(house, 4, DESTINATIONS, thief_of(house))
    done = rotate_signing(new, former=former)
    assert done.finished
    assert unbelieved(new) == [f"{place}: {manifest(number)}" for place in DESTINATIONS for number in (3, 4)]
    native = house.rebuilt(new, "after")
    assert native[1] == {backup_id(1), backup_id(2)}, "all that is ours is native, and nothing else"
    assert sum("a key that is not trusted here" in problem for problem in native[0].problems) == 2
    assert (done.retired[SERVER].key, done.retired[SERVER].counter) == (former, 1)
    assert noted(new)[SERVER].counter == 2
    assert f"{former} signed until counter 1" in " ".join(heads.compare(new).lines)

    assert [
        f"It reports that key {former} was replaced at " in said and "still trusts it" in said
        for said in heads.compare(old).suspicions
    ] == [True, True], "a configuration of before is told so"

    (told,) = new.catalog.events.list(kind=ROTATED)
    assert "print a new recovery page" in told.hint
    page = Service(new, "").keys.recovery_page()
    assert f"Destroy every page of the key {former} until " in page.text
    assert page_says(house, new, page.command) == "OK"
    assert page_says(house, new, former_page).startswith("STOP")
    verified = subprocess.run(
        ["gpg", "--batch", "--status-fd", "1", "--verify", "manifest.json.sig", "manifest.json"],
        cwd=house.base / "local" / layout.backup_folder(SERVER, backup_id(1)),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "GNUPGHOME": str(signing(new.settings).home)},
    ).stdout
    assert f"VALIDSIG {done.key}" in verified, "by hand, with the new page"


def test_a_key_that_was_lost_is_replaced_without_it(house: House) -> None:
    home, former = signing(house.wiring.settings).home, house.former
    other = make_key(home, "backupd signing other")
    later = Wiring(house.wiring.settings, house.wiring.catalog, house.wiring.clock)
    # Seals and signatures are by one key in this house: only what signs is taken away.
    with open_catalog(f"sqlite:///{house.base}/catalog.db") as again:
        lost = replace(later, catalog=again)
        grip = keygrip(home, former)
        (home / "private-keys-v1.d" / f"{grip}.key").unlink()
        gpg_forgets(home)
        with pytest.raises(KeyUnusableError, match="cannot sign"):
            sign(signing(lost.settings), b"x")
        begun = rotate_signing(lost, to=other)
        assert (begun.ok, begun.key) == (True, other)
        new = house.renamed(other)
        assert unbelieved(new) == []
        done = rotate_signing(new, former=former)
        assert (done.ok, [one.signed for one in done.destinations.values()]) == (True, [0, 0]), "nothing came meanwhile"
        assert unbelieved(new) == []
        assert heads.renew(Wiring(new.settings, again, lambda: new.clock().replace(year=2090))) == 1


def keygrip(home: Path, key: str) -> str:
    lines = gpg(home, "--with-colons", "--with-keygrip", "--list-keys", key).decode().splitlines()
    return next(line.split(":")[9] for line in lines if line.startswith("grp:"))


def gpg_forgets(home: Path) -> None:
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "gpg-agent"], check=True)


def test_what_was_only_taken_in_from_a_place_is_signed_when_somebody_says_so(house: House) -> None:
    put(house, 3, DESTINATIONS, thief_of(house))
    assert [adopt_unknown(house.wiring, house.wiring.destination(place)) for place in DESTINATIONS] == [
        [backup_id(3)]
    ] * 2
    begun = rotate_signing(house.wiring)
    assert all(
        "where a holder of the former key could have stored it" in text
        for place in begun.destinations.values()
        for text in place.left
    )
    assert [len(place.left) for place in begun.destinations.values()] == [1, 1]
    again = rotate_signing(house.wiring, to=begun.key, unproven=True)
    assert (again.ok, [place.signed for place in again.destinations.values()]) == (True, [1, 1])


def test_what_cannot_be_done_is_refused_before_anything_is_signed(house: House, tmp_path: Path) -> None:
    wiring, former = house.wiring, house.former
    with pytest.raises(RefusedError, match="signs already"):
        rotate_signing(wiring, to=former)
    with pytest.raises(RefusedError, match="is still the key that signs"):
        rotate_signing(wiring, former=former)
    with pytest.raises(KeyUnusableError, match="cannot sign"):
        rotate_signing(wiring, to="A" * 40)
    with pytest.raises(UsageError, match="not the fingerprint"):
        rotate_signing(wiring, to="ops@example.com")
    with open_catalog(f"sqlite:///{tmp_path}/empty.db") as empty, pytest.raises(RefusedError, match="holds no backups"):
        rotate_signing(replace(wiring, catalog=empty))
    other = make_key(signing(wiring.settings).home, "backupd signing other")
    file = wiring.settings.file
    file.write_text(
        file.read_text().replace(f"signing_key: {former}", f"signing_key: {other}, trusted_signers: [{former}]")
    )
    trusting = Wiring(load_settings(file), wiring.catalog, wiring.clock)
    with pytest.raises(RefusedError, match="trusted_signers names it"):
        rotate_signing(trusting, former=former)
    assert unbelieved(wiring) == []


def test_a_rebuild_makes_all_native_under_the_key_that_is_named_and_until_then_nothing_goes(house: House) -> None:
    file, former = house.wiring.settings.file, house.former
    other = make_key(signing(house.wiring.settings).home, "backupd signing other")
    file.write_text(file.read_text().replace(former, other))
    stranger = Wiring(load_settings(file), house.wiring.catalog, house.wiring.clock)
    before = everything(house.beneath())
    done, native = house.rebuilt(stranger, "stranger")
    assert (native, done.backups) == (set(), 0)
    assert sum("a key that is not trusted here" in one for one in done.problems) >= 2
    with open_catalog(f"sqlite:///{house.base}/stranger.db") as catalog:
        strange = replace(stranger, catalog=catalog)
        (held,) = sweep_destination(strange, strange.destination("local"))
        assert "no object is collected while manifests cannot be read" in held
    assert everything(house.beneath()) >= before, "what nobody can read is kept, and all that it may name"
    file.write_text(
        file.read_text().replace(f"signing_key: {other}", f"signing_key: {other}, trusted_signers: [{former}]")
    )
    named = Wiring(load_settings(file), house.wiring.catalog, house.wiring.clock)
    assert heads.compare(named).suspicions == ()
    done, native = house.rebuilt(named, "named")
    assert (native, done.foreign) == ({backup_id(1), backup_id(2)}, ())


def test_a_place_that_does_not_answer_is_named_and_finished_later(house: House) -> None:
    (house.base / "offsite").rename(house.base / "away")
    begun = rotate_signing(house.wiring)
    assert (begun.ok, list(begun.destinations), list(begun.silent)) == (False, ["local"], ["offsite"])
    new = house.renamed(begun.key)
    assert not rotate_signing(new, former=begun.former).ok
    (house.base / "away").rename(house.base / "offsite")
    done = rotate_signing(new, former=begun.former)
    assert (done.ok, done.retired[SERVER].counter) == (True, 1), "what was said first stands"
    assert unbelieved(new) == []
