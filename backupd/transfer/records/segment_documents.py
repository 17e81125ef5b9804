"""The clear documents of archived binary logs: ``segment.json``, which *is* a segment, and ``branch.json``; and how a
segment is sealed.

As with manifests, the encoding is canonical JSON with its own SHA-256 in ``checksum``, and what does not re-encode to
the very same bytes is damaged. They name positions, times and digests, but no tables: that is in the sealed
index. Since version 2 the index holds the digest of ``segment.json`` (``segment_digest``), so that nobody without a
public key can say anything else of a binary log than what was sealed.

A segment is sealed into a local folder once, for all destinations. The folder is complete when its ``segment.json`` is
there. Until then it is the rest of a process that died, and no byte of it was given to any destination; afterwards the
same bytes go to all of them, however often.

The index of a segment: which transactions are in it, and where.

It is one line of JSON that names the format, then one line for each transaction. It is stored in parts, each of which
begins with such a line. That of the last part also has the digest of the clear description that belongs to it, since
version 2 of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import zstandard

from backupd.engine.binlog.events import clear_flag
from backupd.model.binlog import INDEX_FORMAT, Branch, Change, Segment, SegmentKey, Transaction
from backupd.model.document import DOCUMENT_LIMIT, check_fields, parsed
from backupd.model.errors import DamagedError, StreamError, UsageError
from backupd.model.manifest import CODEC, PART_SIZE, StoredObject, version_of
from backupd.model.text import format_time, is_id, is_name
from backupd.transfer.records.encryption import Sealer
from storage import layout

SEGMENT_FORMAT = "backupd-segment/"
SEGMENT_VERSION = 2
BRANCH_FORMAT = "backupd-branch/"
_BRANCH_VERSION = 1
_HINT = "another destination may hold a good copy of this binary log: run `backupd verify`"
_NAME_MAX = 255
_quoted = json.encoder.encode_basestring
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode

_Document = TypeVar("_Document", "SegmentHeader", Branch)


@dataclass(frozen=True, slots=True)
class SealedPart:
    """``stored``: name in the segment's folder, size and SHA-256 as it is there. ``size``, ``sha256``: of what is
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
        """Does its index show whether a word of it was changed?"""
        return self.version > 1

    @property
    def sealed(self) -> tuple[StoredObject, ...]:
        """Everything that is beside the header in its folder."""
        return tuple(part.stored for part in (*self.parts, *self.index))

    @property
    def stored_bytes(self) -> int:
        """What the segment takes at a destination, without the header itself."""
        return sum(item.size for item in self.sealed)

    def parts_between(self, begin: int, end: int) -> Iterator[tuple[int, int, SealedPart]]:
        """The parts that hold any of the bytes ``[begin, end)`` of the file: number, where in the file, the part."""
        at = self.segment.start
        for number, part in enumerate(self.parts):
            if at < end and begin < at + part.size:
                yield number, at, part
            at += part.size

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
    """SHA-256 over everything that a ``segment.json`` states but the parts of its own index, and how the file ended,
    which may become known later; in the encoding in which it is stored (without ``checksum``)."""
    document = _segment_document(header)
    del document["index"], document["ending"]
    return hashlib.sha256(_canonical(document)).hexdigest()


