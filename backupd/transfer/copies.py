"""Copying finished backups and archived binary logs to another destination, as they are stored. Needs no private key.

As with a backup, the intent comes first and the manifest last; nothing that a kill leaves is a backup, and the copy
that goes on later sends only what is not there. While it copies, a pin keeps the backup at its sources. Bytes are
compared with the manifest as they pass; what is damaged at one source is read from the next.

Where the target shows trees, and nobody can open the body for its paths, the tree shows each object by its name.

As when they were stored first, a segment's parts and index come before its ``segment.json``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from backupd.model.binlog import Branch, SegmentKey
from backupd.model.errors import (
    BackupdError,
    BusyError,
    CancelledError,
    DamagedError,
    DestinationError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.job import Report
from backupd.model.manifest import Header, StoredObject
from backupd.model.text import Clock
from backupd.transfer import log_segments as segments
from backupd.transfer.dedup import missing, unusable_objects
from backupd.transfer.holds_and_locks import is_marked, lengthen_all
from backupd.transfer.leases import Intent, Pin
from backupd.transfer.records.manifests import decode_of, put_bytes
from backupd.transfer.records.segment_documents import SegmentHeader, decode_branch
from backupd.transfer.relay import PAUSES, Check, Document, Meter, Relay
from storage import layout, objects
from storage.destination import Destination, as_tree, exists

WORKERS = 3
"""Objects that are on their way at once; each has a buffer of one MiB, besides what the drivers take."""
_BY_NAME = "objects"

TreePaths = Callable[[Header], Iterable[tuple[str, str]] | None]
"""(path in the tree, object name) of everything that the tree of a backup shows; None where nobody can open its body.
"""


@dataclass(frozen=True, slots=True)
class Copied:
    """A backup that was copied. ``sent`` bytes of ``objects`` new ones; ``present``: how many the target held already.
    ``remarks``: what was found wrong at sources on the way; ``stored``: keys of what was sent."""

    header: Header
    sent: int
    objects: int
    present: int
    seconds: float
    remarks: tuple[str, ...] = ()
    stored: frozenset[str] = frozenset()

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.sent / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be copied. ``above``: ids of everything that the backup builds on, which has to be at the target.
    ``run_id``: names the pins. ``fence`` is called right before the manifest is put."""

    server: str
    backup_id: str
    run_id: str
    above: tuple[str, ...] = ()
    workers: int = WORKERS
    pauses: Sequence[float] = PAUSES
    fence: Check = lambda: None
    tree_paths: TreePaths | None = None


def replicate(
    sources: Sequence[Destination], target: Destination, order: Order, *, clock: Clock, report: Report, check: Check
) -> Copied | None:
    """Copy the backup from ``sources``, asked in their order, to ``target``. None when it is there already.

    Raises NotFoundError or RefusedError (no source holds it unmarked, or it is marked deleted at the target, or
    something it builds on is not there), DamagedError when no source has the true bytes of something, DestinationError,
    BusyError while the target is about to remove something of it.
    """
    server, backup_id = order.server, order.backup_id
    if exists(target, layout.manifest_key(server, backup_id)):
        return None
    if is_marked(target, server, backup_id):
        raise RefusedError(f"backup {backup_id} of {server} is marked deleted at destination {target.name}")
    with ExitStack() as stack:
        pinned = stack.enter_context(_pinned(sources, order, clock))
        try:
            intent = stack.enter_context(Intent([target], server, backup_id, parents=order.above, clock=clock))
        except RefusedError as error:
            raise RefusedError(
                f"backup {backup_id} cannot be copied to {target.name} without its parent backup",
                detail=error.detail,
                hint="the parent is copied first: repeat the command",
            ) from error
        return _Copy(pinned, target, order, intent, report, check).run(clock())


@contextmanager
def _pinned(sources: Sequence[Destination], order: Order, clock: Clock) -> Iterator[list[Destination]]:
    """The sources that hold the backup, pinned; one that cannot be written is read without a pin, after the others."""
    backup = (order.server, order.backup_id)
    usable: list[Destination] = []
    unpinned: list[Destination] = []
    failures: list[BackupdError] = []
    with ExitStack() as pins:
        for source in sources:
            try:
                pins.enter_context(Pin(source, order.run_id, [backup], clock=clock))
                usable.append(source)
            except (NotFoundError, RefusedError) as error:
                failures.append(error)
            except DestinationError as error:
                failures.append(error)
                unpinned.append(source)
        if not usable and not unpinned:
            nowhere = f"no destination that can be reached holds backup {order.backup_id} of {order.server}"
            raise failures[0] if failures else NotFoundError(nowhere)
        yield usable + unpinned


