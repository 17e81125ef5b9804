"""A backup in an archive class: planned, thawed, restored, killed on the way, and thawed again after it went cold."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from storage import layout
from tests.support.e2e.house import LONGEST, SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.moto_server import MotoServer

_LOOKS = 8
"""So many looks at an object that a thaw does not end by itself here. The server counts those before it, too, and
begins a thaw only when there were as many."""


class ArchiveHouse(House):
    """Its backups lie in an archive class of the destination ``local``, and nowhere else."""

    bucket: dict[str, Any]

    def keep_in(self, bucket: dict[str, Any]) -> None:
        self.bucket = bucket
        place = json.dumps({name: str(value) for name, value in bucket.items()} | {"storage_class": "DEEP_ARCHIVE"})
        text = self.config.read_text()
        before = f"{{type: filesystem, path: {self.repository}}}"
        assert before in text
        self.config.write_text(text.replace(before, place))

    def items(self) -> dict[str, int]:
        """Of the thaws: how many objects are in each state."""
        with contextlib.closing(sqlite3.connect(self.base / "catalog.db")) as catalog:
            return dict(catalog.execute("SELECT state, count(*) FROM thaws GROUP BY state"))

    def make_due(self) -> None:
        """As if the minutes until the next look had passed."""
        with contextlib.closing(sqlite3.connect(self.base / "catalog.db", timeout=30)) as catalog, catalog:
            catalog.execute("UPDATE jobs SET not_before = queued_at WHERE state = 'waiting'")

    def thaws(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ok("thaw")
        return found


def test_a_whole_server_comes_back_out_of_an_archive_class(
    short_tmp: Path, shared_server: PrivateServer, keys: Keys, moto_server: MotoServer
) -> None:
    house = ArchiveHouse(short_tmp, shared_server, keys)
    house.keep_in(moto_server.bucket("archive-flow"))
    taken = house.backup()
    with contextlib.closing(moto_server.client()) as client:
        listed = client.list_objects_v2(Bucket="archive-flow")["Contents"]
        stored = {item["Key"]: item["StorageClass"] for item in listed}
        cold = {key for key, name in stored.items() if name == "DEEP_ARCHIVE"}
        assert cold == {key for key in stored if key.startswith(layout.OBJECTS)}

        plan = house.ok("plan", SERVER, "--to", "latest", "--thaw", "bulk")
        assert {one["key"] for one in plan["thaw"]["objects"]} == cold
        assert (plan["thaw"]["tier"], plan["thaw"]["hours"], plan["steps"][0]["name"]) == ("bulk", 48, "thawed")
        refused = house.fails("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "new"))
        assert "have to be thawed first" in refused.all

        # Killed while it waits: what was asked for is remembered, and nothing is asked for twice.
        for key in cold:
            for _ in range(_LOOKS):
                client.head_object(Bucket="archive-flow", Key=key)
        moto_server.set_restoring(_LOOKS)
        try:
            restoring = ("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "new"), "--thaw", "bulk")
            house.kill_when(lambda: _count(house, "thawing") == len(cold), *restoring)
            (waiting,) = house.thaws()
            assert (waiting["job"]["state"], waiting["thaw"]["ready"]) == ("waiting", 0)
            assert waiting["thaw"]["expected_at"] is not None
            with house.popen(*restoring, "--json") as process:
                assert process.stderr is not None
                assert any("thaw" in line for line in process.stderr)  # it waits again, for the same thaw
                moto_server.set_restoring(0)
                house.make_due()
                out, err = process.communicate(timeout=LONGEST)
            assert process.returncode == 0, err
        finally:
            moto_server.set_restoring(0)
        assert json.loads(out)["backup"] == taken["id"]
        (over,) = house.thaws()
        assert (over["job"]["id"], over["job"]["state"]) == (waiting["job"]["id"], "succeeded")
        assert (house.base / "new" / "ibdata1").is_file()

        # The thawed copies go away: everything is as it was, until it is thawed again.
        for key in cold:
            client.copy_object(
                Bucket="archive-flow",
                Key=key,
                CopySource={"Bucket": "archive-flow", "Key": key},
                StorageClass="DEEP_ARCHIVE",
                MetadataDirective="COPY",
            )
    assert house.ok("plan", SERVER, "--to", "latest")["thaw"]["count"] == len(cold)
    again = house.ok("thaw", SERVER, "--to", "latest", "--tier", "standard", "--days", "2")
    assert (again["job"]["state"], again["thaw"]["ready"]) == ("succeeded", len(cold))
    assert house.ok("plan", SERVER, "--to", "latest")["thaw"] is None


def _count(house: ArchiveHouse, state: str) -> int:
    try:
        return house.items().get(state, 0)
    except sqlite3.OperationalError:  # being written to
        return 0
