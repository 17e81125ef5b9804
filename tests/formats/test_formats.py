"""Repositories of earlier versions (freeze.py): read, verified, restored, proved, rebuilt, expired,
and restored by hand with their own text. What a corpus holds stands in its facts.json."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stores.test_disaster import followed
from tests.support.e2e.house import SERVER, House
from tests.support.hostile.forging import edited
from tests.support.keys import Keys, fingerprints, gpg, make_home, stop_agent
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory
from tests.support.stores.moto_server import MotoServer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")
CORPORA = sorted(path.parent for path in Path(__file__).parent.glob("*/facts.json"))


@dataclass(frozen=True)
class Corpus:
    folder: Path
    facts: dict[str, Any]
    keys: Keys
    server: PrivateServer

    @contextlib.contextmanager
    def house(self, name: str, *, policy: str = "") -> Iterator[House]:
        """An installation with no catalog, and the frozen repository ``name`` as its destination ``local``."""
        with short_directory() as base:
            house = House(base, self.server, self.keys, policy_extra=policy)
            with tarfile.open(self.folder / f"{name}.tar") as archive:
                archive.extractall(house.repository, filter="tar")
            yield house


@pytest.fixture(scope="module", params=CORPORA, ids=lambda folder: str(folder.name))
def corpus(request: pytest.FixtureRequest, shared_server: PrivateServer) -> Iterator[Corpus]:
    folder: Path = request.param
    facts = json.loads((folder / "facts.json").read_text())
    with short_directory("bt-frozen-") as base:
        base.chmod(0o755)
        secret, public = make_home(base / "secret"), make_home(base / "public")
        try:
            gpg(secret, "--import", str(folder / "key.asc"))
            gpg(public, "--import", stdin=gpg(secret, "--export"))
            (fingerprint,) = fingerprints(secret, Keys.user_id)
            yield Corpus(folder, facts, Keys(secret, public, fingerprint), shared_server)
        finally:
            stop_agent(secret)
            stop_agent(public)


def test_there_is_a_corpus() -> None:
    assert CORPORA


def held(datadir: Path) -> dict[str, int]:
    with PrivateServer(datadir=datadir) as restored, restored.connect() as connection:
        return checksum_everything(connection)


def test_a_repository_is_rebuilt_verified_restored_proved_and_expired(corpus: Corpus) -> None:
    plain = corpus.facts["plain"]
    with corpus.house("plain", policy="retention: {local: {keep_fulls: 1}}\n") as house:
        done = house.ok("catalog", "rebuild", "--from", "local")
        assert (done["backups"], done["problems"]) == (len(plain["backups"]), [])
        found = {one["id"]: {name: one[name] for name in plain["backups"][one["id"]]} for one in house.backups()}
        assert found == plain["backups"]
        house.ok("verify")
        assert house.fsck() == []
        for name, target in {"increment": f"backup:{plain['increment']}", "moment": plain["moment"]}.items():
            datadir = house.base / name
            house.restore(datadir, to=target)
            assert held(datadir) == plain["sums"][name], name
        assert house.ok("test-restore", SERVER, "--to", f"backup:{plain['increment']}")["outcome"] == "proved"
        house.ok("backups", "delete", plain["partial"])
        house.ok("retention", SERVER, "--apply", "--really")
        left = {one["id"] for one in house.backups() if one["state"] == "complete"}
        assert {plain["full"], plain["increment"]} <= left
        assert plain["partial"] not in left


def test_its_own_text_restores_it_without_this_program(corpus: Corpus) -> None:
    plain = corpus.facts["plain"]
    with corpus.house("plain") as house, short_directory("bt-new-") as new:
        text = (house.repository / "RECOVER.md").read_text()
        first, *_, by_hand = (part.partition("\n```\n")[0] for part in text.split("\n```sh\n")[1:])
        datadir = new / "data"
        said = followed(
            [first, by_hand],
            {
                "GNUPGHOME": str(corpus.keys.secret_home),
                "REPOSITORY": str(house.repository),
                "DATADIR": str(datadir),
                "BASE": str(new / "r"),
                "TO": plain["moment"],
            },
            new,
            programs="",
        )
        assert f"is restored, to {plain['moment']}" in said
        assert held(datadir) == plain["sums"]["moment"]


def test_tables_come_out_of_a_logical_backup(corpus: Corpus) -> None:
    plain = corpus.facts["plain"]
    with corpus.house("plain") as house:
        house.ok("catalog", "rebuild", "--from", "local")
        out = house.base / "sql"
        told = house.ok(
            "restore", SERVER, "--to", f"backup:{plain['logical']}", "--tables", "shop.later", "--sql", str(out)
        )
        assert [one["source"] for one in told["tables"]] == ["shop.later"]
        rows = "".join(path.read_text() for path in sorted((out / "tables/shop/later").glob("data-*.sql")))
        assert "(1)" in rows
        done = house.run(
            "restore",
            SERVER,
            "--to",
            f"backup:{plain['partial']}",
            "--tables",
            "shop.broken",
            "--sql",
            str(house.base / "none"),
        )
        assert done.code == 1
        assert "does not hold shop.broken" in done.all


def test_a_catalog_is_taken_over_as_it_is(corpus: Corpus) -> None:
    plain = corpus.facts["plain"]
    with corpus.house("plain") as house:
        shutil.copy(corpus.folder / "catalog.db", house.base / "catalog.db")
        house.ok("catalog", "upgrade")
        assert {one["id"] for one in house.backups()} == set(plain["backups"])
        assert house.fsck() == []
        house.restore(house.base / "new")
        assert held(house.base / "new") == plain["sums"]["latest"]


def test_signed_documents_are_checked_restored_proved_and_expired(corpus: Corpus) -> None:
    signed = corpus.facts["signed"]
    whole = "increment" in signed  # else of a version in which a policy had to say so, and without a head
    policy = "retention: {local: {keep_fulls: 1}}\n" + ("" if whole else "signed: true\n")
    with corpus.house("signed", policy=policy) as house:
        house.write(encryption_home=corpus.keys.secret_home)
        house.config.write_text(
            house.config.read_text().replace("recipients: [", f"signing_key: {corpus.facts['signer']}, recipients: [")
        )
        done = house.ok("catalog", "rebuild", "--from", "local")
        assert (done["backups"], done["foreign"], done["problems"]) == (1 + whole, [], [])
        assert any("counter" in line for line in done["heads"]) == whole
        house.ok("verify")
        assert house.fsck() == []
        house.restore(house.base / "new")
        assert held(house.base / "new") == signed["sums"]["latest"]
        if whole:
            assert house.ok("test-restore", SERVER)["outcome"] == "proved"
            house.ok("retention", SERVER, "--apply", "--really")
            assert {one["id"] for one in house.backups()} == {signed["full"], signed["increment"]}
        signature = house.repository / "servers" / SERVER / signed["full"] / "manifest.json.sig"
        signature.unlink()
        assert (
            "no signature"
            in house.fails(
                "restore", SERVER, "--to", f"backup:{signed['full']}", "--datadir", str(house.base / "none")
            ).all
        )


def test_its_own_text_restores_what_is_signed_with_the_fingerprint_of_the_page(corpus: Corpus) -> None:
    signed = corpus.facts["signed"]
    if "increment" not in signed:
        return  # its text asked for no fingerprint
    with corpus.house("signed") as house, short_directory("bt-new-") as new:
        text = (house.repository / "RECOVER.md").read_text()
        first, *_, by_hand = (part.partition("\n```\n")[0] for part in text.split("\n```sh\n")[1:])
        followed(
            [first, by_hand],
            {
                "GNUPGHOME": str(corpus.keys.secret_home),
                "REPOSITORY": str(house.repository),
                "BASE": str(new / "r"),
                "DATADIR": str(new / "data"),
                "TO": "latest",
                "SIGNER": corpus.facts["signer"],
            },
            new,
            programs="",
        )
        assert held(new / "data") == signed["sums"]["latest"]


def test_what_a_later_version_wrote_is_refused_by_name_and_nothing_of_it_is_deleted(corpus: Corpus) -> None:
    """The program of today is the older one here."""
    if corpus.folder != CORPORA[-1]:
        return  # once is enough
    plain = corpus.facts["plain"]
    with corpus.house("plain", policy="retention: {local: {keep_fulls: 1}}\n") as house:
        for one in house.repository.glob("servers/*/*/manifest.json"):
            edited(one, format="backupd-manifest/99")
        for one in house.repository.glob("binlogs/*/*/*/segment.json"):
            edited(one, format="backupd-segment/99")
        shutil.copy(corpus.folder / "catalog.db", house.base / "catalog.db")
        house.ok("catalog", "upgrade")
        before = {path: path.stat().st_size for path in house.repository.rglob("*") if path.is_file()}
        for command in (
            ["restore", SERVER, "--to", f"backup:{plain['full']}", "--datadir", str(house.base / "new")],
            ["verify", SERVER],
            ["fsck", "local", "--repair"],
            ["backups", "delete", plain["partial"]],
            ["retention", SERVER, "--apply", "--really"],
            ["catalog", "rebuild", "--from", "local", "--into-existing"],
        ):
            said = house.run(*command)
            assert "Traceback" not in said.all
            if command[0] in ("restore", "verify"):
                assert said.code != 0, command
                assert "backupd-manifest/99" in said.all, said.all
        left = {path: path.stat().st_size for path in house.repository.rglob("*") if path.is_file()}
        assert before.items() <= left.items()


def test_what_is_in_an_archive_class_is_thawed_and_restored(corpus: Corpus, moto_server: MotoServer) -> None:
    frozen = corpus.facts["bucket"]
    name = f"frozen-{corpus.folder.name}"
    with corpus.house("bucket") as house:
        place = {key: str(value) for key, value in moto_server.bucket(name).items()}
        with contextlib.closing(moto_server.client()) as client:
            for key, facts in frozen["objects"].items():
                client.put_object(
                    Bucket=name,
                    Key=key,
                    Body=(house.repository / key).read_bytes(),
                    StorageClass=facts["storage_class"],
                    Metadata=facts["metadata"],
                )
        shutil.rmtree(house.repository)
        text = house.config.read_text()
        local = f"{{type: filesystem, path: {house.repository}}}"
        assert local in text
        house.config.write_text(text.replace(local, json.dumps({**place, "storage_class": "DEEP_ARCHIVE"})))
        house.ok("catalog", "rebuild", "--from", "local")
        assert house.ok("plan", SERVER, "--to", "latest")["thaw"]["objects"]
        moto_server.set_restoring(0)
        house.ok("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "new"), "--thaw", "standard")
        assert held(house.base / "new") == frozen["sums"]["latest"]
