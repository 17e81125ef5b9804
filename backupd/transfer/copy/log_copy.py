"""Copying archived binary logs to another destination, as they are stored. Needs no private key.

As when they were stored first, a segment's parts and index come before its ``segment.json``.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from backupd.model.binlog import Branch, SegmentKey
from backupd.model.errors import (
    DamagedError,
    DestinationError,
    NewerFormatError,
    NotFoundError,
    ObjectMissingError,
    TamperedError,
)
from backupd.model.manifest import StoredObject
from backupd.model.text import Clock
from backupd.transfer.logs import segments
from backupd.transfer.logs.segments import SegmentConflictError
from backupd.transfer.records.segment_documents import SegmentHeader, decode_branch, decode_segment
from backupd.transfer.relay import Document, Relay
from storage.contract import layout
from storage.contract.destination import Destination

_FRESH = timedelta(hours=1)
"""Parts of an interrupted copy that are older are put again, lest somebody is just clearing them away."""


def copy_branch(relay: Relay, branch: Branch) -> None:
    """Describe ``branch`` at the target with the bytes of a source. Raises DamagedError, DestinationError."""
    key = layout.branch_key(branch.server, branch.id)
    damages: list[str] = []
    for document in relay.documents(key):
        try:
            found = decode_branch(document.content, where=document.where)
        except DamagedError as error:
            damages += error.damages
            continue
        if (found.server, found.id) == (branch.server, branch.id):
            if not relay.holds(document):
                relay.put(document)
            return
    raise DamagedError(
        f"no destination describes branch {branch.id} of {branch.server} as it was written",
        damages or [f"{key} is missing"],
        hint="`backupd verify` tells what else is damaged",
    )


def copy_segment(relay: Relay, server: str, key: SegmentKey, *, clock: Clock) -> SegmentHeader:
    """Store one segment at the target; its header as it lies there afterwards.

    Raises NotFoundError when no source has it (any more), SegmentConflictError when the target holds another one in its
    place, DamagedError, DestinationError.
    """
    document, header = good_copy(relay, server, key)
    present = _present(relay.target, header)
    if present is not None and (present.parts, present.index) != (header.parts, header.index):
        return present  # the same bytes, sealed another time
    if present != header:
        for item in header.sealed:
            _bring(relay, header.folder + item.name, item, clock())
        relay.put(document)
    if gone := segments.absent(relay.target, header):
        raise DestinationError(
            f"destination {relay.target.name} does not keep what it is given",
            detail="\n".join(f"{name} {problem}" for name, problem in gone),
            hint="look at the medium and its log; it is tried again by itself",
        )
    return header


def good_copy(relay: Relay, server: str, key: SegmentKey) -> tuple[Document, SegmentHeader]:
    """The first description of a segment at a source that can be read. Raises NotFoundError, DamagedError,
    DestinationError."""
    place = layout.segment_key(server, key)
    damages: list[str] = []
    for document in relay.documents(place):
        try:
            header = decode_segment(document.content, where=document.where)
        except DamagedError as error:
            damages += error.damages
            continue
        if (header.segment.server, header.segment.key) == (server, key):
            return document, header
        damages.append(f"{document.where}: it belongs to {header.key}")
    if damages:
        raise DamagedError(
            f"no good copy of binary log {key.number} of {server}, bytes {key.start} to {key.end}, was found",
            damages,
            hint="`backupd verify` tells what else is damaged",
        )
    raise NotFoundError(
        f"no destination that can be reached holds binary log {key.number} of {server}, bytes {key.start} to {key.end}"
    )


def _present(target: Destination, header: SegmentHeader) -> SegmentHeader | None:
    """What lies under the key of ``header``, if it can be read. Raises as ``segments.put`` does."""
    try:
        found = segments.load_header(target, header.segment.server, header.segment.key)
    except NewerFormatError:
        raise
    except TamperedError as error:
        raise SegmentConflictError(
            f"{header.key} at destination {target.name} is none of ours", detail=error.detail, hint=error.hint
        ) from error
    except (NotFoundError, DamagedError):
        return None
    if found.segment.sha256 != header.segment.sha256:
        raise SegmentConflictError(
            f"destination {target.name} holds another binary log as {header.segment.file}, bytes "
            f"{header.segment.start} to {header.segment.end}",
            detail=f"{target.name}:{header.key}: SHA-256 {found.segment.sha256} there, {header.segment.sha256} here",
            hint="two installations, or a copy of one, write logs of the same server to this destination; nothing was "
            "overwritten. Give one of them a destination of its own",
        )
    return found


def _bring(relay: Relay, key: str, item: StoredObject, now: datetime) -> None:
    try:
        fresh = abs(now - relay.target.stat(key).modified_at) < _FRESH
    except ObjectMissingError:
        fresh = False
    if fresh:
        relay.bring(key, item)
    else:
        relay.send(key, item)
