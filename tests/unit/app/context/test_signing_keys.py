"""Signing is what an installation does once a key is named; the first key is made by a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.trust import findings, signed_servers, wanting
from backupd.app.context.wiring import Wiring
from backupd.app.copies.repairs import REPAIRED
from backupd.app.metacopies.catalog_copies import read_copies, write_copies
from backupd.app.metacopies.signing_keys import make_signing
from backupd.cli.main import main
from backupd.model.backup_record import Copy
from backupd.model.errors import KeyUnusableError, RefusedError
from storage import layout
from tests.support.catalog.samples import backup, proof
from tests.support.keys import Keys, operator_keys, stop_agent
from tests.support.logs.log_store import DESTINATIONS, SERVER, wired
from tests.support.stores.stock import Stock, backup_id


@pytest.fixture(scope="module")
def own_keys() -> Iterator[Keys]:
    """A keyring that no other test has a signing key in."""
    with operator_keys() as found:
        yield found


@pytest.fixture
def house(tmp_path: Path, own_keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, own_keys) as found:
        yield found
        stop_agent(own_keys.public_home)


def again(wiring: Wiring) -> Wiring:
    return Wiring(load_settings(wiring.settings.file), wiring.catalog, wiring.clock)


def says(wiring: Wiring, line: str) -> Wiring:
    """The same installation, whose policy says ``line``, too."""
    file = wiring.settings.configuration.policies / "gold.yaml"
    file.write_text(file.read_text() + line)
    return again(wiring)


def test_a_configuration_without_a_word_works_on_and_check_names_the_command_that_makes_a_key(
    house: Wiring, capsys: pytest.CaptureFixture[str]
) -> None:
    (told,) = findings(house.settings)
    assert (told.severity, "no signing key is named" in told.message) == ("warning", True)
    assert "`backupd keys make-signing`" in told.hint
    Stock(house.destination("local"), server=SERVER).add(1, {"a": b"a"})
    assert main(["keys", "make-signing", "--config", str(house.settings.file), "--json"]) in (0, None)
    made = json.loads(capsys.readouterr().out)
    assert (made["gnupg_home"], len(made["signing_key"])) == (str(house.settings.encryption.gnupg_home), 40)
    line = made["next"][0].partition("`")[2].partition("`")[0]
    file = house.settings.file
    file.write_text(file.read_text().replace("encryption: {", f"encryption: {{{line}, "))
    signed = again(house)
    assert wanting(signed.settings) == {SERVER}, "nothing else has to be said"
    assert [(one.severity, one.message) for one in findings(signed.settings)] == [
        ("ok", f"manifests are signed with {made['signing_key']}")
    ]
    Stock(signed.destination("local"), server=SERVER).add(2, {"a": b"a"})
    signed.destination("local").stat(layout.signature_key(layout.manifest_key(SERVER, backup_id(2))))
    with pytest.raises(RefusedError, match="names a signing key already"):
        make_signing(signed)
    off = says(signed, "signed: false\n")
    assert signed_servers(off.settings) == frozenset()
    assert [one.severity for one in findings(off.settings)] == ["warning"]
    assert "as `signed: false` in the policy says" in findings(off.settings)[0].message


def test_that_nothing_is_signed_is_a_choice_that_is_told(house: Wiring) -> None:
    (told,) = findings(says(house, "signed: false\n").settings)
    assert (told.severity, told.hint) == ("warning", "remove `signed: false` if this is not intended")


def test_a_keyring_that_cannot_be_written_to_is_told_in_words(house: Wiring, tmp_path: Path) -> None:
    file = house.settings.file
    file.write_text(file.read_text().replace(str(house.settings.encryption.gnupg_home), str(tmp_path / "none")))
    with pytest.raises(KeyUnusableError, match="there is no such folder"):
        make_signing(again(house))


def test_what_is_stored_and_the_policies_that_say_no_are_among_what_is_to_be_done(house: Wiring) -> None:
    off = says(house, "signed: false\n")
    steps = make_signing(off).steps
    assert any("take `signed: false` out of policy gold" in step for step in steps)
    assert steps[-1].endswith("backupd keys page")


def test_the_service_stands_still_from_the_line_in_the_configuration_until_what_is_stored_is_signed(
    house: Wiring,
) -> None:
    """Else everything that was stored unsigned would be found damaged meanwhile."""
    house.catalog.backups.add(replace(backup(), server=SERVER, copies=(Copy("local", "complete", house.clock()),)))
    steps = make_signing(house).steps
    stop, name, sign, start = (
        next(number for number, step in enumerate(steps) if words in step)
        for words in ("systemctl stop", "signing_key:", "sign ", "systemctl start")
    )
    assert 0 == stop < name < sign < start
    assert not any("reload" in step for step in make_signing(house).steps)


def test_copies_of_before_a_signing_key_was_named_are_put_anew_and_are_no_rot(house: Wiring) -> None:
    house.catalog.proofs.add(replace(proof(), id="20261121T000000Z-0000000a", server=SERVER))
    write_copies(house)
    key = make_signing(house).key
    file = house.settings.file
    file.write_text(file.read_text().replace("encryption: {", f"encryption: {{signing_key: {key}, "))
    found = read_copies(again(house), None)
    assert {damage.destination for damage in found} == set(DESTINATIONS)
    assert [str(damage) for damage in found if not (damage.aged and damage.repaired_from)] == []
    assert house.catalog.events.list(kind=REPAIRED) == ()
    assert read_copies(again(house), None) == ()


def test_the_page_is_printed_before_there_is_a_catalog(
    house: Wiring, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = house.settings.file
    key = make_signing(house).key
    file.write_text(
        file.read_text()
        .replace("encryption: {", f"encryption: {{signing_key: {key}, ")
        .replace("catalog.db", "none.db")
    )
    assert main(["keys", "page", "--config", str(file)]) in (0, None)
    page = capsys.readouterr().out
    assert f"- local: filesystem {tmp_path / 'local'}\n" in page
