"""Do manifests, objects, trees, intents and catalog agree? Each thing that must hold has a name.

    manifest-intact         every manifest reads back exactly as it was written
    body-present            sealed body, unpack script and runbook of each backup are there, in their size
    objects-present         so is every object that a manifest names
    parent-present          what an increment builds on is here, too, and not marked deleted unless the increment is
    tree-matches-manifest   the tree of each backup shows exactly its objects (TREE destinations)
    no-orphan-object        no object, tombstone, mark or keep without a backup, and no file of strangers among them
    no-partial-tree         no tree or side file of a backup that was never committed
    no-stale-intent         no intent whose owner is gone
    no-stale-pin            no pin, and no lease of a removal, whose owner is gone
    segment-intact          every segment of a binary log and every branch reads back exactly as it was written
    segment-present         every sealed part and index of a segment is there, in its size
    segment-has-branch      the branch of every segment is described here
    no-orphan-segment-part  no part without its segment, and no file of strangers among the binary logs
    no-temporary-file       nothing left of puts that never ended
    catalog-has-backup      the catalog knows every backup
    backup-has-manifest     every backup that the catalog expects here is here
    catalog-has-segment     the catalog knows every segment and branch (asked by the application)
    segment-is-stored       every segment that the catalog expects here is here (asked by the application)
    catalog-intact          the catalog's database finds nothing wrong with itself (asked by the application)
    mark-matches-catalog    what is marked deleted here is deleted in the catalog (asked by the application)
    marker-intact           the marker of the destination is as it was written (asked by the application)
    recover-text-current    RECOVER.md is there and describes what is beside it (likewise)
    stock-matches-copies    what is kept of a server's copies at a destination is what they say (likewise)
    standing-matches-rows   no status row of a server says more than its sources (likewise)
    one-server-of-a-name    all backups under a server's name are of a server that was backed up here (likewise)

This looks at names and sizes; whether the bytes are still those that were stored is the business of ``verify``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial

from backupd.model.document import Document
from backupd.model.errors import DamagedError, DestinationError, ObjectMissingError
from backupd.model.manifest import Body, Header, StoredObject
from backupd.model.text import Clock
from backupd.transfer import log_segments
from backupd.transfer.collection import References, collect, entombed, expecting, orphans, pooled, unfinished
from backupd.transfer.deletion import marks
from backupd.transfer.holds_and_locks import Backup, kept_at
from backupd.transfer.leases import Alive, intents, is_alive, living_intents, pins, sweeps
from backupd.transfer.log_segments import strays
from backupd.transfer.records.manifests import committed
from backupd.transfer.scrub_and_repair import tree_digest
from storage import layout
from storage.destination import Destination, ObjectInfo, TreeDestination, as_tree


class Invariant(StrEnum):
    """What must hold at a destination, by the names that reports use; the head of this module explains each."""

    MANIFEST_INTACT = "manifest-intact"
    BODY_PRESENT = "body-present"
    OBJECTS_PRESENT = "objects-present"
    PARENT_PRESENT = "parent-present"
    TREE_MATCHES_MANIFEST = "tree-matches-manifest"
    NO_ORPHAN_OBJECT = "no-orphan-object"
    NO_PARTIAL_TREE = "no-partial-tree"
    NO_STALE_INTENT = "no-stale-intent"
    NO_STALE_PIN = "no-stale-pin"
    SEGMENT_INTACT = "segment-intact"
    SEGMENT_PRESENT = "segment-present"
    SEGMENT_HAS_BRANCH = "segment-has-branch"
    NO_ORPHAN_SEGMENT_PART = "no-orphan-segment-part"
    NO_TEMPORARY_FILE = "no-temporary-file"
    CATALOG_HAS_BACKUP = "catalog-has-backup"
    BACKUP_HAS_MANIFEST = "backup-has-manifest"
    CATALOG_HAS_SEGMENT = "catalog-has-segment"
    SEGMENT_IS_STORED = "segment-is-stored"
    CATALOG_INTACT = "catalog-intact"
    MARK_MATCHES_CATALOG = "mark-matches-catalog"
    MARKER_INTACT = "marker-intact"
    RECOVER_CURRENT = "recover-text-current"
    STOCK_MATCHES_COPIES = "stock-matches-copies"
    STANDING_MATCHES_ROWS = "standing-matches-rows"
    ONE_SERVER_OF_A_NAME = "one-server-of-a-name"


@dataclass(frozen=True, slots=True)
class Finding(Document):
    """A broken invariant. ``repairable``: a repair can mend it without any other copy.

    The application's repair mends ``catalog-has-backup``, since it has the catalog; all others ``repair`` does here.
    """

    invariant: Invariant
    subject: str
    message: str
    repairable: bool = False


@dataclass(frozen=True, slots=True)
class Repair:
    """What ``repair`` mended, and what is still broken."""

    mended: tuple[Finding, ...]
    left: tuple[Finding, ...]


ReadBody = Callable[[Header], Body]
"""Opens the sealed body of a backup; needs a private key."""


@dataclass(slots=True)
class _View:
    """One consistent enough look: candidates for garbage, then intents, then manifests (see ``collect``)."""

    destination: Destination
    trees: list[str]
    sides: list[ObjectInfo]
    pool: dict[str, ObjectInfo]
    tombs: list[str]
    references: References = field(default_factory=References)
    headers: list[Header] = field(default_factory=list)


def examine(
    destination: Destination,
    catalog: Collection[Backup] | None,
    *,
    clock: Clock,
    read_body: ReadBody | None = None,
    alive: Alive = is_alive,
) -> list[Finding]:
    """Every broken invariant; empty when all hold. Changes nothing, and may run beside backups and restores.

    ``catalog``: the backups that a catalog expects here; None: do not compare with any. ``read_body`` allows to compare
    and mend trees path by path; without it, trees are compared as sets of objects.
    """
    findings = [
        Finding(Invariant.NO_TEMPORARY_FILE, name, "left by a write whose process is gone", repairable=True)
        for name in destination.leftovers()
    ]
    trees, sides = unfinished(destination)
    pool, strangers = pooled(destination)
    tombs, more = entombed(destination)
    view = _View(destination, trees, sides, pool=pool, tombs=[layout.name_in(info.key) for info in tombs])
    findings += [
        Finding(Invariant.NO_ORPHAN_OBJECT, key, "not a file of backupd; remove it by hand")
        for key in [*strangers, *more]
    ]
    now = clock()
    findings += [
        Finding(invariant, lease.id, f"its {work} is no longer running", repairable=True)
        for invariant, leases, work in (
            (Invariant.NO_STALE_INTENT, intents, "backup"),
            (Invariant.NO_STALE_PIN, pins, "restore"),
            (Invariant.NO_STALE_PIN, sweeps, "removal"),
        )
        for lease in leases(destination)
        if not alive(lease, now)
    ]
    running = living_intents(destination, now, alive)
    busy = {backup for lease in running for backup in lease.backups}

    for found in committed(destination):
        view.references.add(found)
        if isinstance(found.header, Header):
            view.headers.append(found.header)
        else:
            findings.append(Finding(Invariant.MANIFEST_INTACT, found.backup_id, found.header.detail))
    blind = bool(view.references.damaged or set(catalog or ()) - view.references.backups - set(marks(destination)))
    words = "no backup names this object" + (", as far as the manifests can be read" if blind else "")
    findings += [
        Finding(Invariant.NO_ORPHAN_OBJECT, name, words, repairable=not blind)
        for name in orphans(view.pool, view.references, running)
    ]
    findings += _forgotten(view, waiting=bool(running), blind=blind)
    findings += _unfinished(view, busy | set(catalog or ()))
    for header in view.headers:
        findings += _sides(view, header)
        findings += _objects(view, header)
    findings += _parents(view)
    findings += _trees(view, read_body)
    findings += _logs(destination, now)
    if catalog is not None:
        findings += _catalog(view, catalog, busy)
    return findings


def repair(
    destination: Destination,
    catalog: Collection[Backup] | None,
    *,
    clock: Clock,
    read_body: ReadBody | None = None,
    alive: Alive = is_alive,
    dying: Collection[Backup] = (),
) -> Repair:
    """Mend what can be mended at this destination alone. Never deletes a committed backup or touches a living run.
    ``dying``: as with ``collect``.

    Removes the garbage of dead runs, unnamed objects and leftovers; with ``read_body``, shows wrong trees afresh.
    """
    before = examine(destination, catalog, clock=clock, read_body=read_body, alive=alive)
    wrong = {item.subject for item in before if item.invariant is Invariant.TREE_MATCHES_MANIFEST and item.repairable}
    collect(destination, clock=clock, alive=alive, expected=expecting(catalog or ()), dying=dying)
    tree = as_tree(destination)
    if wrong and tree is not None and read_body is not None:
        for found in committed(destination):
            if isinstance(found.header, Header) and found.backup_id in wrong:
                _rebuild(tree, found.header, read_body(found.header))
    left = examine(destination, catalog, clock=clock, read_body=read_body, alive=alive)
    remaining = {(item.invariant, item.subject) for item in left}
    mended = tuple(item for item in before if (item.invariant, item.subject) not in remaining)
    return Repair(mended=mended, left=tuple(left))


def _forgotten(view: _View, *, waiting: bool, blind: bool) -> Iterator[Finding]:
    """Tombstones, marks and keeps that are about nothing. While a backup runs, a tombstone may still have to wait."""
    for name in view.tombs:
        if name not in view.pool and not waiting:
            yield Finding(
                Invariant.NO_ORPHAN_OBJECT, name, "a tombstone of an object that is gone", repairable=not blind
            )
    for server, backup_id in sorted(set(marks(view.destination)) - view.references.backups):
        yield Finding(
            Invariant.NO_ORPHAN_OBJECT, backup_id, f"a mark of a backup of {server} that is gone", repairable=True
        )
    for server, backup_id in sorted(kept_at(view.destination).backups - view.references.backups):
        yield Finding(
            Invariant.NO_ORPHAN_OBJECT, backup_id, f"a backup of {server} is kept here that is gone", repairable=True
        )


def _unfinished(view: _View, busy: set[tuple[str, str]]) -> Iterator[Finding]:
    gone = [*view.trees, *(info.key for info in view.sides)]
    dying = set(marks(view.destination)) if gone else set()
    for subject in gone:
        owner = layout.backup_of(subject)
        if owner is not None and owner not in busy and owner not in view.references.backups:
            # A removal takes the mark last.
            why = "whose removal was interrupted" if owner in dying else "that was never committed"
            yield Finding(Invariant.NO_PARTIAL_TREE, subject, f"belongs to a backup {why}", repairable=True)


def _sides(view: _View, header: Header) -> Iterator[Finding]:
    folder = layout.backup_folder(header.server, header.backup_id)
    for item in header.side_files:
        key = folder + item.name
        try:
            size = view.destination.stat(key).size
        except DestinationError as error:
            yield Finding(Invariant.BODY_PRESENT, key, error.message)
            continue
        if size != item.size:
            yield Finding(Invariant.BODY_PRESENT, key, f"holds {size} bytes where {item.size} were stored")


def _objects(view: _View, header: Header) -> Iterator[Finding]:
    for item in header.objects:
        info = view.pool.get(item.name) or _look(view.destination, item)
        if info is None:
            problem = "is missing"
        elif info.size != item.size:
            problem = f"holds {info.size} bytes where {item.size} were stored"
        else:
            continue
        yield Finding(Invariant.OBJECTS_PRESENT, item.name, f"an object of {header.backup_id} {problem}")


def _parents(view: _View) -> Iterator[Finding]:
    dying = set(marks(view.destination))
    for header in view.headers:
        if header.parent is None:
            continue
        parent = (header.server, header.parent)
        if parent not in view.references.backups:
            problem = "is not here: it cannot be restored from this destination"
        elif parent in dying and (header.server, header.backup_id) not in dying:
            problem = f"is marked deleted; `backupd backups undelete {header.parent}` while there is time"
        else:
            continue
        yield Finding(Invariant.PARENT_PRESENT, header.backup_id, f"an increment on {header.parent}, which {problem}")


def _look(destination: Destination, item: StoredObject) -> ObjectInfo | None:
    """The object itself, since a backup may have been committed after the pool was listed."""
    try:
        return destination.stat(layout.object_key(item.name))
    except DestinationError:
        return None


def _trees(view: _View, read_body: ReadBody | None) -> Iterator[Finding]:
    tree = as_tree(view.destination)
    if tree is None:
        return
    inodes: dict[str, tuple[int, int]] = {}
    for name in view.references.names & view.pool.keys():
        with contextlib.suppress(ObjectMissingError):
            inodes[name] = tree.identity(layout.object_key(name))
    for header in view.headers:
        comparison = _Comparison(tree, header, inodes)
        if read_body is None:
            problem = comparison.of_sets()
        else:
            try:
                problem = comparison.of_paths(dict(layout.tree_links(read_body(header).entries)))
            except DamagedError as error:
                yield Finding(Invariant.BODY_PRESENT, header.backup_id, error.detail)
                continue
        if problem:
            yield Finding(Invariant.TREE_MATCHES_MANIFEST, header.backup_id, problem, repairable=read_body is not None)


def _logs(destination: Destination, now: datetime) -> Iterator[Finding]:
    left = strays(destination, now=now)
    for info in left.parts:
        yield Finding(
            Invariant.NO_ORPHAN_SEGMENT_PART,
            info.key,
            "a part of a binary log whose upload was interrupted",
            repairable=True,
        )
    for key in left.strangers:
        yield Finding(Invariant.NO_ORPHAN_SEGMENT_PART, key, "not a file of backupd; remove it by hand")
    described: set[tuple[str, str]] = set()
    for branch in log_segments.branches(destination):
        if isinstance(branch, DamagedError):
            yield Finding(Invariant.SEGMENT_INTACT, branch.message, branch.detail)
        else:
            described.add((branch.server, branch.id))
    nameless: set[tuple[str, str]] = set()
    for found in log_segments.headers(destination):
        if isinstance(found, log_segments.DamagedSegment):
            yield Finding(Invariant.SEGMENT_INTACT, layout.segment_key(found.server, found.key), found.error.detail)
            continue
        nameless.add((found.segment.server, found.segment.branch))
        for key, problem in log_segments.absent(destination, found):
            yield Finding(Invariant.SEGMENT_PRESENT, key, f"of binary log {found.segment.file} {problem}")
    for server, name in sorted(nameless - described):
        yield Finding(
            Invariant.SEGMENT_HAS_BRANCH,
            layout.branch_key(server, name),
            "is missing or cannot be read: so it is unknown how these binary logs continue earlier ones",
        )


class _Comparison:
    """Of one backup's tree with its manifest. Answers are what is wrong, or ""; objects that are gone are not asked.

    A file with an inode of its own may be right all the same: the pool got a fresh copy when links ran out.
    """

    def __init__(self, tree: TreeDestination, header: Header, inodes: dict[str, tuple[int, int]]) -> None:
        name = layout.tree_name(header.server, header.backup_id)
        self._objects = {item.name: item for item in header.objects if item.name in inodes}
        self._inodes = inodes
        self._shown = dict(tree.tree_files(name))
        self._digest = partial(tree_digest, tree, name)

    def of_sets(self) -> str:
        """Without the body nobody knows which path is which object: each object has one, and no other file is."""
        if self._objects and not self._shown:
            return "there is no tree"
        names = {self._inodes[name]: name for name in self._objects}
        seen = {names[inode] for inode in self._shown.values() if inode in names}
        hidden = {item.sha256: name for name, item in self._objects.items() if name not in seen}
        strange = [
            path
            for path, inode in self._shown.items()
            if inode not in names and hidden.pop(self._digest(path), None) is None
        ]
        return _problem(strange, "holds a file that is not an object of this backup") or _problem(
            sorted(hidden.values()), "is not shown"
        )

    def of_paths(self, links: dict[str, str]) -> str:
        strange = sorted(set(self._shown) - set(links))
        wrong = [
            path
            for path, name in links.items()
            if name in self._objects
            and self._shown.get(path) != self._inodes[name]
            and (path not in self._shown or self._digest(path) != self._objects[name].sha256)
        ]
        return _problem(strange, "is not part of this backup") or _problem(wrong, "is missing or shows something else")


def _problem(subjects: list[str], what: str) -> str:
    if not subjects:
        return ""
    more = f" (and {len(subjects) - 1} more)" if len(subjects) > 1 else ""
    return f"{subjects[0]}{more} {what}"


def _rebuild(tree: TreeDestination, header: Header, body: Body) -> None:
    name = layout.tree_name(header.server, header.backup_id)
    for path, object_name in layout.tree_links(body.entries):
        tree.link(layout.object_key(object_name), name, path)
    tree.publish(name)


def _catalog(view: _View, catalog: Collection[Backup], busy: set[tuple[str, str]]) -> Iterator[Finding]:
    expected = set(catalog or ())
    dying = set(marks(view.destination))
    # Between its commit and its row in the catalog a running backup is in neither wrong.
    unread = {name for _server, name in view.references.damaged}  # reported already, and taken in by nobody
    for server, backup_id in sorted(
        one for one in view.references.backups - expected - dying - busy if one[1] not in unread
    ):
        yield Finding(
            Invariant.CATALOG_HAS_BACKUP,
            backup_id,
            f"the catalog does not know this backup of {server}; `backupd fsck --repair` imports it",
            repairable=True,
        )
    for server, backup_id in sorted(expected - view.references.backups):
        yield Finding(
            Invariant.BACKUP_HAS_MANIFEST,
            backup_id,
            f"the catalog expects this backup of {server}, but destination {view.destination.name} has no "
            "manifest of it; until that is resolved no object is removed there. Check that all of it is mounted. From "
            f"another destination `backupd verify {server}` restores a single manifest, `backupd replicate {server} "
            f"--to {view.destination.name}` whole backups; `backupd backups delete {backup_id}` removes it from the "
            "catalog",
        )
