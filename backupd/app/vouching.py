"""Vouching for documents of record that were stored before a policy said that they have to be signed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backupd.app.trust import signed_servers
from backupd.app.wiring import Wiring
from backupd.model.binlog import Branch, SegmentRecord
from backupd.model.errors import DamagedError, NotFoundError, ObjectMissingError, RefusedError
from backupd.model.manifest import decode_header
from backupd.transfer.inventory import backup_ids
from backupd.transfer.segmentdoc import decode_branch, decode_segment
from backupd.transfer.segments import keys as segment_keys
from backupd.transfer.signed import SignedDestination
from storage import layout


@dataclass(frozen=True, slots=True)
class Vouched:
    """``signed``: how many documents were; ``left``: those that do not agree with the catalog, each with why."""

    signed: int
    left: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"signed": self.signed, "left": list(self.left)}


def vouch(wiring: Wiring, name: str) -> Vouched:
    """Sign what lies unsigned at destination ``name`` and is, value by value, what the catalog knows of it: for backups
    that are older than `signed: true`. Raises RefusedError where no policy wants anything signed, KeyUnusableError."""
    destination = wiring.destination(name)
    if not isinstance(destination, SignedDestination):
        raise RefusedError("no policy says `signed: true`, so nothing has to be",
                           hint="set it in the policy of a server first")
    count = 0
    left: list[str] = []
    for server in sorted(signed_servers(wiring.settings)):
        for key, why in _documents(wiring, destination, server):
            if not destination.unsigned(key):
                continue
            if why:
                left.append(f"{name}: {key}: {why}")
            else:
                destination.sign(key)
                count += 1
    return Vouched(count, tuple(left))


def _documents(wiring: Wiring, destination: SignedDestination, server: str) -> Iterator[tuple[str, str]]:
    """Every document of record of ``server`` there, with why the catalog does not confirm it, or ""."""
    for _server, backup_id in backup_ids(destination, server):
        yield layout.manifest_key(server, backup_id), _of_backup(wiring, destination, server, backup_id)
    branches = {branch.id: branch for branch in wiring.catalog.binlogs.branches(server)}
    for info in list(destination.list(layout.binlogs_folder(server))):
        owner = layout.branch_of(info.key)
        if owner is not None:
            yield info.key, _of_branch(destination, info.key, branches.get(owner[1]))
    for _server, key in segment_keys(destination, server):
        place = (key.number, key.start)
        known = [record for record in wiring.catalog.binlogs.segments(
            server, key.branch, from_place=place, to_place=(key.number, key.end)) if record.key == key]
        yield layout.segment_key(server, key), _of_segment(destination, layout.segment_key(server, key), known)


def _of_backup(wiring: Wiring, destination: SignedDestination, server: str, backup_id: str) -> str:
    key = layout.manifest_key(server, backup_id)
    try:
        header = decode_header(destination.as_it_lies(key), where=key)
        record = wiring.catalog.backups.get(backup_id)
    except ObjectMissingError:
        return "it is gone"
    except DamagedError as damage:
        return damage.message
    except NotFoundError:
        return "the catalog knows no such backup"
    same = ((header.backup_id, header.server, header.parent, header.kind) ==
            (record.id, record.server, record.parent, str(record.kind))
            and (header.started_at, header.finished_at, header.stats, header.from_lsn, header.to_lsn) ==
            (record.started_at, record.finished_at, record.stats, record.from_lsn, record.to_lsn))
    return "" if same else "it tells other sizes, times or positions than the catalog"


def _of_branch(destination: SignedDestination, key: str, known: Branch | None) -> str:
    try:
        found = decode_branch(destination.as_it_lies(key), where=key)
    except (ObjectMissingError, DamagedError) as failure:
        return failure.message
    return "" if found == known else "it is not the branch that the catalog knows"


def _of_segment(destination: SignedDestination, key: str, known: list[SegmentRecord]) -> str:
    try:
        found = decode_segment(destination.as_it_lies(key), where=key)
    except (ObjectMissingError, DamagedError) as failure:
        return failure.message
    return "" if [found.segment] == [record.segment for record in known] else "it is not what the catalog knows"
