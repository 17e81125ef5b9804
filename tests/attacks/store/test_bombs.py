"""Little that is stored and becomes much: whoever has the public key seals gigabytes of zeros in some kilobytes, and
whoever can write to a folder makes files of holes, which take no room at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import zstandard

from backupd.app.context.wiring import Wiring
from backupd.app.restores.catalog_rebuild import lost_catalogs
from backupd.app.restores.server_configuration import _LIMIT as CONFIG_LIMIT
from backupd.model.binlog import SegmentKey
from backupd.model.document import DOCUMENT_LIMIT, opened_limit
from backupd.model.errors import DamagedError, StreamError
from backupd.model.manifest import Entry, Part, StoredObject, encode_facts
from backupd.process.run_context import RunContext
from backupd.transfer import log_segments
from backupd.transfer.collection import collect
from backupd.transfer.deletion import marked
from backupd.transfer.holds_and_locks import kept_at
from backupd.transfer.leases import leases
from backupd.transfer.records import authenticity
from backupd.transfer.records import authenticity as signed_places
from backupd.transfer.records import manifests as manifestio
from backupd.transfer.records import proofs as proofdoc
from backupd.transfer.records.authenticity import SignedDestination, Signing
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.manifests import described, get_bytes, load_body, load_header, put_bytes
from backupd.transfer.records.segment_documents import SegmentHeader
from restore.fetch.objects import fetch
from restore.fetch.sources import Loaded, Sources
from storage import layout, objects
from storage.destination import repository_id
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys, gpg
from tests.support.logs import stream
from tests.support.logs.archived_logs import archive_log
from tests.support.logs.log_store import SERVER, wired
from tests.support.logs.real_logs import real_logs
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id
from tests.unit.transfer.test_log_segments import BRANCH

MIB = 1024**2
HUGE = 1024 * MIB
"""Bytes that a bomb tells; what S8 made 5.6 GB of had 768 MiB."""
STORED = 150_000
"""Bytes that a bomb takes at the place, at the most."""
MOST = 256 * MIB
"""Bytes of memory that any of them may cost."""
NAME = f"{'0' * 64}-{'0' * 16}"
SEGMENT = SegmentKey(BRANCH.id, 1, 0, 1)


def cost(attack: Callable[[], object]) -> int:
    """Bytes of memory that this process had at the most while it did it, above what it had before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    try:
        attack()
    finally:
        peak = _memory("VmHWM")
    return peak - before


