"""A catalog that is not where the configuration says: nobody makes an empty one beside backups that are there."""

from __future__ import annotations

from pathlib import Path

from tests.support.e2e.house import SERVER, House


def moved(house: House, name: str) -> Path:
    """The configuration names another file."""
    house.catalog = f"sqlite:///{house.base}/{name}/catalog.db"
    house.write()
    return house.base / name


def test_reading_commands_make_no_catalog_and_work_makes_none_beside_backups(house: House) -> None:
    house.policy_extra = "binlog: {stream: true}\n"
    folder = moved(house, "first")
    for command in (["backups"], ["timeline", SERVER], ["retention", SERVER], ["verify"], ["fsck"], ["jobs"]):
        refused = house.fails(*command)
        assert f"there is no catalog at {folder}/catalog.db" in refused.all
        assert "backupd catalog rebuild --from local" in refused.all
    checked = house.run("check", SERVER)
    assert "there is no catalog at" in checked.all
    assert not folder.exists()
    taken = house.backup()
    assert [one["id"] for one in house.backups()] == [taken["id"]]

    folder = moved(house, "mistyped")
    assert "knows none" in house.fails("check", SERVER).all
    for command in (["backups"], ["backup", SERVER], ["serve"], ["run-stream", SERVER, "--once"]):
        refused = house.fails(*command)
        assert "no catalog at" in refused.all or f"holds 1 backup of {SERVER}" in refused.all, refused.all
    assert not folder.exists()
    house.ok("catalog", "upgrade")  # an empty one that is there is no better
    assert "--new-catalog" in house.fails("backup", SERVER).all
    house.ok("backup", SERVER, "--new-catalog")
    assert len(house.backups()) == 2
    house.ok("backup", SERVER)

    moved(house, "rebuilt")
    house.ok("catalog", "rebuild", "--from", "local")
    assert len(house.backups()) == 3
