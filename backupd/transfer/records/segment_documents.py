"""The clear documents of archived binary logs: ``segment.json``, which *is* a segment, and ``branch.json``.

As with manifests, the encoding is canonical JSON with its own SHA-256 in ``checksum``, and what does not re-encode to
the very same bytes is damaged. They tell places, times and digests, and which tables nowhere: that is in the sealed
index. Since version 2 the index holds the digest of ``segment.json`` (``segment_digest``), so that nobody without a
public key can say anything else of a binary log than what was sealed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from backupd.model.binlog import Branch, BranchReason, Ending, Segment
from backupd.model.document import DOCUMENT_LIMIT, check_fields, parsed
from backupd.model.errors import DamagedError, UsageError
from backupd.model.manifest import CODEC, StoredObject, version_of
from backupd.model.server_facts import Position
from backupd.model.text import format_time, is_id, is_name, parse_time
from storage import layout

SEGMENT_FORMAT = "backupd-segment/"
SEGMENT_VERSION = 2
BRANCH_FORMAT = "backupd-branch/"
_BRANCH_VERSION = 1
_HINT = "another destination may hold a good copy of this binary log; `backupd verify` tells"
_NAME_MAX = 255

_Document = TypeVar("_Document", "SegmentHeader", Branch)


@dataclass(frozen=True, slots=True)
class SealedPart:
    """``stored``: name in the segment's folder, size and SHA-256 as it lies there. ``size``, ``sha256``: of what is
    sealed in it."""

    stored: StoredObject
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment and where its bytes are: ``parts`` one after the other are the range, ``index`` its transactions."""

    segment: Segment
    recipients: tuple[str, ...]
    parts: tuple[SealedPart, ...]
    index: tuple[SealedPart, ...]
    codec: str = CODEC
    version: int = SEGMENT_VERSION

    @property
    def is_bound(self) -> bool:
        """Does its index tell whether a word of it was changed?"""
        return self.version > 1

    @property
    def sealed(self) -> tuple[StoredObject, ...]:
        """Everything that lies beside the header in its folder."""
        return tuple(part.stored for part in (*self.parts, *self.index))

    @property
    def stored_bytes(self) -> int:
        """What the segment takes at a destination, without the header itself."""
        return sum(item.size for item in self.sealed)

    @property
    def folder(self) -> str:
        """Key of the segment's folder at a destination, with a slash at its end."""
        return layout.segment_folder(self.segment.server, self.segment.key)

    @property
    def key(self) -> str:
        """Key of ``segment.json`` at a destination."""
        return layout.segment_key(self.segment.server, self.segment.key)


def encode_segment(header: SegmentHeader) -> bytes:
    """``segment.json`` as it is stored; ``decode_segment`` reads it."""
    return _sealed_off(_segment_document(header))


def segment_digest(header: SegmentHeader) -> str:
    """SHA-256 over everything that a ``segment.json`` tells but the parts of its own index, and how the file ended,
    which may become known later; in the encoding in which it is stored (without ``checksum``)."""
    document = _segment_document(header)
    del document["index"], document["ending"]
    return hashlib.sha256(_canonical(document)).hexdigest()


def _segment_document(header: SegmentHeader) -> dict[str, Any]:
    segment = header.segment
    return {
        "format": f"{SEGMENT_FORMAT}{header.version}",
        "server": segment.server,
        "branch": segment.branch,
        "file": segment.file,
        "number": segment.number,
        "start": segment.start,
        "end": segment.end,
        "ending": str(segment.ending),
        "gtids_before": segment.gtids_before,
        "gtids_after": segment.gtids_after,
        "transactions": segment.transactions,
        "first_at": _moment(segment.first_at),
        "last_at": _moment(segment.last_at),
        "precise": segment.precise,
        "server_ids": list(segment.server_ids),
        "flavour": segment.flavour,
        "server_version": segment.server_version,
        "sha256": segment.sha256,
        "remarks": list(segment.remarks),
        "codec": header.codec,
        "recipients": list(header.recipients),
        "parts": [_part(part) for part in header.parts],
        "index": [_part(part) for part in header.index],
    }


def decode_segment(raw: bytes, *, where: str) -> SegmentHeader:
    """Read a stored ``segment.json``. Raises DamagedError naming ``where`` when a byte is not as written, and for names
    that nobody may use as a file's; NewerFormatError for a later version."""
    return _decoded(raw, where, (SEGMENT_FORMAT, SEGMENT_VERSION), _read_segment, encode_segment)


def encode_branch(branch: Branch) -> bytes:
    """``branch.json`` as it is stored; ``decode_branch`` reads it."""
    return _sealed_off(
        {
            "format": f"{BRANCH_FORMAT}{_BRANCH_VERSION}",
            "server": branch.server,
            "id": branch.id,
            "noticed_at": format_time(branch.noticed_at),
            "reason": str(branch.reason),
            "server_uuid": branch.server_uuid,
            "flavour": branch.flavour,
            "basename": branch.basename,
            "first_number": branch.first_number,
            "since": _moment(branch.since),
            "parent": branch.parent,
            "fork": branch.fork.as_json() if branch.fork else None,
            "names_go_on": branch.names_go_on,
            "note": branch.note,
            "baseline": branch.baseline,
        }
    )


