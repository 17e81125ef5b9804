"""Reading binary logs of both families once, from their first byte to their last, in bounded memory.

What is promised to callers is here: ``scan`` and its values. Below it: ``events`` (framing, checksums, compression,
GTIDs), ``transactions`` (what belongs together), ``changes`` (rows), ``statements``. ``conflicts`` tells whether a
transaction can be left out.

The index of a segment is one line of JSON that names the format, then one line for each transaction. It is stored in
parts, each of which begins with such a line. That of the last part also has the digest of the clear description that
belongs to it, since version 2 of that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import BinaryIO

from backupd.engine.binlog.changes import RowWatch
from backupd.engine.binlog.events import FLAGS_AT, IN_USE, Frames, read_format
from backupd.engine.binlog.transactions import Assembler
from backupd.model.binlog import INDEX_FORMAT, Ending, Transaction
from backupd.model.document import Document
from backupd.model.errors import DamagedError, StreamError


@dataclass(frozen=True, slots=True)
class ScanContext(Document):
    """All that a later scan needs to go on at byte ``end`` of the same file. JSON-able; nothing else is kept."""

    flavour: str
    server_version: str
    checksum: str
    first_event_at: datetime
    in_use: bool
    gtids: str
    end: int
    ending: Ending = Ending.OPEN
    next_file: str = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """What bytes ``[start, end)`` of a binary log hold. ``end`` never lies inside a transaction: it is a safe cut.

    ``flavour``: ``mariadb`` or ``mysql`` (Percona Server's logs are MySQL's). ``checksum``: ``crc32`` or ``none``.
    ``tail``: bytes that were read behind ``end``: an event or a transaction that is not complete yet. ``ending``: by
    the last event, OPEN while the file is marked as in use, CUT when it is not and has neither Rotate nor Stop.
    ``next_file``: of the Rotate event. ``server_ids``: of all events. ``precise``: were all commit times exact?
    ``remarks``: what makes recovery through it doubtful. ``context``: to go on at ``end``.
    """

    flavour: str
    server_version: str
    checksum: str
    first_event_at: datetime
    in_use: bool
    start: int
    end: int
    tail: int
    gtids_before: str
    gtids_after: str
    transactions: int
    first_at: datetime | None
    last_at: datetime | None
    precise: bool
    server_ids: tuple[int, ...]
    remarks: tuple[str, ...]
    ending: Ending
    next_file: str
    context: ScanContext


def scan(
    stream: BinaryIO,
    *,
    start: int = 0,
    context: ScanContext | None = None,
    stop: int | None = None,
    on_transaction: Callable[[Transaction], None] | None = None,
    watch: RowWatch | None = None,
) -> Scan:
    """Read a binary log to the stream's end, or to byte ``stop`` of the file (a growing file's safe size).

    ``stream`` stands at byte ``start`` of the file and is only read forward. ``start`` is 0, or the ``end`` of an
    earlier scan of the same file, whose ``context`` is then given. Every complete transaction is handed over in log
    order. An event that the stream's end cuts is no error: it lies behind ``end``. Raises DamagedError, naming the
    offset, for a wrong checksum, a broken event, and a file that is encrypted; StreamError when the stream is shorter
    than a file's first event. ``watch``: sees row images (of what may turn out to be incomplete, too).
    """
    if (0 if context is None else context.end) != start:
        raise ValueError(f"a scan from byte {start} needs the context of a scan that ended there")
    fresh = None
    if context is None:
        fresh = read_format(stream)
        context = ScanContext(
            "mariadb" if fresh.mariadb else "mysql",
            fresh.server_version,
            "crc32" if fresh.checksums else "none",
            fresh.at,
            fresh.in_use,
            "",
            fresh.end,
        )
    if stop is not None and stop < context.end:
        raise StreamError(f"a binary log cannot be read to byte {stop} from byte {context.end}")
    found = Assembler(
        mariadb=context.flavour == "mariadb",
        gtids=context.gtids,
        end=context.end,
        ending=context.ending,
        next_file=context.next_file,
        on_transaction=on_transaction,
        watch=watch,
    )
    if fresh is not None:
        found.server_ids.add(fresh.server_id)
    frames = Frames(
        stream, context.end, checksums=context.checksum == "crc32", limit=None if stop is None else stop - context.end
    )
    found.run(frames)
    open_end = Ending.OPEN if context.in_use else Ending.CUT
    return Scan(
        flavour=context.flavour,
        server_version=context.server_version,
        checksum=context.checksum,
        first_event_at=context.first_event_at,
        in_use=context.in_use,
        start=start,
        end=found.end,
        tail=context.end + frames.read - found.end,
        gtids_before=context.gtids if found.gtids_before is None else found.gtids_before,
        gtids_after=found.gtids,
        transactions=found.transactions,
        first_at=found.first_at,
        last_at=found.last_at,
        precise=found.precise,
        server_ids=tuple(sorted(found.server_ids)),
        remarks=tuple(found.remarks),
        ending=open_end if found.ending is Ending.OPEN else found.ending,
        next_file=found.next_file,
        context=replace(context, gtids=found.gtids, end=found.end, ending=found.ending, next_file=found.next_file),
    )


def clear_flag(first_bytes: bytes) -> bytes:
    """The beginning of a whole file (22 bytes or more) with its in-use flag cleared, as the archive keeps it."""
    if len(first_bytes) <= FLAGS_AT:
        raise ValueError(f"the flag is in byte {FLAGS_AT}; these are {len(first_bytes)} bytes")
    cleared = first_bytes[FLAGS_AT] & ~IN_USE
    return first_bytes[:FLAGS_AT] + bytes((cleared,)) + first_bytes[FLAGS_AT + 1 :]


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


def index_head(segment: str = "") -> bytes:
    """``segment``: the digest of the segment's description."""
    return (_encode({"format": INDEX_FORMAT, **({"segment": segment} if segment else {})}) + "\n").encode()


def segment_told(index: bytes) -> str:
    """What the first line of a part tells of the segment's description; "" where it tells nothing. Raises
    DamagedError."""
    try:
        return str(json.loads(index[: index.find(b"\n") + 1]).get("segment", ""))
    except (ValueError, AttributeError) as error:
        raise _broken(1, str(error)) from None


def index_line(transaction: Transaction) -> bytes:
    """One line of JSON that ends with a line end."""
    return (_encode(transaction.as_json()) + "\n").encode("utf-8", "surrogatepass")


def decode_index(lines: Iterable[bytes]) -> Iterator[Transaction]:
    """Raises DamagedError for another format and for lines that are not what they should be."""
    for number, line in enumerate(lines, 1):
        try:
            document = json.loads(line)
            if number == 1:
                if document["format"] != INDEX_FORMAT:
                    raise _broken(number, f"format {document['format']!r}, not {INDEX_FORMAT!r}")
                continue
            transaction = Transaction.from_json(document)
        except (ValueError, KeyError, TypeError) as error:
            raise _broken(number, f"{type(error).__name__}: {error}") from None
        yield transaction


def _broken(number: int, why: str) -> DamagedError:
    return DamagedError(
        "the index of a binary log cannot be read",
        [f"line {number}: {why}"],
        hint="the logs themselves may be whole: backupd fsck tells; they can be replayed without it",
    )
