"""What every use case is based on: settings, catalog, destinations, keys. Opened once, closed once.

What opens destinations and keys is imported where that is done: a command that only reads the catalog needs none of it.

One run of a job, as the code that does the work sees it.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO, TypedDict, TypeVar, Unpack

from backupd.alerts.conditions import NOTHING, Condition, Key, Settled
from backupd.app.context.incidents import Incidents
from backupd.app.context.settings import ServerSettings, Settings, spool_unusable
from backupd.catalog.session import Catalog, catalog_name, is_there, open_catalog
from backupd.model.errors import (
    BackupdError,
    BusyError,
    CancelledError,
    CatalogError,
    DestinationError,
    KeyUnusableError,
    RefusedError,
)
from backupd.model.event import Event, Severity
from backupd.model.job import HOST, JobRecord, Report, silent
from backupd.model.proof import Phase
from backupd.model.text import Clock
from backupd.process.run_context import DEFAULT_MEMORY, RunContext, Stopwatch, utc_now
from backupd.process.runtime import passable_directory

if TYPE_CHECKING:
    from backupd.transfer.records.encryption import Unsealer
    from backupd.transfer.records.keyring import KeyInfo
    from restore.tables.restore import Confirm
    from storage.destination import Destination


GRACE = timedelta(days=1)
"""How long a deleted backup can be undeleted."""
REMOVAL_SECONDS = 600.0
"""How long whoever wants to remove backups waits for another one that does."""
_LOOK_SECONDS = 0.2
_WORKER = "worker-"
_HOST_ID = "host.id"
"""File in the spool: who this host is, whatever it is called."""
_LONGEST = 64
"""Characters of a host's name."""


def owner(worker: int | None = None) -> str:
    """This process, as jobs name the one that runs them: ``host boot namespace pid start``; with the number of one of
    its workers where that claimed the job and has not handed it over yet."""
    from backupd.transfer.leases import Owner

    here = Owner.current()
    process = f"{here.host} {here.boot} {here.namespace} {here.pid} {here.ticks}"
    return process if worker is None else f"{process} {_WORKER}{worker}"


def emptied(destination: str) -> RefusedError:
    """What to say where a destination holds backups by the catalog, and its folder is bare."""
    from backupd.backup.preflight import EMPTIED_HINT

    return RefusedError(
        f"destination {destination} should hold backups, but its folder is empty or not a repository",
        hint=EMPTIED_HINT,
    )


def host_name(settings: Settings) -> str:
    """``host`` of the configuration, else what the machine is called, without its domain."""
    return settings.configuration.host or socket.gethostname().partition(".")[0][:_LONGEST] or "localhost"


def host_identity(spool: Path) -> str:
    """32 hex digits, drawn when they are first asked for. Two at once read the same. Raises RefusedError."""
    path = spool / _HOST_ID
    try:
        if not path.exists():
            spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_name(f"{_HOST_ID}.{os.getpid()}.{secrets.token_hex(4)}")
            fresh.write_text(secrets.token_hex(16) + "\n")
            with suppress(FileExistsError):
                os.link(fresh, path)
            fresh.unlink()
        found = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(
            f"the identity of this host, {path}, cannot be read or made: {error}",
            hint=f"this user must be able to read {path} and to write into {spool}",
        ) from error
    if len(found) != 32:
        raise RefusedError(
            f"{path} does not hold the identity of a host: {len(found)} characters where 32 were expected",
            hint="move it away; the next start makes a new one, and the jobs that wait for this host go over to it",
        )
    return found


