"""Attack 5: somebody who can write to the place, and has no key, tells other things of a backup than are so; and puts
backups there not taken by this installation."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from backupd.alerts.rules import NOT_OURS
from backupd.model.text import format_time
from tests.support.e2e.archived import wired
from tests.support.e2e.house import SERVER, House
from tests.support.hostile.forging import edited, moved
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@contextmanager
def house_of(server: PrivateServer, keys: Keys, name: str = SERVER) -> Iterator[House]:
    with short_directory() as base:
        house = House(base, server, keys)
        house.config.write_text(house.config.read_text().replace(f"  {SERVER}: ", f"  {name}: "))
        yield house


def burnt(house: House) -> dict[str, Any]:
    """The catalog is lost and made anew from the place; what was told."""
    (house.base / "catalog.db").unlink()
    shutil.rmtree(house.base / "spool")
    done = house.run("catalog", "rebuild", "--from", "local", "--json")
    told: dict[str, Any] = done.json
    assert done.code == (1 if told["problems"] else 0), done.all
    return told


def test_the_oldest_backup_cannot_be_dated_as_the_newest(shared_server: PrivateServer, keys: Keys) -> None:
    with house_of(shared_server, keys) as house:
        told, new = house.backup(), house.backup()["id"]
        old = told["id"]
        runbook = house.manifest(old).with_name("RUNBOOK.md").read_bytes()
        assert told["runbook_sha256"] == hashlib.sha256(runbook).hexdigest(), "to be compared with by hand"
        later = format_time(datetime.now(UTC) + timedelta(minutes=3))
        edited(house.manifest(old), finished_at=later)
        shown = house.fails("backups", "show", old).all
        assert "is not what was stored" in shown, "the catalog knows it better"
        told = burnt(house)
        (problem,) = told["problems"]
        assert old in problem
        assert "the clear manifest is not the one that was sealed with it" in problem
        assert (told["backups"], told["bound"], told["unbound"]) == (1, 1, 0)
        assert house.ok("plan", SERVER, "--to", "latest")["backup"] == new
        assert (
            old
            in house.fails("restore", SERVER, "--to", f"backup:{old}", "--datadir", str(house.base / "x"), code=2).all
        )


def test_a_backup_of_another_server_cannot_be_filed_under_this_one(shared_server: PrivateServer, keys: Keys) -> None:
    with house_of(shared_server, keys) as house, house_of(shared_server, keys, "other-db2") as other:
        own = house.backup()["id"]
        theirs = other.ok("backup", "other-db2", "--kind", "full")["id"]
        manifest = moved(other, "other-db2", theirs, house, SERVER)
        edited(manifest, server=SERVER, finished_at=format_time(datetime.now(UTC) + timedelta(minutes=3)))
        newest = house.backup()["id"]
        assert {one["id"] for one in house.backups()} == {own, newest}, "the next backup does not take it in"
        told = burnt(house)
        assert any(theirs in problem and "was not imported" in problem for problem in told["problems"])
        assert house.ok("plan", SERVER, "--to", "latest")["backup"] == newest
        out = house.fails(
            "restore",
            SERVER,
            "--to",
            f"backup:{theirs}",
            "--tables",
            "shop.orders",
            "--sql",
            str(house.base / "sql"),
            code=2,
        )
        assert theirs in out.all
        assert not list(house.base.glob("sql/**/*.sql"))


def test_what_nobody_here_took_is_foreign_until_somebody_adopts_it(shared_server: PrivateServer, keys: Keys) -> None:
    """A true backup of the same server by another installation: everything in it is in order."""
    with house_of(shared_server, keys) as house, house_of(shared_server, keys) as other:
        own = house.backup()["id"]
        theirs = other.backup()["id"]
        moved(other, SERVER, theirs, house, SERVER)
        house.ok("verify")
        house.fsck()
        house.run("fsck", "--repair")
        assert {one["id"]: one["foreign"] for one in house.backups()} == {own: False, theirs: True}
        assert "+foreign" in house.run("backups", SERVER).out
        plan = house.ok("plan", SERVER, "--to", "latest")
        assert plan["backup"] == own, "though it is older"
        for told in (plan, house.ok("timeline", SERVER)):
            assert any(f"backupd catalog adopt {theirs}" in line for line in told["warnings"]), told
        assert house.ok("plan", SERVER, "--to", f"backup:{theirs}")["backup"] == theirs, "by its own id"
        assert house.ok("restore", SERVER, "--to", f"backup:{theirs}", "--datadir", str(house.base / "theirs"))
        assert "catalog adopt" in house.fails("backups", "delete", theirs).all
        kept = house.ok("retention", SERVER)
        assert f"catalog adopt {theirs}" in str(kept)
        assert told_foreign(house) == [NOT_OURS.broken]
        (adopted,) = house.ok("catalog", "adopt", theirs)
        assert adopted == {"id": theirs, "server": SERVER, "bound": True}
        assert house.ok("plan", SERVER, "--to", "latest")["backup"] == theirs
        assert not any(one["foreign"] for one in house.backups())
        assert told_foreign(house) == [NOT_OURS.mended, NOT_OURS.broken]


def told_foreign(house: House) -> list[str]:
    """Newest first."""
    with wired(house) as wiring:
        return [one.kind for one in wiring.catalog.events.list() if one.kind in (NOT_OURS.broken, NOT_OURS.mended)]
