"""Two required destinations: either one alone brings everything back."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.support.e2e.house import SERVER, House
from tests.support.oracle import same
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer


@pytest.fixture
def twice(house: House) -> House:
    """The house with a second required destination, ``away``."""
    away = house.base / "away"
    house.config.write_text(
        house.config.read_text().replace(
            "destinations:\n", f"destinations:\n  away: {{type: filesystem, path: {away}}}\n"
        )
    )
    policy = house.base / "policies" / "gold.yaml"
    policy.write_text(policy.read_text().replace("required: [local]", "required: [local, away]"))
    return house


def equal_to_source(house: House, datadir: Path) -> None:
    with PrivateServer(datadir=datadir) as restored, restored.connect() as connection:
        sums = checksum_everything(connection)
    with house.server.connect() as connection:
        same(sums, checksum_everything(connection))


def test_when_the_first_place_burns_down_the_same_backup_comes_back_from_the_second(twice: House) -> None:
    record = twice.backup()
    assert {copy["destination"] for copy in record["copies"]} == {"local", "away"}
    shutil.rmtree(twice.repository)
    assert twice.restore(twice.base / "restored", to=f"backup:{record['id']}")["backup"] == record["id"]
    equal_to_source(twice, twice.base / "restored")
    assert twice.ok("test-restore", SERVER)["outcome"] == "proved"


def test_objects_damaged_in_one_place_are_read_from_the_other_and_both_are_told_apart(twice: House) -> None:
    twice.backup()
    dice = random.Random(5)
    for victim in dice.sample(twice.objects(), 5):
        victim.write_bytes(victim.read_bytes()[:-1])
    for victim in dice.sample(sorted((twice.base / "away" / "objects").rglob("*-*")), 5):
        if not (twice.repository / victim.relative_to(twice.base / "away")).stat().st_size < victim.stat().st_size:
            victim.unlink()
    outcome = twice.restore(twice.base / "restored")
    assert any("local" in text for text in outcome["warnings"])
    equal_to_source(twice, twice.base / "restored")
    mended = twice.run("verify", SERVER)
    assert mended.code == 0, mended.all
    assert "local:" in mended.all
    assert "away:" in mended.all
    assert twice.ok("verify", SERVER)["damages"] == []
    assert twice.fsck() == []


def test_a_second_backup_reuses_objects_in_both_places(twice: House) -> None:
    first, second = twice.backup(), twice.backup()
    assert second["files_linked"] > first["files"] / 2
    for root in (twice.repository, twice.base / "away"):
        assert len(list((root / "servers" / SERVER).iterdir())) == 2
    assert twice.fsck() == []


def test_a_place_that_cannot_be_written_fails_the_backup_everywhere(twice: House) -> None:
    first = twice.backup()
    (twice.base / "away" / "repository.json").rename(twice.base / "marker")
    done = twice.fails("backup", SERVER, "--kind", "full")
    assert "away" in done.err
    (twice.base / "marker").rename(twice.base / "away" / "repository.json")
    assert [path.parent.name for path in twice.repository.rglob("manifest.json")] == [first["id"]]
    twice.backup()
    assert twice.fsck() == []
