"""Rot and loss at the destination: found by verify and by restore, named, never restored silently."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.dice import rounds, thrown
from tests.support.e2e.house import SERVER, House

Harm = Callable[[Path, random.Random], None]


def flip(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: dice.randrange(len(content))])


def remove(path: Path, _dice: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [flip, truncate, remove], ids=["flipped bit", "truncated", "missing"])
@pytest.mark.parametrize("what", ["object", "manifest.json", "body.jsonl.zst.gpg"])
def test_damage_is_found_by_verify_and_by_restore_and_named(house: House, what: str, harm: Harm) -> None:
    dice = thrown(f"damage {what} {harm.__name__}")
    record = house.backup()
    folder = house.manifest(record["id"]).parent
    victims = dice.sample(house.objects(), 3) if what == "object" else [folder / what]
    for victim in victims:
        harm(victim, dice)
    names = [victim.name for victim in victims]

    verified = house.fails("verify", SERVER)
    assert all(name in verified.all for name in names), verified.all
    target = house.base / "restored"
    restored = house.fails("restore", SERVER, "--to", f"backup:{record['id']}", "--datadir", str(target))
    assert any(name in restored.all for name in names), restored.all
    assert not target.exists() or not any(target.iterdir())


def test_after_damage_the_next_backup_stores_the_object_afresh_and_restores(house: House) -> None:
    house.backup()
    victim = max(house.objects(), key=lambda path: path.stat().st_size)
    flip(victim, random.Random(1))
    house.fails("verify", SERVER)
    second = house.backup()
    assert second["bytes_new"] >= victim.stat().st_size // 2
    house.ok("restore", SERVER, "--to", f"backup:{second['id']}", "--datadir", str(house.base / "restored"))


def test_side_files_of_the_runbook_are_verified_too(house: House) -> None:
    record = house.backup()
    runbook = house.manifest(record["id"]).parent / "RUNBOOK.md"
    runbook.write_text(runbook.read_text().replace("gpg", "gqg", 1))
    assert "RUNBOOK.md" in house.fails("verify", SERVER).all


def test_a_verified_repository_is_clean_and_fsck_agrees(house: House) -> None:
    house.backup()
    verified = house.ok("verify")
    assert verified["damages"] == []
    assert verified["objects"] > 10
    assert house.fsck() == []


@pytest.mark.campaign
def test_one_flipped_bit_anywhere_in_the_repository_is_found(house: House) -> None:
    """Any file that a manifest vouches for, any bit; afterwards the bit is flipped back and all is well again."""
    dice = thrown("flips")
    record = house.backup()
    folder = house.manifest(record["id"]).parent
    vouched = [*house.objects(), *(path for path in folder.iterdir() if path.is_file())]
    for _ in range(rounds(5)):
        victim = dice.choice(vouched)
        good = victim.read_bytes()
        bad = bytearray(good)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        victim.write_bytes(bad)
        assert victim.name in house.fails("verify", SERVER).all
        victim.write_bytes(good)
        assert house.ok("verify", SERVER)["damages"] == []
