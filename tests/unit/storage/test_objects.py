from __future__ import annotations

import errno
import hashlib
import io
import os

import pytest

from backupd.model.errors import DamagedError
from backupd.model.manifest import CODEC
from backupd.transfer.scrub_and_repair import put_right
from storage import layout, objects
from tests.contract.destination import keys, put
from tests.support.stores.memory import MemoryDestination

SECRET = b"k" * 32
DIGEST = hashlib.sha256(b"plain").digest()


@pytest.fixture
def pool() -> MemoryDestination:
    return MemoryDestination("memory")


def test_an_identity_stays_what_it_was_so_that_older_objects_are_found() -> None:
    """Computed by the program of format version 1. Another value here means a whole new repository for everybody."""
    assert CODEC == "zstd+openpgp"
    assert objects.identity(SECRET, DIGEST, 5, CODEC, ["B", "A"]) == (
        "9a313f11e16d74df62c8b9fccd97acd858f2ceb4304fbb94f4bd9ab5ecd33fa7"
    )


def test_identity_depends_on_everything_that_matters_and_nothing_else() -> None:
    base = objects.identity(SECRET, DIGEST, 5, "zstd+openpgp", ["A", "B"])
    assert base == objects.identity(SECRET, DIGEST, 5, "zstd+openpgp", ["B", "A", "A"])
    others = [
        objects.identity(b"other", DIGEST, 5, "zstd+openpgp", ["A", "B"]),
        objects.identity(SECRET, hashlib.sha256(b"x").digest(), 5, "zstd+openpgp", ["A", "B"]),
        objects.identity(SECRET, DIGEST, 6, "zstd+openpgp", ["A", "B"]),
        objects.identity(SECRET, DIGEST, 5, "none", ["A", "B"]),
        objects.identity(SECRET, DIGEST, 5, "zstd+openpgp", ["A"]),
        objects.identity(SECRET, DIGEST, 5, "zstd+openpgp", ["AB"]),
    ]
    assert len({base, *others}) == 7
    with pytest.raises(ValueError, match="empty key"):
        objects.identity(b"", DIGEST, 5, "c", [])


class BadSector(io.RawIOBase):
    """What a file on a failing disk is: it opens, and cannot be read."""

    def readable(self) -> bool:
        return True

    def readinto(self, _buffer: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_every_way_in_which_stored_bytes_can_be_wrong_is_told(
    pool: MemoryDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = objects.named("ab" * 32, b"sealed")
    key = layout.object_key(item.name)
    assert objects.problem(pool, key, item) == "is missing"
    put(pool, key, b"sealed")
    assert objects.problem(pool, key, item) == ""
    put(pool, key, b"seal")
    assert objects.problem(pool, key, item) == "holds 4 bytes where 6 were stored"
    put(pool, key, b"Sealed")
    assert "SHA-256 differs" in objects.problem(pool, key, item)
    monkeypatch.setattr(pool, "get", lambda *_args, **_more: io.BufferedReader(BadSector()))
    assert objects.problem(pool, key, item) == "cannot be read: Input/output error"


def test_what_was_stored_is_fetched(pool: MemoryDestination) -> None:
    item = objects.named("ab" * 32, b"sealed")
    assert item.name == "ab" * 32 + "-" + hashlib.sha256(b"sealed").hexdigest()[:16]
    objects.store(pool, item, b"sealed")
    before = pool.identity(layout.object_key(item.name))
    objects.store(pool, item, b"sealed")
    assert pool.identity(layout.object_key(item.name)) == before, "an object is never replaced"
    assert objects.fetch(pool, item) == b"sealed"


def test_the_same_plaintext_sealed_twice_is_two_objects(pool: MemoryDestination) -> None:
    for sealed in (b"sealed once", b"sealed again"):
        objects.store(pool, objects.named("ab" * 32, sealed), sealed)
    assert len(keys(pool)) == 2


@pytest.mark.parametrize("damage", [b"", b"seale", b"sealeD", b"sealed!", b"sealed" * 1000])
def test_any_damage_is_named_with_destination_and_key(pool: MemoryDestination, damage: bytes) -> None:
    item = objects.named("ab" * 32, b"sealed")
    put(pool, layout.object_key(item.name), damage)
    with pytest.raises(DamagedError) as caught:
        objects.fetch(pool, item)
    assert caught.value.damages[0].startswith(f"memory: {layout.object_key(item.name)}: ")


def test_a_missing_object_is_damage_too(pool: MemoryDestination) -> None:
    with pytest.raises(DamagedError, match="missing"):
        objects.fetch(pool, objects.named("ab" * 32, b"sealed"))


def test_a_truncated_object_is_stored_again(pool: MemoryDestination) -> None:
    item = objects.named("ab" * 32, b"sealed")
    put(pool, layout.object_key(item.name), b"sea")
    objects.store(pool, item, b"sealed")
    assert objects.fetch(pool, item) == b"sealed"


def test_quarantine_ends_when_the_true_bytes_are_put_back(pool: MemoryDestination) -> None:
    from datetime import UTC, datetime

    item = objects.named("ab" * 32, b"sealed")
    put(pool, layout.object_key(item.name), b"rotten")
    objects.quarantine(pool, item.name, "SHA-256 differs", datetime.now(UTC))
    assert objects.quarantined(pool) == {item.name}
    source = MemoryDestination("source")
    put(source, layout.object_key(item.name), b"wrong!")
    with pytest.raises(DamagedError):
        put_right(pool, layout.object_key(item.name), item, [source])
    assert objects.quarantined(pool) == {item.name}
    put(source, layout.object_key(item.name), b"sealed")
    put_right(pool, layout.object_key(item.name), item, [source])
    assert objects.quarantined(pool) == frozenset()
    assert objects.fetch(pool, item) == b"sealed"