class _Copy:
    """One backup on its way."""

    def __init__(
        self,
        sources: Sequence[Destination],
        target: Destination,
        order: Order,
        intent: Intent,
        report: Report,
        check: Check,
    ) -> None:
        self._target, self._order, self._intent, self._check = target, order, intent, check
        self._meter = Meter(report, "replicate", note=f"to {target.name}")
        self._relay = Relay(sources, target, check=self._may_go_on, moved=self._meter.add, pauses=order.pauses)
        self._stop = threading.Event()
        self._begun = time.monotonic()

    def run(self, since: datetime) -> Copied:
        document, header = self._manifest()
        self._meter.total = sum(item.size for item in (*header.objects, *header.side_files))
        self._meter.files_total = len(header.objects)
        self._objects(header, self._damaged(header))
        folder = layout.backup_folder(header.server, header.backup_id)
        for stored in header.side_files:
            self._relay.bring(folder + stored.name, stored)
        self._tree(header)
        self._confirm(header)
        lengthen_all(self._target, header, self._order.above, since, stored=self._relay.stored)
        self._commit(document, header)
        tally, seconds = self._relay.tally, time.monotonic() - self._begun
        remarks, new = self._relay.remarks, self._relay.stored
        return Copied(header, tally.sent, tally.things, tally.present, seconds, remarks, new)

    def _damaged(self, header: Header) -> frozenset[str]:
        """Names of objects that are known to be damaged at the target. Raises BusyError while somebody is about to
        remove some that are needed."""
        dying, damaged = unusable_objects(self._target)
        if leaving := [item.name for item in header.objects if item.name in dying]:
            raise BusyError(
                f"destination {self._target.name} is removing {len(leaving)} objects that backup {header.backup_id} "
                "needs",
                detail="\n".join(leaving[:20]),
                hint="backupd copies them again after their removal, and retries automatically",
            )
        return damaged

    def _confirm(self, header: Header) -> None:
        """Look once more, marks of removals first: who finds none, and then the object, has seen it before any."""
        damaged = self._damaged(header)
        bad = [item.name for item in header.objects if item.name in damaged]
        if gone := [*bad, *missing(self._target, header.objects)]:
            raise DestinationError(
                f"{len(gone)} objects vanished from destination {self._target.name} while backup "
                f"{header.backup_id} was copied there",
                detail="\n".join(gone[:20]),
                hint="backupd retries and sends the missing objects again",
            )

    def _manifest(self) -> tuple[Document, Header]:
        """The first good one."""
        order = self._order

        def decode(raw: bytes, where: str) -> Header:
            header = decode_of(raw, where, order.server, order.backup_id)
            if header.parent is not None and header.parent not in order.above:
                raise RefusedError(
                    f"backup {order.backup_id} builds on {header.parent}, and no record shows that backup at "
                    f"{self._target.name}",
                    hint="`backupd fsck --repair` brings the catalog up to date",
                )
            return header

        message = f"no good copy of the manifest of backup {order.backup_id} was found"
        return self._relay.first_good(layout.manifest_key(order.server, order.backup_id), decode, message)

    def _objects(self, header: Header, damaged: frozenset[str]) -> None:
        absent = {*missing(self._target, header.objects), *damaged}
        names = iter(header.objects)
        lock = threading.Lock()

        def work() -> None:
            try:
                while not self._stop.is_set():
                    with lock:
                        item = next(names, None)
                    if item is None:
                        return
                    self._object(item, absent=item.name in absent, damaged=item.name in damaged)
            except BaseException:
                self._stop.set()
                raise

        with ThreadPoolExecutor(max_workers=self._order.workers, thread_name_prefix="replicate") as pool:
            futures = [pool.submit(work) for _ in range(self._order.workers)]
            try:
                errors = [error for future in futures if (error := future.exception()) is not None]
            finally:
                self._stop.set()  # also for an interrupt of this thread, which waits for the others now
        self._stop.clear()
        # Whoever was merely stopped by another's failure says nothing.
        for error in errors:
            if not isinstance(error, _StoppedError):
                raise error

    def _object(self, item: StoredObject, *, absent: bool, damaged: bool) -> None:
        if absent:
            self._relay.send(layout.object_key(item.name), item)
        else:
            self._relay.pass_over(item)
        if damaged:
            objects.release(self._target, item.name)
        self._meter.add(0, 1)

    def _may_go_on(self) -> None:
        if self._stop.is_set():
            raise _StoppedError("stopped with the others")
        self._check()

    def _tree(self, header: Header) -> None:
        tree = as_tree(self._target)
        if tree is None or not header.objects:
            return
        name = layout.tree_name(header.server, header.backup_id)
        tree.remove_tree(name)
        for path, object_name in self._paths(header):
            self._check()
            tree.link(layout.object_key(object_name), name, path)
        tree.publish(name)

    def _paths(self, header: Header) -> Iterable[tuple[str, str]]:
        known = self._order.tree_paths(header) if self._order.tree_paths is not None else None
        if known is not None:
            return known
        return ((f"{_BY_NAME}/{item.name}{layout.SEALED}", item.name) for item in header.objects)

    def _commit(self, document: Document, header: Header) -> None:
        """As a backup does: held before it, and still held after it."""
        key = layout.manifest_key(header.server, header.backup_id)
        self._intent.assert_held()
        self._order.fence()
        self._relay.put(document)
        try:
            self._intent.assert_held()
        except BackupdError as error:
            try:
                self._target.delete(key)
            except DestinationError as trouble:
                error.add_note(f"{key} could not be withdrawn at {self._target.name}: {trouble.message}")
            raise