def _segment_document(header: SegmentHeader) -> dict[str, Any]:
    return {
        "format": f"{SEGMENT_FORMAT}{header.version}",
        **header.segment.as_json(),
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
    return _sealed_off({"format": f"{BRANCH_FORMAT}{_BRANCH_VERSION}", **branch.as_json()})


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
    segment = Segment.from_json(document)
    check_fields(segment)
    if not is_log_name(segment.file, segment.number):
        raise ValueError(f"{segment.file[:120]!r} is not the name of binary log {segment.number}")
    piece = any(layout.of_piece(name) for name, *_rest in document["parts"])  # also when its end is known by now
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
    branch = Branch.from_json(document)
    check_fields(branch)
    if not is_name(branch.server) or not all(is_id(name) for name in (branch.id, branch.parent or branch.id)):
        raise ValueError("it names no valid server and branch")
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


_PLACE = re.compile(rb'\n\{"gtid":"([0-9a-zA-Z_:-]*)","start":([0-9]+),"end":([0-9]+),')
"""How each line of an index but its first begins."""
INDEX_PART = 8 * 1024 * 1024
"""Bytes of index that fill one part of it; each part begins with the head and can be read alone."""
_READ = 1 << 20
_KNOWN, _FEW = 5000, 32
"""Of so many transactions the text of the changes is kept, where these are not more than so many."""
_LINES = "transactions.zst"
_FLAGGED = 22
"""Bytes at the beginning of a file that hold its in-use flag."""


class Digest(Protocol):
    """What hears of the plain bytes: one of hashlib's, say."""

    def update(self, data: bytes, /) -> None: ...


class Sealing:
    """Seals one segment. Its bytes come in order (``part``, ``plain``, ``borrow``), and so do its transactions
    (``transaction``, ``lines``), then ``finish``; bytes and transactions may come from two threads.

    ``folder`` is made afresh. ``piece``: of a file that still grows; its parts are named so, and its transactions stay
    in the folder as they are too (``kept_lines``). Nothing is synced: who finds the folder later compares digests
    (``Sealed.load``). All methods raise ToolError and KeyUnusableError as Sealer does, and OSError.
    """

    def __init__(self, folder: Path, sealer: Sealer, *, piece: bool = False) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        self._folder = folder
        self._sealer = sealer
        self._piece = piece
        self._parts: list[SealedPart] = []
        self._index: list[SealedPart] = []
        self._lines = bytearray(index_head())
        self._line = IndexLines().line
        self._packer = zstandard.ZstdCompressor(level=1, write_checksum=True)

    def transaction(self, transaction: Transaction) -> None:
        """Take the next transaction of the index."""
        self.lines(self._line(transaction))

    def lines(self, lines: bytes) -> None:
        """Take the next transactions as an index has them, whole lines."""
        self._lines += lines
        if len(self._lines) >= INDEX_PART:
            self._close_index()

    def plain(self, stream: BinaryIO, start: int, end: int) -> str:
        """Seal bytes ``[start, end)`` of a file from ``stream``, which is at ``start``; their SHA-256. Raises
        StreamError as ``part``."""
        digest = hashlib.sha256()
        while start < end:
            size = min(PART_SIZE, end - start)
            self.part(stream, start, size, digest)
            start += size
        return digest.hexdigest()

    def part(self, stream: BinaryIO, start: int, size: int, *digests: Digest) -> None:
        """Seal the next ``size`` bytes of a file from ``stream``, which is at ``start``, as one part; ``digests`` get
        them, too. A file's beginning loses its in-use flag. Raises StreamError when the stream ends too early."""
        own = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            left = size
            while left:
                data = stream.read(min(_READ, left))
                if not data:
                    raise StreamError(
                        f"a binary log in the spool ends {left} bytes too early",
                        hint="check whether a file in the spool's folder was truncated by hand; move the folder away "
                        "to start again",
                    )
                if start == 0 and left == size:
                    data = without_flag(data)
                left -= len(data)
                for digest in (own, *digests):
                    digest.update(data)
                yield data

        self._parts.append(self._seal(layout.part_name(len(self._parts), piece=self._piece), pieces(), size, own))

    def borrow(self, part: SealedPart, folder: Path) -> None:
        """Take over a part of a piece that was sealed into ``folder``; its sealed bytes as far as they are there."""
        name = layout.part_name(len(self._parts), piece=self._piece)
        with contextlib.suppress(FileNotFoundError):
            try:
                (self._folder / name).hardlink_to(folder / part.stored.name)
            except FileNotFoundError:
                raise
            except OSError:  # a file system that knows no links, or allows no more
                shutil.copyfile(folder / part.stored.name, self._folder / name)
        self._parts.append(replace(part, stored=replace(part.stored, name=name)))

    def finish(self, segment: Segment, target: Path) -> Sealed:
        """Make the folder complete and rename it to ``target``. ``segment`` is what was sealed."""
        header = SegmentHeader(segment, self._sealer.recipients, tuple(self._parts), ())
        self._lines[: len(index_head())] = index_head(segment_digest(header))
        self._close_index()
        header = replace(header, index=tuple(self._index))
        (self._folder / layout.SEGMENT).write_bytes(encode_segment(header))
        self._folder.rename(target)
        return Sealed(target, header)

    def _close_index(self) -> None:
        lines, self._lines = self._lines, bytearray(index_head())
        if self._piece:
            with (self._folder / _LINES).open("ab") as file, memoryview(lines) as view:
                file.write(self._packer.compress(view[lines.index(b"\n") + 1 :]))
        self._index.append(self._seal(layout.index_name(len(self._index)), (lines,), len(lines), hashlib.sha256(lines)))

    def _seal(self, name: str, plain: Iterable[bytes | bytearray], size: int, digest: hashlib._Hash) -> SealedPart:
        """``digest``: of ``plain``, once that was read."""
        stored, sha256 = self._sealer.seal_pieces(plain, size, self._folder / name)
        return SealedPart(StoredObject(name, stored, sha256), size, digest.hexdigest())


class Sealed:
    """A sealed segment in a private folder. ``header`` describes it. ``pieces``: those that it was put together from,
    with their SHA-256: their bytes are known to be the file's."""

    def __init__(self, folder: Path, header: SegmentHeader, pieces: Mapping[SegmentKey, str] | None = None) -> None:
        self.folder = folder
        self.header = header
        self.pieces = pieces or {}

    @classmethod
    def load(cls, folder: Path) -> Sealed | None:
        """What ``folder`` holds, None unless it is complete and as it was sealed."""
        found = cls.described(folder)
        return found if found is not None and all(map(found.holds, found.header.sealed)) else None

    @classmethod
    def described(cls, folder: Path) -> Sealed | None:
        """What was sealed into ``folder``, whether its sealed bytes are still there or not."""
        try:
            raw = (folder / layout.SEGMENT).read_bytes()
            return cls(folder, decode_segment(raw, where=str(folder / layout.SEGMENT)))
        except (FileNotFoundError, NotADirectoryError, DamagedError):
            return None

    def open(self, item: StoredObject) -> BinaryIO:
        """The sealed bytes of one of ``header.sealed``; the caller closes the stream. Raises OSError."""
        return (self.folder / item.name).open("rb")

    def holds(self, item: StoredObject) -> bool:
        """Are the sealed bytes of one of ``header.sealed`` here, as they were sealed? Raises OSError."""
        try:
            return _digest_of(self.folder / item.name) == item.sha256
        except FileNotFoundError:
            return False

    def kept_lines(self) -> Iterator[bytes]:
        """The transactions of a piece as its index has them, some whole lines at a time. Raises OSError, DamagedError
        for what is not as it was written."""
        try:
            with (self.folder / _LINES).open("rb") as file:
                plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                rest = b""
                while chunk := plain.read(_READ):
                    lines, end, rest = (rest + chunk).rpartition(b"\n")
                    yield lines + end
        except zstandard.ZstdError as error:
            raise _no_index(1, str(error)) from error

    @staticmethod
    def lighten(folder: Path) -> None:
        """Only the description of a piece, and its transactions, are needed any longer."""
        for path in folder.iterdir():
            if layout.is_sealed_log(path.name):
                path.unlink(missing_ok=True)

    @staticmethod
    def remove(folder: Path) -> None:
        """The header first, so that a half removed folder is not taken for a whole one."""
        (folder / layout.SEGMENT).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def without_flag(beginning: bytes) -> bytes:
    """The beginning of a file as it is archived: without the in-use flag."""
    if len(beginning) < _FLAGGED:
        return beginning
    return clear_flag(beginning[:_FLAGGED]) + beginning[_FLAGGED:]


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- the index


def index_head(segment: str = "") -> bytes:
    """``segment``: the digest of the segment's description."""
    return (_encode({"format": INDEX_FORMAT, **({"segment": segment} if segment else {})}) + "\n").encode()


def recorded_digest(index: bytes) -> str:
    """What the first line of a part says of the segment's description; "" where it says nothing. Raises
    DamagedError."""
    try:
        return str(json.loads(index[: index.find(b"\n") + 1]).get("segment", ""))
    except (ValueError, AttributeError) as error:
        raise _no_index(1, str(error)) from None


class IndexLines:
    """Writes the lines of an index. Many transactions have the same changes, and on MariaDB all of a second the same
    moment: as long as these are the same objects, their text is made once."""

    def __init__(self) -> None:
        self._changes: dict[int, tuple[tuple[Change, ...], str]] = {}
        self._at: tuple[datetime | None, str] = None, ""

    def line(self, transaction: Transaction) -> bytes:
        """One line of JSON that ends with a line end: what an encoder makes of ``Transaction.as_json``, in a quarter of
        the time."""
        changes, at = transaction.changes, transaction.at
        known = self._changes.get(id(changes))
        if known is None or known[0] is not changes:
            known = self._known(changes)
        if self._at[0] is not at:
            self._at = at, format_time(at)
        said = ""
        if transaction.statement or transaction.state or transaction.xid:
            said = "".join(
                f',"{name}":{_quoted(value)}'
                for name, value in (
                    ("statement", transaction.statement),
                    ("state", transaction.state),
                    ("xid", transaction.xid),
                )
                if value
            )
        line = (
            f'{{"gtid":{_quoted(transaction.gtid)},"start":{transaction.start},"end":{transaction.end},'
            f'"at":"{self._at[1]}","precise":{"true" if transaction.precise else "false"},'
            f'"server_id":{transaction.server_id},"changes":[{known[1]}]{said}}}\n'
        )
        return line.encode("utf-8", "surrogatepass")

    def _known(self, changes: tuple[Change, ...]) -> tuple[tuple[Change, ...], str]:
        if len(self._changes) > _KNOWN:
            self._changes.clear()
        text = ",".join([f'[{_quoted(one.schema)},{_quoted(one.name)},"{one.kind}",{one.rows}]' for one in changes])
        if len(changes) <= _FEW:
            self._changes[id(changes)] = changes, text
        return changes, text


def decode_index(lines: Iterable[bytes]) -> Iterator[Transaction]:
    """Raises DamagedError for another format and for lines that are not what they should be."""
    for number, line in enumerate(lines, 1):
        try:
            document = json.loads(line)
            if number == 1:
                if document["format"] != INDEX_FORMAT:
                    raise _no_index(number, f"format {document['format']!r}, not {INDEX_FORMAT!r}")
                continue
            transaction = Transaction.from_json(document)
        except (ValueError, KeyError, TypeError) as error:
            raise _no_index(number, f"{type(error).__name__}: {error}") from None
        yield transaction


def decode_places(part: bytes) -> Iterator[tuple[str, int, int]]:
    """GTID, start and end of each transaction in a part of an index. Raises as ``decode_index`` does."""
    found = _PLACE.findall(part)
    if len(found) == part.count(b"\n") - 1 and part.endswith(b"\n"):
        list(decode_index([part[: part.index(b"\n")]]))  # its head
        yield from ((gtid.decode("ascii"), int(start), int(end)) for gtid, start, end in found)
        return
    for one in decode_index(part.splitlines(keepends=True)):
        yield one.gtid, one.start, one.end


def _no_index(number: int, why: str) -> DamagedError:
    return DamagedError(
        "the index of a binary log cannot be read",
        [f"line {number}: {why}"],
        hint="the binary logs may be intact and can be replayed without the index: check them with `backupd fsck`",
    )
