"""Where a restore reads, and everything that forbids it before the first byte moves.

The manifests of a chain, each from the first destination where it is good, and the pins. A manifest is data from
elsewhere, judged, not obeyed: are its paths fit to be written below a folder?

Parts of what is read may have to be thawed first (``ThawWait``). A part is a backup of the chain, by its id, or the
binary logs (``LOGS`` of the model). The base is read while what comes after it is still being thawed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from backupd.engine.physical.capture import PhysicalTool
from backupd.engine.physical.datafiles import LINK_SUFFIX
from backupd.engine.toolset import NO_PATHS, physical_tool, server_program
from backupd.model.backup_record import BackupKind
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    DamagedError,
    DestinationError,
    NotFoundError,
    RefusedError,
    ToolError,
    ToolMissingError,
)
from backupd.model.job import Report
from backupd.model.manifest import Body, BodyFacts, Entry, Header
from backupd.model.server_facts import ServerInfo, Tool
from backupd.model.text import format_size
from backupd.process.run_context import RunContext
from backupd.transfer.leases import Pin
from backupd.transfer.records.encryption import Unsealer
from backupd.transfer.records.manifests import load_body, load_header
from restore.datadir.occupancy import Need, measure, refuse_full, refuse_non_empty, refuse_too_small
from restore.datadir.staging import Site, fits
from storage.destination import Destination

T = TypeVar("T")
_TRIES = 3
_SHOWN = 20


class ThawWait:
    """As it is, everything is read at once, and what is archived is refused. Every method of one that waits may ask
    destinations, and raises DestinationError when nothing can come of waiting."""

    def is_open(self, part: str) -> bool:  # noqa: ARG002  of one that waits
        """Can it be read now?"""
        return True

    def wait(self, part: str, report: Report, cancelled: Callable[[], bool]) -> None:
        """Return when it can be read. Raises CancelledError."""

    def reopen(self, part: str) -> bool:  # noqa: ARG002  of one that waits
        """Something of it could not be read, because it is archived (again): ask for it. False where nothing is asked
        for: nobody wants to pay for that."""
        return False


NO_THAW_WAIT = ThawWait()


def read_when_thawed(thaw: ThawWait, part: str, read: Callable[[], T], context: RunContext) -> T:
    """What ``read`` gives, once the part can be read; again when a thawed copy went away meanwhile. ``read`` goes on
    where it stopped. The time of waiting belongs to no phase."""
    for _ in range(_TRIES):
        with context.watch.waiting():
            thaw.wait(part, context.report, context.is_cancelled)
        try:
            return read()
        except ArchivedError:
            with context.watch.waiting():
                if not thaw.reopen(part):
                    raise
    with context.watch.waiting():
        thaw.wait(part, context.report, context.is_cancelled)
    return read()


@dataclass(frozen=True, slots=True)
class Sources:
    """What a restore reads from. ``destinations`` in the order to try them; ``archives``: those that may hold binary
    logs; ``thaw`` is waited for before anything is read."""

    destinations: Sequence[Destination]
    unsealer: Unsealer
    archives: Sequence[Destination] = ()
    thaw: ThawWait = NO_THAW_WAIT


def check_entries(header: Header, body: Body) -> None:
    """Refuse a manifest that contradicts itself or would write outside its folder. Raises DamagedError, all
    named."""
    known = {stored.name for stored in header.objects}
    problems = [*_hostile(body.entries), *_doubled(body.entries)]
    for entry in body.entries:
        missing = [name for name in entry.objects if name not in known]
        if missing:
            problems.append(f"{entry.path!r}: object {missing[0]} is not in the manifest's list")
        if not entry.bundle and sum(part.size for part in entry.parts) != entry.size:
            problems.append(f"{entry.path!r}: its parts do not add up to its {entry.size} bytes")
        if len(entry.parts) == 1 and entry.parts[0].sha256 != entry.sha256:
            problems.append(f"{entry.path!r}: its digest differs from that of its only part")
    if problems:
        raise DamagedError(
            f"backup {header.backup_id} cannot be restored: {len(problems)} impossible entries",
            problems,
            hint="nothing was written; restore from another backup or another destination's copy",
        )


def _hostile(entries: Iterable[Entry]) -> list[str]:
    problems = []
    for entry in entries:
        components = entry.path.split("/")
        if "\0" in entry.path or any(component in ("", ".", "..") for component in components):
            problems.append(f"{entry.path!r}: would be written outside its folder")
        elif any(len(os.fsencode(component)) > 255 for component in components):
            problems.append(f"{entry.path!r}: a name longer than 255 bytes")
    return problems


def _doubled(entries: Sequence[Entry]) -> list[str]:
    files = Counter(entry.path for entry in entries)
    twice = [f"{path!r}: listed twice" for path, times in files.items() if times > 1]
    both = [(path, folder) for path in files for folder in folders_above(path) if folder in files]
    return [*twice, *(f"{path!r}: {folder!r} is a file and a folder at once" for path, folder in both)]


def folders_above(path: str) -> Iterator[str]:
    """Of a path in a manifest, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def check_collisions(entries: Iterable[Entry], folder: Path) -> None:
    """Names that differ only by case cannot live on every file system. Raises RefusedError naming the pairs.

    ``folder`` exists and is writable; a probe file is made in it and removed.
    """
    if is_case_sensitive(folder):
        return
    pairs = colliding(entry.path for entry in entries)
    if pairs:
        raise RefusedError(
            f"{folder} ignores case, but {len(pairs)} pairs of names differ only by case",
            detail="\n".join(f"{one!r} and {other!r}" for one, other in pairs[:_SHOWN]),
            hint="restore onto a file system that is case-sensitive, as the source's was",
        )