def decode_branch(raw: bytes, *, where: str) -> Branch:
    """Read a stored ``branch.json``. Raises DamagedError as ``decode_segment`` does."""
    return _decoded(raw, where, (BRANCH_FORMAT, _BRANCH_VERSION), _read_branch, encode_branch)


def is_log_name(name: str, number: int) -> bool:
    """May ``name`` be that of binary log ``number``: a plain file name that ends in the number?"""
    ending = name.rpartition(".")[2]
    return (
        not set(name) & {"/", "\0"}
        and 0 < len(name.encode("utf-8", "surrogateescape")) <= _NAME_MAX
        and not name.startswith(".")
        and ending.isascii()
        and ending.isdigit()
        and int(ending) == number
    )


def _read_segment(document: Mapping[str, Any]) -> SegmentHeader:
    segment = Segment(
        server=document["server"],
        branch=document["branch"],
        file=document["file"],
        number=document["number"],
        start=document["start"],
        end=document["end"],
        ending=Ending(document["ending"]),
        gtids_before=document["gtids_before"],
        gtids_after=document["gtids_after"],
        transactions=document["transactions"],
        first_at=_read_moment(document["first_at"]),
        last_at=_read_moment(document["last_at"]),
        precise=document["precise"],
        server_ids=tuple(document["server_ids"]),
        flavour=document["flavour"],
        server_version=document["server_version"],
        sha256=document["sha256"],
        remarks=tuple(document["remarks"]),
    )
    check_fields(segment)
    if not is_log_name(segment.file, segment.number):
        raise ValueError(f"{segment.file[:120]!r} is not the name of binary log {segment.number}")
    piece = any(layout.of_piece(name) for name, *_told in document["parts"])  # also when its end is known by now
    header = SegmentHeader(
        segment=segment,
        recipients=tuple(document["recipients"]),
        codec=document["codec"],
        parts=tuple(
            _read_part(part, layout.part_name(index, piece=piece)) for index, part in enumerate(document["parts"])
        ),
        index=tuple(_read_part(part, layout.index_name(index)) for index, part in enumerate(document["index"])),
        version=version_of(document["format"], SEGMENT_FORMAT, SEGMENT_VERSION, "it"),
    )
    check_fields(header)
    if sum(part.size for part in header.parts) != segment.size:
        raise ValueError("its parts are not as long as it is")
    layout.check_key(header.key)
    return header


def _read_branch(document: Mapping[str, Any]) -> Branch:
    branch = Branch(
        server=document["server"],
        id=document["id"],
        noticed_at=parse_time(document["noticed_at"]),
        reason=BranchReason(document["reason"]),
        server_uuid=document["server_uuid"],
        flavour=document["flavour"],
        basename=document["basename"],
        first_number=document["first_number"],
        since=_read_moment(document["since"]),
        parent=document["parent"],
        fork=Position.from_json(document["fork"]) if document["fork"] else None,
        names_go_on=document["names_go_on"],
        note=document["note"],
        baseline=document["baseline"],
    )
    check_fields(branch)
    if not is_name(branch.server) or not all(is_id(name) for name in (branch.id, branch.parent or branch.id)):
        raise ValueError("it names no server and branch of ours")
    if not is_log_name(branch.file(branch.first_number), branch.first_number):
        raise ValueError(f"{branch.basename[:120]!r} is not how binary logs are called")
    return branch


def _decoded(
    raw: bytes,
    where: str,
    form: tuple[str, int],
    read: Callable[[Mapping[str, Any]], _Document],
    encode: Callable[[_Document], bytes],
) -> _Document:
    try:
        document = parsed(raw.decode("ascii"), limit=DOCUMENT_LIMIT)
        checksum = document.pop("checksum")
        if hashlib.sha256(_canonical(document)).hexdigest() != checksum:
            raise ValueError("its checksum does not match its content")
        version_of(document["format"], *form, where)
        found = read(document)
        if encode(found) != raw:
            raise ValueError("its bytes differ from what was written")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError) as error:
        raise DamagedError(f"{where} is damaged", [f"{where}: {error}"], hint=_HINT) from error
    return found


def _sealed_off(document: dict[str, Any]) -> bytes:
    return _canonical({**document, "checksum": hashlib.sha256(_canonical(document)).hexdigest()})


def _canonical(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode("ascii")


def _part(part: SealedPart) -> list[Any]:
    return [part.stored.name, part.stored.size, part.stored.sha256, part.size, part.sha256]


def _read_part(data: list[Any], expected: str) -> SealedPart:
    name, size, sha256, plain_size, plain_sha256 = data
    if name != expected:
        raise ValueError(f"a part is called {str(name)[:120]!r} where {expected} belongs")
    return SealedPart(StoredObject(name, size, sha256), plain_size, plain_sha256)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else format_time(moment)


def _read_moment(text: str | None) -> datetime | None:
    return None if text is None else parse_time(text)
