"""Freeze repositories of the program as it is now, for every later version to read.

    .venv/bin/python -m tests.formats.freeze tests/formats/NAME

Run once for each change of what is stored, before the change; what is frozen is never made again. A corpus is a folder:

``key.asc``         the secret key that everything is sealed for, and the one that signs; made for this corpus alone
``plain.tar``       a folder destination: a full backup, logical ones (one complete, one that lacks a table), an
                    increment, whole binary logs and a piece, a proof, copies of catalog and configuration
``signed.tar``      a folder destination of which all documents of record are signed, with a head: a full backup, an
                    increment, a binary log, a proof, copies
``bucket.tar``      the objects of a bucket whose pool is in DEEP_ARCHIVE, one file per key
``catalog.db``      the catalog of ``plain``
``facts.json``      what the tables held, by CHECKSUM TABLE, and the ids and moments to restore
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backupd.model.text import format_time
from tests.support import sample
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys, copy_public, gpg, make_home, make_key, operator_keys, stop_agent
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER
from tests.support.stores.folders import short_directory
from tests.support.stores.moto_server import MotoServer

_LOGICAL = "logical: {schedule: every 24h, partial: accepted, tables: {include: ['shop.*']}}\n"


def freeze(target: Path) -> None:
    """Make the corpus ``target``, a folder that must not exist. Raises AssertionError where a command fails."""
    target.mkdir()
    with operator_keys() as keys, _signer(keys) as (home, signer):
        secret = gpg(keys.secret_home, "--armor", "--export-secret-keys", keys.user_id)
        signing = gpg(home, "--armor", "--export-secret-keys", "signer@example.com")
        (target / "key.asc").write_bytes(secret + signing)
        facts = {
            "server": SERVER,
            "signer": signer,
            "plain": _plain(target, keys),
            "signed": _signed(target, keys, home, signer),
            "bucket": _bucket(target, keys),
        }
    (target / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def _signer(keys: Keys) -> Iterator[tuple[Path, str]]:
    with short_directory("bt-sign-") as base:
        home = make_home(base / "home")
        try:
            copy_public(keys.public_home, home)
            yield home, make_key(home, "signer@example.com", encryption=False)
        finally:
            stop_agent(home)


def _plain(target: Path, keys: Keys) -> dict[str, Any]:
    with short_directory() as base, PrivateServer() as server:
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        sample.create(server, 1_000_000, binlog=False)
        house = House(base, server, keys, policy_extra=_LOGICAL)
        full = house.backup()
        after_full = _sums(server)
        server.execute(
            "CREATE TABLE shop.later (id INT PRIMARY KEY) ENGINE=InnoDB",
            "INSERT INTO shop.later VALUES (1)",
            "FLUSH BINARY LOGS",
        )
        logical = house.ok("backup", SERVER, "--kind", "logical")
        after_logical = _sums(server)
        increment = house.ok("backup", SERVER, "--kind", "incremental")
        assert increment["kind"] == "physical-incremental"
        after_increment = _sums(server)
        server.execute("INSERT INTO shop.later VALUES (2)")
        between = _sums(server)
        moment = datetime.now(UTC)
        server.execute(
            "DO SLEEP(1.1)",
            "INSERT INTO shop.later VALUES (3)",
            "FLUSH BINARY LOGS",
            "DELETE FROM shop.later WHERE id = 1",
        )
        Archive(house, server).take()
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        last = _sums(server)
        server.execute(
            "CREATE TABLE shop.broken (id INT PRIMARY KEY, v CHAR(100)) ENGINE=MyISAM",
            "INSERT INTO shop.broken VALUES (1, 'x'), (2, 'y'), (3, 'z')",
            "FLUSH TABLES",
        )
        rows = server.datadir / "shop/broken.MYD"
        rows.write_bytes(rows.read_bytes()[:50])
        assert house.run("backup", SERVER, "--kind", "logical").code == 1
        partial = house.backups()[0]
        house.ok("catalog", "copy")
        assert house.fsck() == []
        _tar(house.repository, target / "plain.tar")
        with contextlib.closing(sqlite3.connect(base / "catalog.db")) as catalog:
            catalog.execute("VACUUM INTO ?", (str(target / "catalog.db"),))
        return {
            "backups": {one["id"]: _lasting(one) for one in house.backups()},
            "full": full["id"],
            "logical": logical["id"],
            "increment": increment["id"],
            "partial": partial["id"],
            "moment": format_time(moment),
            "sums": {
                "full": after_full,
                "logical": after_logical,
                "increment": after_increment,
                "moment": between,
                "latest": last,
            },
        }


def _signed(target: Path, keys: Keys, home: Path, signer: str) -> dict[str, Any]:
    """No policy speaks of it: what a signing key is named for is signed."""
    with short_directory() as base, PrivateServer() as server:
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        server.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY)", "INSERT INTO shop.a VALUES (1)"
        )
        house = House(base, server, keys)
        house.write(encryption_home=home)
        house.config.write_text(
            house.config.read_text().replace("recipients: [", f"signing_key: {signer}, recipients: [")
        )
        full = house.backup()
        after_full = _sums(server)
        server.execute("INSERT INTO shop.a VALUES (2)")
        increment = house.ok("backup", SERVER, "--kind", "incremental")
        assert increment["kind"] == "physical-incremental"
        server.execute("INSERT INTO shop.a VALUES (3)")
        Archive(house, server).take()
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        house.ok("catalog", "copy")
        _tar(house.repository, target / "signed.tar")
        return {"full": full["id"], "increment": increment["id"], "sums": {"full": after_full, "latest": _sums(server)}}


def _bucket(target: Path, keys: Keys) -> dict[str, Any]:
    name = "frozen"
    with short_directory() as base, PrivateServer() as server, MotoServer() as moto:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY)", "INSERT INTO shop.a VALUES (1)"
        )
        house = House(base, server, keys)
        place = json.dumps(
            {key: str(value) for key, value in moto.bucket(name).items()} | {"storage_class": "DEEP_ARCHIVE"}
        )
        text = house.config.read_text()
        before = f"{{type: filesystem, path: {house.repository}}}"
        assert before in text
        house.config.write_text(text.replace(before, place))
        full = house.backup()
        moto.set_restoring(0)
        items: dict[str, dict[str, Any]] = {}
        folder = base / "objects"
        with contextlib.closing(moto.client()) as client:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
                for item in page.get("Contents", ()):
                    key = item["Key"]
                    head = client.head_object(Bucket=name, Key=key)
                    kind = head.get("StorageClass", "STANDARD")
                    if kind != "STANDARD":
                        client.restore_object(Bucket=name, Key=key, RestoreRequest={"Days": 1})
                    path = folder / key
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(client.get_object(Bucket=name, Key=key)["Body"].read())
                    items[key] = {"storage_class": kind, "metadata": head.get("Metadata", {})}
        assert any(one["storage_class"] == "DEEP_ARCHIVE" for one in items.values())
        _tar(folder, target / "bucket.tar")
        return {"full": full["id"], "objects": items, "sums": {"latest": _sums(server)}}


def _sums(server: PrivateServer) -> dict[str, int]:
    with server.connect() as connection:
        return sample.checksum_everything(connection)


def _lasting(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("kind", "parent", "finished_at", "position", "tables_missing")}


def _tar(folder: Path, to: Path) -> None:
    with tarfile.open(to, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(folder, arcname=".")


if __name__ == "__main__":
    freeze(Path(sys.argv[1]))