def colliding(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of files, or of folders, that are one and the same where case does not count."""
    seen: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for path in paths:
        for whole in (path, *folders_above(path)):
            folded = unicodedata.normalize("NFC", whole).casefold()
            other = seen.setdefault(folded, whole)
            if other != whole and (other, whole) not in pairs:
                pairs.append((other, whole))
    return pairs


def is_case_sensitive(folder: Path) -> bool:
    """Does the file system of ``folder`` distinguish upper from lower case? Tried with a file that is removed again."""
    with tempfile.NamedTemporaryFile(prefix=".backupd-case-probe-", dir=folder) as probe:
        path = Path(probe.name)
        return not path.with_name(path.name.upper()).exists()


@dataclass(frozen=True, slots=True)
class Loaded:
    """One backup of the chain, its entries judged. ``whole``: where ``header`` and ``body`` are cut down to a part of
    the files, the body of them all."""

    header: Header
    body: Body
    whole: Body | None = None

    def cut(self, wanted: Callable[[Entry], bool]) -> Loaded:
        """The part with the entries that are ``wanted``, and the statistics of that part."""
        entries = tuple(entry for entry in self.body.entries if wanted(entry))
        names = {name for entry in entries for name in entry.objects}
        objects = tuple(stored for stored in self.header.objects if stored.name in names)
        stats = replace(
            self.header.stats,
            bytes_source=sum(entry.size for entry in entries),
            bytes_stored=sum(stored.size for stored in objects),
            files=len(entries),
        )
        return Loaded(
            replace(self.header, stats=stats, objects=objects),
            replace(self.body, entries=entries),
            self.whole or self.body,
        )


def load_chain(server: str, chain: Sequence[str], sources: Sources) -> tuple[tuple[Loaded, ...], tuple[str, ...]]:
    """The manifests of ``chain`` (full backup first) and what there is to say about copies that could not be used.

    Raises DamagedError naming every bad copy when none is good, and everything that makes these backups no chain;
    NotFoundError, DestinationError, and KeyUnusableError when the private key for the backup is not here.
    """
    loaded: list[Loaded] = []
    warnings: list[str] = []
    missing: list[str] = []
    for backup_id in chain:
        try:
            found, said = _load(server, backup_id, sources)
        except NotFoundError as error:
            if len(chain) == 1:
                raise
            missing.append(error.line)
            continue
        check_entries(found.header, found.body)
        loaded.append(found)
        warnings += said
    broken = missing or _broken_links(loaded)
    if broken:
        raise DamagedError(
            f"the chain of backup {chain[-1]} is incomplete: nothing was fetched",
            broken,
            hint="restore a backup before the break (`backupd backups` lists them), or restore the missing objects",
        )
    return tuple(loaded), tuple(warnings)


def load_dump(server: str, backup_id: str, sources: Sources) -> tuple[Loaded, tuple[str, ...]]:
    """The manifest of a logical backup, and what there is to say about copies that could not be used. Raises as
    ``load_chain`` does."""
    loaded, said = _load(server, backup_id, sources)
    check_entries(loaded.header, loaded.body)
    header, facts = loaded.header, loaded.body.facts
    if header.kind != BackupKind.LOGICAL or facts.dump is None:
        raise RefusedError(
            f"backup {backup_id} is a {header.kind} backup, not a logical one", hint="`backupd backups` lists the kinds"
        )
    if (header.parent, header.from_lsn, header.to_lsn, header.server_uuid) != _sealed(loaded) or (
        header.table_set,
        header.tables_missing,
    ) != (facts.dump.table_set, len(facts.dump.failed)):
        raise DamagedError(
            f"the manifest of backup {backup_id} is incomplete",
            [f"{backup_id}: its clear manifest is not the one that was sealed with it"],
            hint="restore another backup, or restore its manifest from another source",
        )
    return loaded, tuple(said)


def _broken_links(chain: Sequence[Loaded]) -> list[str]:
    """What speaks against these backups being one chain in this order, by their manifests alone."""
    wrong: list[str] = []
    for previous, this in zip((None, *chain), chain, strict=False):
        header, facts = this.header, this.body.facts
        name = header.backup_id
        if (header.parent, header.from_lsn, header.to_lsn, header.server_uuid) != _sealed(this):
            wrong.append(f"{name}: its clear manifest is not the one that was sealed with it")
        kind = BackupKind.PHYSICAL_FULL if previous is None else BackupKind.PHYSICAL_INCREMENTAL
        if header.kind != kind:
            wrong.append(f"{name} is a {header.kind} backup where a {kind} one belongs")
        if previous is None:
            if header.parent is not None:
                wrong.append(f"{name}, the first of the chain, builds on {header.parent}")
            continue
        before = previous.header
        if header.parent != before.backup_id:
            wrong.append(f"{name} builds on {header.parent}, not on {before.backup_id}")
        if header.from_lsn != before.to_lsn:
            wrong.append(f"{name} begins at {header.from_lsn}, {before.backup_id} ends at {before.to_lsn}")
        if header.server_uuid and before.server_uuid and header.server_uuid != before.server_uuid:
            wrong.append(f"{name} is of server {header.server_uuid}, {before.backup_id} of {before.server_uuid}")
        if _series(this) != _series(previous):
            wrong.append(f"{name} is of {_series(this)}, {before.backup_id} of {_series(previous)}")
        if facts.tool.name != previous.body.facts.tool.name:
            wrong.append(
                f"{name} was taken with {facts.tool.name}, {before.backup_id} with {previous.body.facts.tool.name}"
            )
        if facts.receipts.last_lsn < previous.body.facts.receipts.last_lsn:
            wrong.append(f"{name} ends before {before.backup_id} does")
    return wrong


def _sealed(loaded: Loaded) -> tuple[str | None, int, int, str]:
    facts = loaded.body.facts
    return facts.parent, facts.receipts.from_lsn, facts.receipts.to_lsn, facts.server.server_uuid


def _series(loaded: Loaded) -> str:
    server = loaded.body.facts.server
    return f"{server.flavour} {server.version.series}"


def _load(server: str, backup_id: str, sources: Sources) -> tuple[Loaded, list[str]]:
    failures: list[BackupdError] = []
    for destination in sources.destinations:
        try:
            header = load_header(destination, server, backup_id)
            body = load_body(destination, header, sources.unsealer)
        except (DamagedError, DestinationError, NotFoundError) as error:
            failures.append(error)
            continue
        return Loaded(header, body), [error.line for error in failures]
    damages = [line for error in failures if isinstance(error, DamagedError) for line in error.damages]
    if damages:
        others = [error.line for error in failures if not isinstance(error, DamagedError)]
        raise DamagedError(
            f"no good copy of the manifest of backup {backup_id} was found",
            damages + others,
            hint="restore another backup; `backupd verify` lists all damage",
        )
    raise failures[0] if failures else NotFoundError(f"no destination is configured for backup {backup_id}")


@contextlib.contextmanager
def pinned(
    sources: Sources, restore_id: str, server: str, chain: Sequence[str], context: RunContext
) -> Iterator[tuple[str, ...]]:
    """Keep the backups from being swept away wherever they are read, at each destination those that it has; yields
    warnings.

    A destination that cannot be written (a read-only copy after a disaster) is read without a pin. Raises
    NotFoundError or RefusedError when one of the backups is at no destination any more.
    """
    backups = [(server, backup_id) for backup_id in chain]
    warnings: list[str] = []
    lacking: dict[tuple[str, str], list[BackupdError]] = {backup: [] for backup in backups}
    with contextlib.ExitStack() as pins:
        for destination in sources.destinations:
            pin = Pin(destination, restore_id, backups, clock=context.clock, some=True)
            try:
                with contextlib.suppress(NotFoundError, RefusedError):  # none of them: ``absent`` names each
                    pins.enter_context(pin)
            except DestinationError as error:
                warnings.append(f"not pinned at {destination.name}: {error.line}")
                continue
            for backup, trouble in pin.absent.items():
                lacking[backup].append(trouble)
        for errors in lacking.values():
            if errors and len(errors) == len(sources.destinations):
                raise errors[0]
        yield (*warnings, *dict.fromkeys(error.line for errors in lacking.values() for error in errors))


_REDO = ("ib_logfile*", "xtrabackup_logfile")


@dataclass(frozen=True, slots=True)
class Programs:
    """What this host has for the backup's server. ``server`` is None when nothing has to be started and no server
    program is installed."""

    tool: PhysicalTool
    server: Tool | None

    @property
    def needed_server(self) -> Tool:
        """Raises ToolMissingError without one."""
        if self.server is None:
            raise ToolMissingError("no server program was found", hint="install the database server on this host")
        return self.server


def find_programs(facts: BodyFacts, *, start: bool, paths: Mapping[str, str] = NO_PATHS) -> Programs:
    """The kind of tool that made the backup, and the server program, of the backup's own series.

    Raises ToolMissingError, and RefusedError where a program of another series is installed: it would not
    understand the files, or silently upgrade them.
    """
    info = facts.server
    try:
        tool = physical_tool(info, paths=paths, made_by=facts.tool)
        try:
            server = server_program(info.flavour, info.version, paths=paths)
        except ToolMissingError:
            if start:
                raise
            server = None
    except ToolMissingError:
        raise
    except ToolError as error:
        raise RefusedError(error.message, detail=error.detail, hint=error.hint) from error
    return Programs(tool, server)


def need_of(chain: Sequence[Loaded]) -> Need:
    """The room that restoring ``chain`` takes."""
    info = chain[-1].body.facts.server
    redo_applied = sum(entry.size for loaded in chain for entry in loaded.body.entries if fits(entry.path, _REDO))
    return measure(
        [(loaded.body.entries, {item.name: item for item in loaded.header.objects}) for loaded in chain],
        redo_applied=redo_applied,
        redo_log=_redo_log(info.variables),
    )


def _redo_log(variables: Mapping[str, str]) -> int:
    """Bytes of redo log that a server with these settings makes at its first start."""

    def number(name: str, default: int) -> int:
        text = variables.get(name, "")
        return int(text) if text.isdigit() else default

    if "innodb_redo_log_capacity" in variables:
        return number("innodb_redo_log_capacity", 0)
    return number("innodb_log_file_size", 96 * 1024 * 1024) * number("innodb_log_files_in_group", 1)


def refuse_no_room(chain: Sequence[Loaded], site: Site) -> tuple[str, ...]:
    """Raises RefusedError for too little room or names that collide there; gives warnings.

    What an earlier attempt has fetched already is not needed again.
    """
    folder = next(f for f in (site.folder, *site.folder.parents) if f.exists())
    for loaded in chain:
        check_collisions(loaded.body.entries, folder)
    warnings = refuse_too_small(need_of(chain), folder, there=present(site.folder))
    outside = _outside_bytes(chain)
    if outside and not site.store.is_dir():
        refuse_non_empty(site.final_store)
    if site.inside:
        hint = "free some space there: a server allows no DATA DIRECTORY inside its data directory"
        what = f"the tablespaces with a DATA DIRECTORY, which go to {site.final_store}"
        refuse_full(site.datadir.parent, outside, what, hint=hint)
    return warnings


def _outside_bytes(chain: Sequence[Loaded]) -> int:
    """Most bytes of the tablespaces that lay outside the source's data directory: those with a link file."""
    whole: dict[str, int] = {}
    changed = 0
    for loaded in chain:
        sizes = {entry.path: entry.size for entry in loaded.body.entries}
        for link in (path.removesuffix(LINK_SUFFIX) for path in sizes if path.endswith(LINK_SUFFIX)):
            size = sizes.get(f"{link}.ibd", 0) + sizes.get(f"{link}.new", 0)
            whole[link] = max(whole.get(link, 0), size)
            changed += sizes.get(f"{link}.ibd.delta", 0)
    return sum(whole.values()) + changed


def refuse_over_limit(chain: Sequence[Loaded], limit: int) -> None:
    """Raises RefusedError when a throw-away copy would take more than ``limit`` bytes."""
    need = need_of(chain)
    if need.least_bytes > limit:
        raise RefusedError(
            f"a test restore of this backup needs {format_size(need.bytes)}; allowed are {format_size(limit)}",
            detail=need.describe(),
            hint="raise restore.scratch.max_bytes in the configuration",
        )


def present(folder: Path) -> tuple[int, int]:
    """Bytes and inodes that the files below ``folder`` take."""
    size = files = 0
    for root, _folders, names in os.walk(folder):
        for name in names:
            size += Path(root, name).lstat().st_blocks * 512
            files += 1
    return size, files


def remarks(info: ServerInfo) -> tuple[str, ...]:
    """What an operator should know about a server before it is restored."""
    found: list[str] = []
    if info.encrypted:
        found.append(
            f"{len(info.encrypted)} encrypted tablespaces: without the source's key management plugin and its "
            "keys on this host neither prepare nor the server can open them"
        )
    if info.external:
        inside = sorted({path.kind for path in info.external if path.kind != "tablespace"})
        beside = sum(path.kind == "tablespace" for path in info.external)
        notes = [f"{beside} tablespaces go to <datadir>.external beside the new data directory"] if beside else []
        if inside:
            notes.append(f"what is {', '.join(inside)} goes inside the new data directory")
        found.append(f"{len(info.external)} paths of the source were outside its data directory: " + "; ".join(notes))
    return tuple(found)
