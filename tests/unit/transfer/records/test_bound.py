"""What is sealed tells what belongs to it in the clear: a manifest and its body, a binary log and its index."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from backupd.model.errors import DamagedError, NewerFormatError, NotFoundError, TamperedError
from backupd.model.manifest import (
    Body,
    Header,
    StoredObject,
    bound,
    decode_body,
    decode_header,
    encode_facts,
    encode_header,
)
from backupd.transfer import log_segments
from backupd.transfer.collection import collect
from backupd.transfer.deletion import mark, sweep
from backupd.transfer.log_segments import SegmentConflictError
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.manifests import described, load_body, load_header, put_bytes, read
from backupd.transfer.records.segment_documents import decode_segment, encode_branch, encode_segment
from backupd.transfer.scrub_and_repair import put_manifest_right, put_segment_right
from storage import layout
from tests.support.keys import Keys
from tests.support.logs.archived_logs import archive_log
from tests.support.logs.real_logs import real_logs
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import FakeClock, Stock, backup_id, commit_header, everything, wanted
from tests.unit.transfer.test_log_segments import BRANCH

PLACE = "m"


@pytest.fixture
def place() -> MemoryDestination:
    return MemoryDestination(PLACE)


def stored(place: MemoryDestination, keys: Keys, *, version: int = 2) -> tuple[Header, Body]:
    """A committed backup whose body is truly sealed."""
    stock = Stock(place)
    header = replace(stock.add(1, {"a": b"a"}), version=version)
    body = stock.body(header)
    bound_header, plain = bound(header, body)
    if version > 1:
        header = bound_header
    else:
        plain = encode_facts(body.facts, len(body.entries)) + plain.partition(b"\n")[2]
    sealed = Sealer([keys.fingerprint], keys.public_home).seal(plain)
    header = replace(header, body=described(layout.BODY, sealed))
    put_bytes(place, layout.body_key(header.server, header.backup_id), sealed)
    commit_header(place, header)
    return header, body


def rewritten(raw: bytes, **changes: Any) -> bytes:
    """The document with other values and a right checksum: what anybody who can write can do."""
    document = {**json.loads(raw), **changes}
    del document["checksum"]
    plain = (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode()
    document["checksum"] = hashlib.sha256(plain).hexdigest()
    return (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode()


@pytest.mark.parametrize("odd", [{"server": {"variables": []}}, {"dump": None}, {"inventory": None}, {"server": 7}])
def test_a_body_with_another_sort_of_value_is_damaged(
    place: MemoryDestination, keys: Keys, odd: dict[str, Any]
) -> None:
    header, body = stored(place, keys)
    first, _end, rest = bound(header, body)[1].partition(b"\n")
    document = json.loads(first)
    for name, value in odd.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) else value
    with pytest.raises(DamagedError, match="is damaged"):
        decode_body(json.dumps(document).encode() + b"\n" + rest)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: replace(header, server="other"),
        lambda header: replace(header, kind="logical"),
        lambda header: replace(header, started_at=header.started_at - timedelta(days=1)),
        lambda header: replace(header, finished_at=header.finished_at + timedelta(hours=1)),
        lambda header: replace(header, to_lsn=7),
        lambda header: replace(header, server_uuid="another"),
        lambda header: replace(header, table_set="all"),
        lambda header: replace(header, tables_missing=1),
        lambda header: replace(header, stats=replace(header.stats, files=2)),
        lambda header: replace(header, runbook=StoredObject(layout.RUNBOOK, 1, "0" * 64)),
        lambda header: replace(header, recipients=("B" * 40,)),
        lambda header: replace(header, body_size=header.body_size + 1),
        lambda header: replace(header, version=1),
    ],
    ids=[
        "server",
        "kind",
        "begun",
        "finished",
        "to_lsn",
        "server_uuid",
        "table_set",
        "missing",
        "files",
        "runbook",
        "recipients",
        "body_size",
        "version",
    ],
)
def test_no_word_of_a_manifest_can_be_another_one_than_was_sealed(
    place: MemoryDestination, keys: Keys, change: Callable[[Header], Header]
) -> None:
    header, body = stored(place, keys)
    unsealer = Unsealer(keys.secret_home)
    assert load_body(place, header, unsealer).entries == body.entries
    forged = change(header)
    if forged.server != header.server:
        put_bytes(
            place,
            layout.body_key("other", header.backup_id),
            place.get(layout.body_key(header.server, header.backup_id)).read(),
        )
    commit_header(place, forged)
    with pytest.raises(TamperedError, match="does not belong"):
        load_body(place, load_header(place, forged.server, forged.backup_id), unsealer)


def test_version_1_is_read_and_says_that_nothing_binds_it(place: MemoryDestination, keys: Keys) -> None:
    header, body = stored(place, keys, version=1)
    found = load_header(place, header.server, header.backup_id)
    assert (found, found.is_bound) == (header, False)
    assert load_body(place, found, Unsealer(keys.secret_home)).entries == body.entries
    commit_header(place, replace(header, version=2, body_size=1 << 20))
    with pytest.raises(TamperedError, match="sealed in version 1"):
        load_body(place, load_header(place, header.server, header.backup_id), Unsealer(keys.secret_home))


def test_a_later_version_is_refused_by_name_and_nothing_of_it_is_deleted(place: MemoryDestination) -> None:
    stock, clock = Stock(place), FakeClock()
    stock.add(1, {"a": b"a"})
    header = stock.add(2, {"b": b"b"})
    key = layout.manifest_key(header.server, header.backup_id)
    put_bytes(place, key, rewritten(encode_header(header), format="backupd-manifest/3", more=True))
    with pytest.raises(NewerFormatError, match="newer version of backupd") as caught:
        load_header(place, header.server, header.backup_id)
    assert "backupd-manifest/3" in caught.value.detail
    found = read(place, header.server, header.backup_id)
    assert found is not None
    assert isinstance(found.header, NewerFormatError)
    put_bytes(place, layout.object_key(f"{'0' * 64}-{'0' * 16}"), b"what only the later version names")
    mark(place, header.server, backup_id(2), clock(), reason="somebody wants it gone")
    before = everything(place)
    clock.move(days=9)
    swept = sweep(place, clock=clock, grace=timedelta(days=1), sightings=wanted)
    assert swept.backups == []
    assert any("newer version" in line for line in swept.held), swept.held
    collect(place, clock=clock)
    clock.move(days=9)
    collect(place, clock=clock)
    assert everything(place) == before


def test_a_body_of_nothing_but_line_ends_is_refused_before_anything_is_made_of_it(
    place: MemoryDestination, keys: Keys
) -> None:
    header, body = stored(place, keys)
    _header, plain = bound(header, body)
    for bomb in (plain + b"\n" * (256 * 1024**2), plain + b"\n" * (32 * 1024**2)):
        sealed = Sealer([keys.fingerprint], keys.public_home).seal(bomb)
        assert len(sealed) < 40_000
        put_bytes(place, layout.body_key(header.server, header.backup_id), sealed)
        for version in (1, 2):
            forged = replace(header, body=described(layout.BODY, sealed), body_size=len(bomb), version=version)
            with pytest.raises(DamagedError, match="damaged"):
                load_body(place, forged, Unsealer(keys.secret_home))


def test_no_word_of_a_binary_logs_description_can_be_another_one(place: MemoryDestination, keys: Keys) -> None:
    log, unsealer = real_logs()[0], Unsealer(keys.secret_home)
    header = archive_log(place, Sealer([keys.fingerprint], keys.public_home), BRANCH, log.number, log.data)
    assert tuple(log_segments.read_index(place, header, unsealer)) == log.transactions
    raw = encode_segment(header)
    for change in (
        {"server_version": "5.5.5"},
        {"transactions": 10**6},
        {"first_at": "2001-01-01T00:00:00Z"},
        {"gtids_after": "0-1-9"},
        {"flavour": "none"},
        {"format": "backupd-segment/1"},
    ):
        forged = decode_segment(rewritten(raw, **change), where="it")
        assert forged != header
        with pytest.raises(TamperedError, match="does not belong to what is sealed"):
            list(log_segments.read_index(place, forged, unsealer))
    with pytest.raises(NewerFormatError):
        decode_segment(rewritten(raw, format="backupd-segment/3"), where="it")


def test_a_later_version_of_a_binary_log_is_not_overwritten(place: MemoryDestination, keys: Keys) -> None:
    log, sealer = real_logs()[0], Sealer([keys.fingerprint], keys.public_home)
    header = archive_log(place, sealer, BRANCH, log.number, log.data)
    later = rewritten(encode_segment(header), format="backupd-segment/3")
    put_bytes(place, header.key, later)
    with pytest.raises((NewerFormatError, SegmentConflictError)):
        archive_log(place, sealer, BRANCH, log.number, log.data)
    assert place.get(header.key).read() == later


def test_a_repair_leaves_what_is_of_a_later_version_and_what_nobody_else_has(
    place: MemoryDestination, keys: Keys
) -> None:
    log, sealer = real_logs()[0], Sealer([keys.fingerprint], keys.public_home)
    header = archive_log(place, sealer, BRANCH, log.number, log.data)
    other, empty = MemoryDestination("other"), MemoryDestination("empty")
    archive_log(other, sealer, BRANCH, log.number, log.data)
    true = encode_segment(header)

    def repair(source: MemoryDestination) -> str:
        return put_segment_right(
            place, BRANCH.server, header.segment.key, [header.key], [source], clock=FakeClock(), check=lambda: None
        )

    put_bytes(place, header.key, rewritten(true, format="backupd-segment/3", more=True))
    before = everything(place)
    for source in (empty, other):
        with pytest.raises(NewerFormatError):
            repair(source)
    put_bytes(place, header.key, b"damaged" + true)
    with pytest.raises(NotFoundError):
        repair(empty)
    assert everything(place) == before
    assert place.get(header.key).read() == b"damaged" + true
    assert repair(other) == "other"
    assert (
        tuple(
            log_segments.read_index(
                place, log_segments.load_header(place, BRANCH.server, header.segment.key), Unsealer(keys.secret_home)
            )
        )
        == log.transactions
    )


def test_neither_a_manifest_nor_a_branch_of_a_later_version_is_replaced(place: MemoryDestination) -> None:
    header = Stock(place).add(1, {"a": b"a"})
    other = MemoryDestination("other")
    Stock(other).add(1, {"a": b"a"})
    key = layout.manifest_key(header.server, header.backup_id)
    later = rewritten(encode_header(header), format="backupd-manifest/3")
    put_bytes(place, key, later)
    with pytest.raises(NewerFormatError):
        put_manifest_right(place, header.server, header.backup_id, [other], clock=FakeClock())
    branch = rewritten(encode_branch(BRANCH), format="backupd-branch/2")
    put_bytes(place, layout.branch_key(BRANCH.server, BRANCH.id), branch)
    with pytest.raises(NewerFormatError):
        log_segments.put_branch(place, BRANCH)
    assert [place.get(one).read() for one in (key, layout.branch_key(BRANCH.server, BRANCH.id))] == [later, branch]


def test_a_version_that_is_none_is_damage(place: MemoryDestination) -> None:
    header = Stock(place).add(1, {"a": b"a"})
    for form in ("backupd-manifest/0", "backupd-manifest/02", "backupd-manifest/x", "other/3", 3, None):
        with pytest.raises(DamagedError, match="is damaged"):
            decode_header(rewritten(encode_header(header), format=form), where="it")
    assert decode_header(io.BytesIO(encode_header(header)).read()) == header