def copy_signature(relay: Relay, key: str) -> None:
    """Put the signature of the document ``key``, where a source has one; it comes before what it signs."""
    for document in relay.documents(key):
        if document.signature is not None:
            put_bytes(relay.target, layout.signature_key(key), document.signature)
        return


class _StoppedError(CancelledError):
    """Another thread of the same copy has failed."""


_FRESH = timedelta(hours=1)
"""Parts of an interrupted copy that are older are put again, lest somebody is just clearing them away."""


def copy_branch(relay: Relay, branch: Branch) -> None:
    """Describe ``branch`` at the target with the bytes of a source. Raises DamagedError, DestinationError."""

    def decode(raw: bytes, where: str) -> Branch:
        found = decode_branch(raw, where=where)
        if (found.server, found.id) != (branch.server, branch.id):
            raise DamagedError(f"{where} is damaged", [f"{where}: it describes {found.id} of {found.server}"])
        return found

    message = f"no destination describes branch {branch.id} of {branch.server} in its original form"
    document, _branch = relay.first_good(layout.branch_key(branch.server, branch.id), decode, message)
    if not relay.holds(document):
        relay.put(document)


def copy_segment(relay: Relay, server: str, key: SegmentKey, *, clock: Clock) -> SegmentHeader:
    """Store one segment at the target; its header as it is there afterwards.

    Raises NotFoundError when no source has it (any more), SegmentConflictError when the target holds another one in its
    destination, DamagedError, DestinationError.
    """
    document, header = good_copy(relay, server, key)
    present = segments.kept_header(relay.target, header)
    if present is not None and (present.parts, present.index) != (header.parts, header.index):
        return present  # the same bytes, sealed another time
    if present != header:
        # What is committed there stays in place while its end becomes known.
        there = segments.elsewhere(relay.target, header) if present is None else {}
        for item in sorted(header.sealed, key=lambda one: one.sha256 in there):  # see ``segments.put``
            key_there, name = there.get(item.sha256), header.folder + item.name
            if key_there is not None and segments.is_copied(relay.target, key_there, name, item):
                relay.pass_over(item)
            else:
                _bring(relay, name, item, clock())
        relay.put(document)
    if gone := segments.absent(relay.target, header):
        raise objects.not_kept(
            relay.target,
            "\n".join(f"{name} {problem}" for name, problem in gone),
            "check the storage and its log; backupd retries",
        )
    return header


def good_copy(relay: Relay, server: str, key: SegmentKey) -> tuple[Document, SegmentHeader]:
    """The first description of a segment at a source that can be read. Raises NotFoundError, DamagedError,
    DestinationError."""
    what = f"binary log {key.number} of {server}, bytes {key.start} to {key.end}"
    missing = NotFoundError(f"no destination that can be reached holds {what}")
    message = f"no good copy of {what}, was found"
    decode = partial(segments.decode_of, server=server, key=key)
    return relay.first_good(layout.segment_key(server, key), decode, message, missing)


def _bring(relay: Relay, key: str, item: StoredObject, now: datetime) -> None:
    try:
        fresh = abs(now - relay.target.stat(key).modified_at) < _FRESH
    except ObjectMissingError:
        fresh = False
    if fresh:
        relay.bring(key, item)
    else:
        relay.send(key, item)
