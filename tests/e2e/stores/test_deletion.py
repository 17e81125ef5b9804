"""Ways in which deleting, or not deleting, could lose the last copy: each was possible once."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.e2e.house import SERVER, House


def mark_of(house: House, backup_id: str) -> Path:
    return house.repository / "marks" / SERVER / f"{backup_id}.json"


def age(house: House, backup_id: str) -> None:
    """Let the grace period of a mark be over: it was put, and has been known here, for two days."""
    mark, ago = mark_of(house, backup_id), datetime.now(UTC) - timedelta(days=2)
    status, note = mark.stat(), json.loads(mark.read_text())
    note["at"] = ago.isoformat().replace("+00:00", "Z")
    mark.write_text(json.dumps(note))
    os.utime(mark, ns=(status.st_atime_ns, status.st_mtime_ns))  # else it would be another mark
    with closing(sqlite3.connect(house.base / "catalog.db")) as catalog, catalog:
        catalog.execute(
            "INSERT INTO marks (destination, server, backup_id, since, ours, confirmed) "
            "VALUES ('local', ?, ?, ?, 0, 0) ON CONFLICT DO UPDATE SET since = excluded.since",
            (SERVER, backup_id, ago.strftime("%Y-%m-%d %H:%M:%S.%f")),
        )


def present(house: House) -> set[str]:
    return {path.parent.name for path in house.repository.rglob("manifest.json")}


def forge_mark(house: House, backup_id: str) -> None:
    """As if a process had died between the mark at the destination and the row in the catalog."""
    mark = mark_of(house, backup_id)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(
        json.dumps({"server": SERVER, "backup": backup_id, "at": datetime.now(UTC).isoformat().replace("+00:00", "Z")})
    )


def test_a_deleted_backup_cannot_be_kept_and_a_kept_one_survives_a_stray_mark(house: House) -> None:
    first, second = house.backup(), house.backup()
    house.ok("backups", "delete", first["id"])
    assert "undelete" in house.fails("backups", "keep", first["id"]).err
    house.ok("backups", "undelete", first["id"])
    house.ok("backups", "keep", first["id"])
    forge_mark(house, first["id"])
    age(house, first["id"])
    house.backup()
    assert {first["id"], second["id"]} <= present(house)


def test_a_mark_without_its_row_is_found_and_can_be_undeleted(house: House) -> None:
    first, second = house.backup(), house.backup()
    forge_mark(house, first["id"])
    assert [finding["invariant"] for finding in house.fsck()] == ["mark-matches-catalog"]
    assert "only restorable" in house.fails("backups", "delete", second["id"], "--now").err
    house.ok("backups", "undelete", first["id"])
    assert house.fsck() == []
    house.ok("plan", SERVER, "--to", f"backup:{first['id']}")


def test_the_last_whole_backup_stays_when_the_others_are_gone_without_a_word(house: House) -> None:
    first, second = house.backup(), house.backup()
    shutil.rmtree(house.manifest(second["id"]).parent)
    assert "only restorable" in house.fails("backups", "delete", first["id"], "--now").err
    assert present(house) == {first["id"]}


def test_a_marked_backup_outlives_its_grace_when_every_other_one_turns_out_damaged(house: House) -> None:
    first, second = house.backup(), house.backup()
    house.ok("backups", "delete", first["id"])
    age(house, first["id"])
    (house.manifest(second["id"]).parent / "body.jsonl.zst.gpg").unlink()
    house.run("fsck", "--repair")
    assert first["id"] in present(house)
    house.ok("backups", "undelete", first["id"])
    house.ok("restore", SERVER, "--to", f"backup:{first['id']}", "--datadir", str(house.base / "restored"))


def test_a_swept_backup_leaves_no_row_and_every_check_is_content(house: House) -> None:
    first, second = house.backup(), house.backup()
    house.ok("backups", "delete", first["id"])
    age(house, first["id"])
    third = house.backup()
    assert present(house) == {second["id"], third["id"]}
    assert {record["id"] for record in house.backups()} == present(house)
    assert house.fsck() == []
    assert house.ok("verify", SERVER)["damages"] == []


def test_a_backup_whose_files_are_gone_can_be_forgotten(house: House) -> None:
    first = house.backup()
    house.backup()
    shutil.rmtree(house.manifest(first["id"]).parent)
    assert "backup-has-manifest" in {finding["invariant"] for finding in house.fsck()}
    house.ok("backups", "delete", first["id"])
    house.ok("fsck", "--repair")
    assert house.fsck() == []


def test_verify_of_an_unmounted_destination_marks_nothing(house: House) -> None:
    record = house.backup()
    house.repository.rename(house.base / "away")
    told = house.fails("verify", SERVER).all
    assert "NOT READ: local" in told
    assert "nothing was marked" in told
    (house.base / "away").rename(house.repository)
    assert house.ok("plan", SERVER, "--to", "latest")["backup"] == record["id"]


def test_damage_on_a_destination_that_cannot_be_written_is_named_and_marked_all_the_same(house: House) -> None:
    house.backup()
    second = house.backup()
    victim = max(house.objects(), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    (house.repository / "quarantine").write_text("in the way")
    done = house.fails("verify", SERVER)
    assert victim.name in done.all
    assert "quarantine" in done.all
    assert {record["state"] for record in house.backups()} == {"damaged"}
    assert "damaged" in house.fails("plan", SERVER, "--to", "latest").err
    assert second["id"] in house.fails("plan", SERVER, "--to", "latest").err


@pytest.mark.parametrize("moment", ["manifest", "row"])
def test_delete_killed_half_way_is_finished_or_taken_back(house: House, moment: str) -> None:
    first, second = house.backup(), house.backup()
    folder = house.manifest(first["id"]).parent
    if moment == "manifest":  # killed after the manifest went, before the rest
        house.ok("backups", "delete", first["id"])
        (folder / "manifest.json").unlink()
    else:  # killed after the row changed, before the mark was put
        house.ok("backups", "delete", first["id"])
        mark_of(house, first["id"]).unlink()
        house.ok("backups", "undelete", first["id"])
        house.ok("plan", SERVER, "--to", f"backup:{first['id']}")
    house.run("fsck", "--repair")
    assert house.fsck() == []
    assert second["id"] in present(house)


def test_after_the_clock_was_set_back_the_newest_backup_is_still_the_newest(house: House) -> None:
    """The catalog's newest backup ends a day from now: as if this host's clock had just been set back."""
    first = house.backup()
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%d %H:%M:%S.%f")
    with sqlite3.connect(house.base / "catalog.db") as connection:
        connection.execute("UPDATE backups SET finished_at = ? WHERE id = ?", (tomorrow, first["id"]))
    connection.close()
    second = house.backup()
    assert any("clock" in warning for warning in second["warnings"])
    assert second["id"] > first["id"]
    assert house.ok("plan", SERVER, "--to", "latest")["backup"] == second["id"]