def user() -> str:
    """Who is asking, for the record: the login name behind sudo, or of this process."""
    try:
        return os.environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def owner_state(text: str) -> bool | None:
    """Is the process that ``owner`` named still there? None when it cannot be seen from here: another host or
    container."""
    if not text:
        return False
    from backupd.transfer.leases import Owner

    here = Owner.current()
    host, _, rest = text.partition(" ")
    boot, *fields = rest.split(" ")
    if fields and fields[-1].startswith(_WORKER):
        del fields[-1]
    if host != here.host or len(fields) not in (2, 3):
        return None
    if boot != here.boot:
        return False
    if len(fields) == 3 and fields[0] != here.namespace:
        return None
    try:
        stat = Path(f"/proc/{int(fields[-2])}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return stat[0] not in "ZX" and stat[19] == fields[-1]


def owner_is_alive(text: str) -> bool:
    """As ``owner_state``; what cannot be seen counts as alive."""
    return owner_state(text) is not False


class Opening(StrEnum):
    """What becomes of a catalog that is not there: who only ``reads`` is refused, who ``looks`` gets an empty one for
    as long as he looks, who ``works`` makes one where no destination holds backups already, and who ``makes`` one does.
    """

    READS = "reads"
    LOOKS = "looks"
    WORKS = "works"
    MAKES = "makes"


@contextmanager
def catalog_of(settings: Settings, opening: Opening, *, new: bool = False) -> Iterator[Catalog]:
    """The open catalog of an installation, brought up to date first. ``new``: to begin with an empty one beside backups
    that are there already is meant.

    Raises CatalogError, also where there is none; RefusedError where it would be or is empty, and backups are there.
    """
    with ExitStack() as stack:
        url = settings.catalog
        there = is_there(url)
        if not there and opening is Opening.READS:
            raise CatalogError(f"there is no catalog at {catalog_name(url)}", hint=absent_hint(settings))
        if not there and opening is Opening.LOOKS:
            url = f"sqlite:///{stack.enter_context(TemporaryDirectory(prefix='backupd-look-'))}/catalog.db"
        if not there and opening is Opening.WORKS and not new:
            _refuse_bare(settings)
        catalog = stack.enter_context(open_catalog(url))
        if opening is Opening.WORKS:
            if new:
                catalog.events.add(
                    Event(utc_now(), BEGUN, Severity.INFO, "an empty catalog was requested with --new-catalog")
                )
            elif there and is_bare(catalog):
                _refuse_bare(settings)
        yield catalog


BEGUN = "catalog-begun"


def is_bare(catalog: Catalog) -> bool:
    """Does it know no backup and no binary log, and nobody said that this is meant?"""
    return not (catalog.backups.servers() or catalog.binlogs.servers() or catalog.events.last("", (BEGUN,), ""))


def absent_hint(settings: Settings) -> str:
    """What to do about a catalog that is not there."""
    destinations = " or ".join(sorted(settings.destinations)) or "DESTINATION"
    return (
        f"is `catalog:` in {settings.file} right? The first backup and the service make a catalog; if backups are "
        f"stored already, `backupd catalog rebuild --from {destinations}` rebuilds it"
    )


def stored_already(settings: Settings) -> tuple[str, int, str] | None:
    """A destination that holds backups of servers of this configuration, how many, and of which servers; None where
    none does, as far as the destinations can be asked."""
    from backupd.app.context.trust import trusting
    from backupd.transfer.records.manifests import backup_ids
    from storage.registry import open_destination

    for name in settings.destinations:
        try:
            destination = trusting(settings, open_destination(name, settings.destination(name)))
            found = (
                [server for server, _id in backup_ids(destination) if server in settings.servers]
                if destination.is_initialised()
                else []
            )
        except BackupdError:
            continue  # a backup will say what is wrong with it
        if found:
            return name, len(found), ", ".join(sorted(set(found)))
    return None


def _refuse_bare(settings: Settings) -> None:
    if (found := stored_already(settings)) is not None:
        name, count, servers = found
        raise RefusedError(
            f"destination {name} holds {count} backup{'s' if count > 1 else ''} of {servers}, and the catalog "
            f"{catalog_name(settings.catalog)} knows none",
            hint=f"is `catalog:` in {settings.file} right? `backupd catalog rebuild --from {name}` imports them; to "
            "create an empty catalog anyway: --new-catalog",
        )


class Details(TypedDict, total=False):
    """What an alert says beside its message: see ``Condition``."""

    detail: str
    hint: str
    job_id: str


class About(Details, total=False):
    """What an event says beside its message: see ``Event``."""

    server: str
    subject: str


@dataclass(frozen=True)
class Wiring:
    """Settings and the open catalog, and what both lead to.."""

    settings: Settings
    catalog: Catalog
    clock: Clock = utc_now
    _opened: dict[str, Destination] = field(default_factory=dict, init=False, repr=False, compare=False)

    def destination(self, name: str) -> Destination:
        """A configured destination, the same one each time; touches nothing. What it gives of documents is compared
        with what the catalog knows of them, and then with their signatures. Raises NotFoundError."""
        if name not in self._opened:
            from backupd.app.context.trust import CatalogRecords, trusting
            from backupd.transfer.records.authenticity import RecordedDestination
            from storage.registry import open_destination

            opened = open_destination(name, self.settings.destination(name))
            recorded = RecordedDestination(opened, CatalogRecords(self.catalog, self.clock))
            self._opened[name] = trusting(self.settings, recorded)
        return self._opened[name]

    @cached_property
    def here(self) -> str:
        """What jobs of this host are addressed to."""
        return f"{HOST}{self.join(leads=False)}"

    def join(self, *, leads: bool) -> str:
        """The name of this host in the catalog, recorded where it is new; see ``Hosts.join``. It is the one that
        ``here`` gives from then on."""
        named = self.settings.configuration.host
        name, identity = host_name(self.settings), host_identity(self.settings.spool)
        joined = self.catalog.hosts.join(name, identity, self.clock(), named=named is not None, leads=leads)
        vars(self)["here"] = f"{HOST}{joined}"
        return joined

    def settle(self, *holds: Condition, looked: Mapping[Key, str] = NOTHING, job_id: str = "") -> Settled:
        """Record what a look found now (see ``alerts.conditions``). Raises CatalogError."""
        return Incidents(self.catalog).settle(self.clock(), *holds, looked=looked, job_id=job_id)

    def alert(self, key: Key, severity: Severity, message: str, **more: Unpack[Details]) -> Settled:
        """Record one condition that holds now. Raises CatalogError."""
        return self.settle(Condition(key, severity, message, **more))

    def note(self, kind: str, severity: Severity, message: str, **more: Unpack[About]) -> None:
        """Record an event of now. Raises CatalogError."""
        self.catalog.events.add(Event(self.clock(), kind, severity, message, **more))

    def of(self, servers: Collection[str]) -> Wiring:
        """The same, as if no others than these were configured. Destinations are opened once for both."""
        configured = {name: found for name, found in self.settings.servers.items() if name in servers}
        narrowed = self.settings.configuration.model_copy(update={"servers": configured})
        found = replace(self, settings=replace(self.settings, configuration=narrowed))
        object.__setattr__(found, "_opened", self._opened)  # it is frozen for everybody else
        return found

    def usable_destinations(self) -> list[Destination]:
        """Every configured destination that can be reached and was initialised."""
        return [found for found in self._looked_at() if found is not None and not isinstance(found, DestinationError)]

    def unreachable(self) -> dict[str, DestinationError]:
        """Configured destinations that do not answer, with why."""
        return {
            name: found
            for name, found in zip(self.settings.destinations, self._looked_at(), strict=True)
            if isinstance(found, DestinationError)
        }

    def _looked_at(self) -> list[Destination | DestinationError | None]:
        """Of each configured destination: itself, why it cannot be reached, or None where it was never initialised.
        All are asked at once: one that hangs takes its minute, not everybody's."""

        def look(name: str) -> Destination | DestinationError | None:
            try:
                destination = self.destination(name)
                return destination if destination.is_initialised() else None
            except DestinationError as error:
                return error

        with ThreadPoolExecutor(max_workers=16, thread_name_prefix="look") as pool:
            return list(pool.map(look, self.settings.destinations))

    def required(self, server: ServerSettings) -> tuple[Destination, ...]:
        """The destinations that must hold each backup of ``server``, initialised where this is the first one.

        Raises RefusedError when one holds backups by the catalog but its folder is bare: most likely it is not mounted.
        """
        opened = []
        for name in server.required:
            destination = self.destination(name)
            if not destination.is_initialised():
                if self.holds_backups(name):
                    raise emptied(name)
                destination.initialise(self.clock())
            opened.append(destination)
        return tuple(opened)

    def holds_backups(self, destination: str) -> bool:
        """Does the catalog know a copy at ``destination``?"""
        return self.catalog.backups.any_at(destination)

    def holds_anything(self, destination: str) -> bool:
        """By the catalog: backups or binary logs."""
        return self.holds_backups(destination) or self.catalog.binlogs.any_at(destination)

    def recipients(self) -> tuple[list[KeyInfo], tuple[str, ...]]:
        """The keys that backups are sealed for: (as found, full fingerprints). Raises KeyUnusableError with all
        problems at once."""
        from backupd.transfer.records.keyring import resolve_recipients

        encryption = self.settings.encryption
        found = resolve_recipients(encryption.gnupg_home, encryption.recipients, now=self.clock())
        problems = [f"{key.name}: {key.problem}" for key in found if key.problem]
        if problems:
            raise KeyUnusableError(
                f"{len(problems)} of {len(found)} encryption keys cannot be used",
                detail="\n".join(problems),
                hint=f"repair the keyring with gpg --homedir {encryption.gnupg_home}; "
                "`backupd check` shows the state of every key",
            )
        return found, tuple(key.fingerprint for key in found)

    def unsealer(self) -> Unsealer:
        """Raises ConfigurationError when this machine has no decryption key configured."""
        restore = self.settings.needs_restore()
        from backupd.transfer.records.encryption import Unsealer

        return Unsealer(restore.gnupg_home, restore.passphrase_file)

    def identity_key(self) -> bytes:
        """The secret of this installation that object names are computed with. Made where there is none."""
        from backupd.transfer.dedup import identity_key

        return identity_key(self.settings.spool / "identity.key")

    @contextmanager
    def locked(self, what: str, refusal: str, *, wait: float = 0.0) -> Iterator[None]:
        """Hold the lock ``what`` of this installation. When somebody else still holds it after ``wait`` seconds:
        BusyError with ``refusal``, naming the holder."""
        with self._lock(what, wait) as holder:
            if holder is not None:
                raise BusyError(
                    refusal,
                    detail=f"held by {holder or 'a process without a name'}",
                    hint="wait for it to end, then run the command again; if that process hangs, end it",
                )
            yield

    @contextmanager
    def _lock(self, what: str, wait: float) -> Iterator[str | None]:
        """Gives None once it is held, else who holds it."""
        folder = self.settings.spool / "locks"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (folder / what).open("a+", encoding="utf-8", errors="replace")
        except OSError as error:
            raise spool_unusable(self.settings.spool, error) from error
        with file:
            if _take(file, wait):
                _sign(file)
                yield None
            else:
                file.seek(0)
                yield file.read().strip()

    @contextmanager
    def removing(self, *, wait: bool = True) -> Iterator[bool]:
        """Only one process of this installation marks, unmarks or sweeps at a time; gives whether this one may.

        The others wait, and raise BusyError after ten minutes. With ``wait`` False nobody waits: they get False.
        """
        if wait:
            with self.locked(
                "removal",
                f"another process has held the removal lock for {REMOVAL_SECONDS:g} seconds",
                wait=REMOVAL_SECONDS,
            ):
                yield True
        else:
            with self._lock("removal", 0.0) as holder:
                yield holder is None

    @contextmanager
    def workdir(self, name: str) -> Iterator[Path]:
        """An empty folder for a tool's own needs, gone afterwards. Others pass through it to what is theirs."""
        from backupd.process.folders import PASSABLE  # what only reads runs no tool

        path = passable_directory() / name
        path.mkdir()
        path.chmod(PASSABLE)  # whatever the umask is
        try:
            yield path
        finally:
            shutil.rmtree(path)


def _take(file: TextIO, seconds: float) -> bool:
    """Lock the open ``file``, waiting up to ``seconds`` for it; False when it is still somebody else's."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        else:
            return True


def _sign(file: TextIO) -> None:
    """Write into a lock's file who holds it."""
    with suppress(OSError):  # a disk without room leaves the holder nameless, no more
        file.truncate(0)
        file.write(f"process {os.getpid()}, {' '.join(sys.argv)[:500]}\n")
        file.flush()


K = TypeVar("K")
V = TypeVar("V")


def gathered(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each name, both in the order of ``pairs``."""
    found: dict[K, list[V]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def worker_count(limit: int = 3) -> int:
    """Threads that seal or verify: one more than cores, since each waits for gpg and for the disk now and then, but
    bounded, since each holds a sealed part in memory."""
    return min(limit, len(os.sched_getaffinity(0)) + 1)


def names(destinations: Sequence[Destination]) -> str:
    """Destinations for a sentence: ``local, offsite``."""
    return ", ".join(destination.name for destination in destinations)


def _ours() -> None:
    """Nobody else could have taken the job."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """``report`` takes progress; ``cancel`` is set when the work should stop (pass it to pipelines, poll it in loops);
    ``fence`` raises RefusedError when the job is no longer this process's: call it right before anything is committed.
    ``log``: where tools may write what they print, redacted; None without a file. ``watched``: somebody waits in this
    process and sees how it ends. ``confirm``: asks that person before live tables are replaced; None where nobody can
    answer.
    """

    job: JobRecord
    report: Report = silent
    cancel: threading.Event = field(default_factory=threading.Event)
    fence: Callable[[], None] = _ours
    log: Path | None = None
    watched: bool = False
    confirm: Confirm | None = None

    def context(self, wiring: Wiring, on_phase: Callable[[Phase], None] = lambda _phase: None) -> RunContext:
        """What every step of the work is given."""
        return replace(run_context(wiring, self.report, on_phase), cancel=self.cancel, fence=self.fence, log=self.log)

    def check(self) -> None:
        """Raises CancelledError when somebody asked to stop."""
        if self.cancel.is_set():
            raise CancelledError(f"job {self.job.id} was cancelled")


def run_context(
    wiring: Wiring, report: Report = silent, on_phase: Callable[[Phase], None] = lambda _phase: None
) -> RunContext:
    """Of a run that nobody cancels, with the means of this installation."""
    settings = wiring.settings
    return RunContext(
        clock=wiring.clock,
        report=report,
        watch=Stopwatch(on_phase),
        programs=settings.programs,
        workers=worker_count(),
        memory=settings.restore.scratch.memory if settings.restore else DEFAULT_MEMORY,
        key_files=settings.restore.key_files if settings.restore else (),
        templates=settings.spool / "templates",
    )


@dataclass(frozen=True, slots=True)
class Result:
    """What a job came to. ``id`` of what it made; ``bytes`` of plaintext moved; ``phases`` for later estimates.

    ``problem``: the work was done to its end and found something bad (a backup that does not restore): the job failed,
    though nothing was raised. ``partial``: what it made is there and can be used, and the problem is what is missing
    in it; ``accepted``: the policy takes that for good enough, otherwise it is tried again. ``reported``: something
    else reports the problem, so that no event does. ``outcome``: what the work gave, for whoever waits for it in this
    process; nothing of it is recorded.
    """

    id: str = ""
    bytes: int = 0
    phases: tuple[Phase, ...] = ()
    problem: BackupdError | None = None
    partial: bool = False
    accepted: bool = False
    reported: bool = False
    outcome: Any = None