def _memory(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


@cache
def frame(size: int = HUGE, *, told: bool = True) -> bytes:
    """A zstd frame of ``size`` bytes; ``told``: it tells so."""
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=told).compressobj(size=size if told else -1)
    return b"".join([*(compressor.compress(bytes(MIB)) for _ in range(size // MIB)), compressor.flush()])


def sealed(keys: Keys, content: bytes) -> bytes:
    """What only needs the public key."""
    made = gpg(
        keys.public_home,
        "--trust-model",
        "always",
        "--compress-algo",
        "none",
        "--recipient",
        keys.fingerprint,
        "--encrypt",
        stdin=content,
    )
    assert len(made) < STORED
    return made


@dataclass
class Target:
    """A place, and who can open what lies there."""

    place: MemoryDestination
    keys: Keys
    folder: Path

    @property
    def unsealer(self) -> Unsealer:
        return Unsealer(self.keys.secret_home)

    def put(self, key: str, content: bytes) -> StoredObject:
        put_bytes(self.place, key, content)
        return described(key.rpartition("/")[2], content)

    def in_pool(self, content: bytes) -> StoredObject:
        item = objects.named("0" * 64, content)
        put_bytes(self.place, layout.object_key(item.name), content)
        return item


@pytest.fixture
def target(keys: Keys, tmp_path: Path) -> Target:
    return Target(MemoryDestination("m"), keys, tmp_path / "out")


def forged_body(target: Target, content: bytes, size: int) -> None:
    """Read a body of ``size`` bytes, as its header tells."""
    header = Stock(target.place).add(1, {})
    stored = target.put(layout.body_key(header.server, header.backup_id), content)
    load_body(target.place, replace(header, body=stored, body_size=size, version=2), target.unsealer)


def body(target: Target) -> None:
    forged_body(target, sealed(target.keys, frame()), HUGE)


def body_of_entries(target: Target) -> None:
    """As many of the smallest entries as its limit lets through."""
    stock = Stock(target.place)
    header = stock.add(1, {})
    line = b'{"path":"","sha256":"","size":0}\n'
    lines = 24 * MIB // len(line)
    facts = replace(stock.body(header).facts, header="0" * 64)
    plain = encode_facts(facts, lines) + line * lines
    forged_body(target, sealed(target.keys, zstandard.ZstdCompressor(level=9).compress(plain)), len(plain))


def compressed_by_gpg(target: Target) -> None:
    """OpenPGP can compress by itself."""
    content = gpg(
        target.keys.public_home,
        "--trust-model",
        "always",
        "--compress-algo",
        "zlib",
        "--recipient",
        target.keys.fingerprint,
        "--encrypt",
        stdin=frame(2 * MIB) + bytes(100 * MIB),
    )
    forged_body(target, content, 2 * MIB)


def index_of_log(target: Target) -> None:
    header = _log(target)
    content = sealed(target.keys, frame())
    target.put(header.folder + header.index[0].stored.name, content)
    last = replace(header.index[0], stored=described(header.index[0].stored.name, content), size=HUGE)
    list(log_segments.read_index(target.place, replace(header, index=(last,)), target.unsealer))


def part_of_log(target: Target) -> None:
    header = _log(target)
    content = sealed(target.keys, frame())
    target.put(header.folder + header.parts[0].stored.name, content)
    part = replace(header.parts[0], stored=described(header.parts[0].stored.name, content), size=HUGE)
    log_segments.read_part(target.place, replace(header, parts=(part,)), 0, target.unsealer)


def _log(target: Target) -> SegmentHeader:
    log = real_logs()[0]
    sealer = Sealer([target.keys.fingerprint], target.keys.public_home)
    return archive_log(target.place, sealer, BRANCH, log.number, log.data)


def object_of_a_file(target: Target) -> None:
    item = target.in_pool(sealed(target.keys, frame()))
    _fetched(target, Entry("a.ibd", HUGE, "0" * 64, parts=(Part(item.name, HUGE, "0" * 64),)), item)


def bundle(target: Target) -> None:
    item = target.in_pool(sealed(target.keys, frame()))
    _fetched(target, Entry("a.frm", HUGE, "0" * 64, bundle=item.name), item)


def _fetched(target: Target, entry: Entry, item: StoredObject) -> None:
    stock = Stock(target.place)
    header = replace(stock.add(1, {}), objects=(item,))
    target.folder.mkdir()
    loaded = Loaded(header, replace(stock.body(header), entries=(entry,)))
    fetch(loaded, Sources([target.place], target.unsealer), target.folder, RunContext(workers=1))


def proof(target: Target) -> None:
    """Lists in lists, each of which takes twenty times its text."""
    text = b'{"format":"backupd-proof/1","proof":[' + b"[]," * (100 * MIB // 3) + b"0]}"
    target.put(
        layout.proof_key(SERVER, backup_id(1)), sealed(target.keys, zstandard.ZstdCompressor(level=9).compress(text))
    )
    proofdoc.load(target.place, SERVER, backup_id(1), target.unsealer)


def stream_of_the_tool(_target: Target) -> None:
    """What a tool may say of the length of what follows."""
    length = (1 << 60).to_bytes(8, "little")
    for bomb in (
        stream.header("P", b"a") + length + bytes(8) + bytes(4) + b"x" * 1000,
        stream.header("R", b"a") + (0xFFFFFFFF).to_bytes(4, "little") + b"x" * 1000,
        b"XBSTCK01\0P" + (0xFFFFFFFF).to_bytes(4, "little") + b"x" * 1000,
    ):
        with pytest.raises(StreamError):
            stream.Folder.of(bomb)
    raise DamagedError("all of them were refused", [])


@pytest.mark.parametrize(
    "attack",
    [
        body,
        body_of_entries,
        compressed_by_gpg,
        index_of_log,
        part_of_log,
        object_of_a_file,
        bundle,
        proof,
        stream_of_the_tool,
    ],
)
def test_what_is_sealed_small_never_becomes_much_memory(target: Target, attack: Callable[[Target], None]) -> None:
    def refused() -> None:
        with pytest.raises(DamagedError):
            attack(target)

    frame()  # made before it is measured
    assert cost(refused) < MOST


def test_the_configuration_that_was_kept_is_one_of_them(target: Target) -> None:
    stored = target.put("servers/shop/x/config", sealed(target.keys, frame()))
    with pytest.raises(DamagedError, match="bytes where"):
        target.unsealer.unseal(objects.fetch_side(target.place, "servers/shop/x/config", stored), limit=CONFIG_LIMIT)
    assert CONFIG_LIMIT <= MOST // 2


@pytest.mark.parametrize("told", [True, False], ids=["size-told", "size-not-told"])
def test_a_copy_of_a_lost_catalog_fills_neither_memory_nor_the_spool(tmp_path: Path, keys: Keys, told: bool) -> None:
    largest = 0

    def looked(wiring: Wiring) -> None:
        assert [str(moment) for moment, _ in lost_catalogs(wiring, wiring.destination("local"), lines.append)] == []

    lines: list[str] = []
    with wired(tmp_path, keys) as wiring:
        content = sealed(keys, frame(told=told))
        wiring.settings.spool.mkdir()
        put_bytes(
            wiring.destination("local"), f"{layout.CATALOGS}20261121T040000Z-{'a' * 12}-{'b' * 12}.zst.gpg", content
        )
        assert cost(lambda: looked(wiring)) < MOST
        largest = opened_limit(len(content))
    assert len(lines) == 1
    assert f"it holds more than the {largest} bytes that are expected" in lines[0]


@dataclass
class Hollow:
    """A folder in which somebody made a file of holes: ten gigabytes, for nothing."""

    place: FilesystemDestination
    folder: Path

    def put(self, key: str) -> str:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(10 * HUGE)
        return key


@pytest.fixture
def hollow(tmp_path: Path) -> Hollow:
    place = FilesystemDestination("f", tmp_path / "f")
    place.initialise(START)
    return Hollow(place, tmp_path / "f")


NOTES: dict[str, Callable[[Hollow], object]] = {
    "mark": lambda one: marked(one.place) if one.put(layout.mark_key(SERVER, backup_id(1))) else None,
    "hold": lambda one: kept_at(one.place) if one.put(layout.hold_key(SERVER)) else None,
    "tombstone": lambda one: collect(one.place, clock=FakeClock()) if one.put(layout.tombstone_key(NAME)) else None,
    "quarantine": lambda one: objects.quarantined(one.place) if one.put(layout.quarantine_key(NAME)) else None,
    "intent": lambda one: leases(one.place, layout.INTENTS) if one.put(f"{layout.INTENTS}x.json") else None,
    "marker": lambda one: repository_id(one.place) if one.put(layout.REPOSITORY) else None,
}


@pytest.mark.parametrize("note", NOTES)
def test_a_note_of_ten_gigabytes_is_one_that_cannot_be_read(hollow: Hollow, note: str) -> None:
    assert cost(lambda: NOTES[note](hollow)) < 32 * MIB


def _refused(look: Callable[[], object]) -> None:
    with pytest.raises(DamagedError, match="damaged"):
        look()


DOCUMENTS: dict[str, Callable[[Hollow], object]] = {
    "manifest": lambda one: (
        one.put(layout.manifest_key(SERVER, backup_id(1))) and load_header(one.place, SERVER, backup_id(1))
    ),
    "binary log": lambda one: (
        one.put(layout.segment_key(SERVER, SEGMENT)) and log_segments.load_header(one.place, SERVER, SEGMENT)
    ),
    "text": lambda one: get_bytes(one.place, one.put(layout.RECOVER)),
    "head": lambda one: one.put(layout.head_key(SERVER)) and authenticity.read(one.place, SERVER),
    "proof": lambda one: (
        one.put(layout.proof_key(SERVER, backup_id(1)))
        and proofdoc.load(one.place, SERVER, backup_id(1), Unsealer(one.folder))
    ),
    "object": lambda one: objects.fetch(one.place, StoredObject(one.put(layout.object_key(NAME))[-81:], 10 * HUGE, "")),
    "body": lambda one: objects.fetch_side(one.place, one.put("x"), StoredObject("x", 10 * HUGE, "")),
    "signed": lambda one: SignedDestination(one.place, Signing(one.folder, None, ()), lambda _server: True).get(
        one.put(layout.manifest_key(SERVER, backup_id(1)))
    ),
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_of_ten_gigabytes_is_damaged(hollow: Hollow, document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DOCUMENT_LIMIT <= MOST
    for module in (manifestio, signed_places):  # less of it, to be quicker
        monkeypatch.setattr(module, "DOCUMENT_LIMIT", 8 * MIB)
    assert cost(lambda: _refused(lambda: DOCUMENTS[document](hollow))) < 8 * MIB + 32 * MIB


def test_a_signature_of_ten_gigabytes_vouches_for_nothing(hollow: Hollow) -> None:
    key = layout.manifest_key(SERVER, backup_id(1))
    put_bytes(hollow.place, key, b"{}")
    hollow.put(layout.signature_key(key))
    signed = SignedDestination(hollow.place, Signing(hollow.folder, None, ()), lambda _server: True)
    assert cost(lambda: _not_believed(signed, key)) < 32 * MIB


def _not_believed(signed: SignedDestination, key: str) -> None:
    with pytest.raises(DamagedError, match="no trusted signature"):
        signed.get(key)
