"""A destination in a folder of another host, by SFTP.

A put is: temporary file, fsync, rename in place of what was there, fsync of the folder, the last as far as the server
can. What a kill or a lost connection leaves is a temporary file in ``.tmp`` that no listing shows. Nobody can tell from
here whether its writer lives, so it counts as left over when nothing was written to it for a day.

SFTP has no hard links that could be counted, so there are no trees. Memory: 4 MiB for each stream that is open.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import BinaryIO

from backupd.model.errors import DestinationError, DestinationFullError, ObjectMissingError, UnreachableError
from storage import layout
from storage.config import SftpConfig
from storage.destination import Capability, ObjectInfo, Space, new_marker, not_empty
from storage.folder import FOLDER_MODE, LINK_HINT, SourceFailedError, folders_of, read_source
from storage.sftp.session import ANSWER_SECONDS, SYNC_SECONDS, Download, Sessions, Upload
from storage.sftp.wire import DENIED, FAILURE, HARDLINK, MISSING, STATVFS, Attributes, LostError, StatusError, Wire

_TEMPORARY = ".tmp"
_ABANDONED_SECONDS = 86400
_SCARCE = 1 << 20
"""Free bytes below which a refused write is taken for a full disk: the protocol has no word for it."""

Listing = list[tuple[str, Attributes]]
_BUFFER = 256 * 1024
_FOLDERS_AT_ONCE = 8
"""Folders that are listed in one go, so that a listing of the pool does not take a way there and back for each."""


@dataclass(slots=True)
class Temporary:
    """A temporary file. Set ``kept`` once it was renamed to its final name."""

    path: str
    kept: bool = False


class SftpDestination:
    """Nothing is touched before the first call. ``seconds``: how long an answer of the server may take."""

    def __init__(self, name: str, config: SftpConfig, *, seconds: float = ANSWER_SECONDS) -> None:
        self.name = name
        self.root = config.path.rstrip("/")
        self._where = f"{config.user}@{config.host}:{self.root}"
        self._sessions = Sessions(name, config, seconds)
        self._tells_space = self._links = True
        self._user = config.user
        self._syncs_folders = True
        self._writing: set[str] = set()
        self._lock = threading.Lock()
        weakref.finalize(self, self._sessions.close)

    @property
    def capabilities(self) -> Capability:
        """SPACE, until a server shows that it does not know statvfs, and COPIES, likewise."""
        space = Capability.SPACE if self._tells_space else Capability.NONE
        return space | (Capability.COPIES if self._links else Capability.NONE)

    def close(self) -> None:
        """Close the connections that nobody uses; the next call makes new ones."""
        self._sessions.close()

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        """See ``Destination.put``: a temporary file, fsync, rename, and fsync of the folder where the server can."""
        target, doing = self._checked(key), f"writing {key}"
        try:
            with self._guard(doing), self._temporary() as temporary:
                found = self._upload(temporary, stream, doing)
                self._move(temporary, target, found)
                return _info(key, found)
        except SourceFailedError as failed:
            raise failed.error from None

    def duplicate(self, source: str, target: str) -> bool:
        """See ``CopyingDestination.duplicate``: a hard link, renamed to its final name; False for a server that makes
        none, or no more."""
        old, new = self._checked(source), self._checked(target)
        with self._guard(f"linking {target}", source), self._temporary() as temporary:
            if not self._sessions.run(lambda wire: self._link(wire, old, temporary.path)):
                return False
            self._move(temporary, new, self._sessions.run(lambda wire: wire.stat(old)))
            temporary.kept = False  # of two names of one file a rename removes none
        return True

    def _link(self, wire: Wire, old: str, new: str) -> bool:
        self._links = HARDLINK in wire.extensions
        if not self._links:
            return False
        wire.stat(old)  # a server says no more than that it failed
        self._make_all(wire, posixpath.dirname(new))
        return tolerating(FAILURE, lambda: wire.link(old, new))

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        """See ``Destination.get``. The stream goes on by itself on a new connection."""
        path, doing = self._checked(key), f"reading {key}"

        failed = partial(self._failure, doing=doing, key=key)
        with self._guard(doing, key):
            return io.BufferedReader(Download(self._sessions, path, offset, length, failed), _BUFFER)

    def stat(self, key: str) -> ObjectInfo:
        """See ``Destination.stat``."""
        path = self._checked(key)
        with self._guard(f"looking at {key}", key):
            return _info(key, self._sessions.run(lambda wire: wire.stat(path)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ``Destination.list``: several folders in one round trip. Raises DestinationError where a symbolic link is
        on the way."""
        doing = f"listing {prefix}"
        layout.check_prefix(prefix)
        above = prefix.rpartition("/")[0]
        self._require_way(above, doing)
        above = f"{above}/" if above else ""
        with self._guard(doing):
            yield from self._walk(above, self._listings([above])[0], prefix)

    def _walk(self, above: str, listing: Listing, prefix: str) -> Iterator[ObjectInfo]:
        # Keys sort as if a folder's name ended with its slash: "a.b" comes before "a/c".
        ours = ((above + name, found) for name, found in listing if name[0] != "." and not layout.in_tree(above + name))
        named = ((key + "/" if found.is_folder else key, found) for key, found in ours)
        shown = sorted(named, key=lambda pair: pair[0])
        wanted = [
            key
            for key, found in shown
            if found.is_folder
            and key.count("/") < layout.DEEPEST
            and (key.startswith(prefix) or prefix.startswith(key))
        ]
        for key, found in shown:
            if found.is_link and ((key + "/").startswith(prefix) or prefix.startswith(key + "/")):
                raise self._linked(key, f"listing {prefix}")
        listed: dict[str, Listing] = {}
        for key, found in shown:
            if found.is_file and key.startswith(prefix):
                yield _info(key, found)
            if wanted and key == wanted[0]:
                some, wanted = wanted[:_FOLDERS_AT_ONCE], wanted[_FOLDERS_AT_ONCE:]
                listed = dict(zip(some, self._listings(some), strict=True))
            if key in listed:
                yield from self._walk(key, listed.pop(key), prefix)

    def delete(self, key: str) -> None:
        """See ``Destination.delete``. On the disk afterwards as far as the server can, but for objects."""
        path, doing = self._checked(key), f"deleting {key}"

        def remove(wire: Wire) -> None:
            if not tolerating(MISSING, lambda: wire.remove(path)):
                self._check_marker(wire, doing)
            # The order of deletions is what keeps a power cut harmless (manifest before objects), and an object that
            # comes back is only garbage again: so objects alone go without waiting for the disk.
            elif not key.startswith(layout.OBJECTS):
                self._sync(wire, posixpath.dirname(path))
                self._prune(wire, posixpath.dirname(key))

        with self._guard(doing):
            self._sessions.run(remove)

    def space(self) -> Space | None:
        """What the server reports (statvfs@openssh.com), None where it does not know that."""
        with self._guard("asking for free space"):
            return self._space()

    def is_initialised(self) -> bool:
        """Is the marker in the folder?"""
        with self._guard(f"looking for {layout.REPOSITORY}"):
            return self._sessions.run(self._has_marker)

    def initialise(self, now: datetime) -> None:
        """See ``Destination.initialise``. Makes the folder, not its parent."""
        with self._guard("initialising"):
            if not self._sessions.run(self._prepare):
                return
            with self._temporary() as temporary:
                self._upload(temporary, io.BytesIO(new_marker(now, links=False)), "initialising")
                self._sessions.run(lambda wire: self._mark(wire, temporary))

    def leftovers(self) -> Iterator[str]:
        """Temporary files that nobody has written to for a day, by the server's clock."""
        with self._doing("looking for leftovers"):
            yield from self._abandoned()

    def clear_leftovers(self) -> int:
        """See ``Destination.clear_leftovers``."""

        def remove(wire: Wire, name: str) -> bool:
            return tolerating(MISSING, lambda: wire.remove(self._path(name)))

        with self._doing("clearing leftovers"):
            names = self._abandoned()
            return self._sessions.run(lambda wire: sum(remove(wire, name) for name in names))

    def _path(self, key: str) -> str:
        """``key`` as the server's file system knows it."""
        return posixpath.join(self.root, key)

    def _checked(self, key: str) -> str:
        layout.check_key(key)
        return self._path(key)

    def _listings(self, folders: Sequence[str]) -> Sequence[Listing]:
        """What is in folders, which are given as keys with their slash; nothing in one that does not exist."""
        paths = [self._path(folder).rstrip("/") for folder in folders]
        return [found or [] for found in self._sessions.run(lambda wire: wire.folders(paths))]

    def _space(self) -> Space | None:
        """What the server reports; None where it does not know statvfs. Raises StatusError, LostError."""

        def ask(wire: Wire) -> Space | None:
            self._tells_space = STATVFS in wire.extensions
            return wire.space(self.root) if self._tells_space else None

        return self._sessions.run(ask)

    # Errors

    @contextlib.contextmanager
    def _guard(self, doing: str, key: str = "") -> Iterator[None]:
        """Turn what a wire raises in the block into a DestinationError that says what ``doing`` (with ``key``)
        failed."""
        try:
            yield
        except (StatusError, LostError) as error:
            raise self._failure(error, doing, key) from error

    @contextlib.contextmanager
    def _doing(self, doing: str) -> Iterator[None]:
        """``_require`` and ``_guard``."""
        self._require(doing)
        with self._guard(doing):
            yield

    def _failure(self, error: StatusError | LostError, doing: str, key: str = "") -> DestinationError:
        """The DestinationError for ``error``, met while ``doing`` something: UnreachableError for a server that does
        not answer, DestinationFullError where there is no room. The destination's own absence is another thing than
        that of ``key``, and comes first."""
        if isinstance(error, LostError):
            kind, why = (
                (UnreachableError, "the server does not answer")
                if error.hangs
                else (DestinationError, "the connection was lost")
            )
            hint = "check the host and the network; backupd retries later"
            return kind(self._what(doing), detail=f"{why}: {error}", hint=hint)
        if error.code == DENIED:
            hint = (
                f"make {self.root} there, and all that is in it, writable for {self._user}, and check that its file "
                "system is not mounted read-only"
            )
            return self._failed(doing, str(error), hint)
        if error.code == FAILURE:
            return self._refused(error, doing)
        try:
            self._require(doing)
        except DestinationError as missing:
            return missing
        if key and error.code == MISSING:
            return ObjectMissingError(f"destination {self.name} ({self._where}) has no {key}")
        return self._failed(doing, str(error), "check that file there and the server's log")

    def _refused(self, error: StatusError, doing: str) -> DestinationError:
        """The server says no without a reason: a full disk is the usual one."""
        try:
            room = self._space()
        except (DestinationError, StatusError, LostError):
            room = None
        if room is not None and (room.free < _SCARCE or room.free_inodes == 0):
            return DestinationFullError(
                f"destination {self.name} ({self._where}) is full: {doing} failed",
                detail=f"{error}; {room.words}",
                hint="free space or run retention; nothing of this file was stored",
                destination=self.name,
            )
        hint = f"check the disk and the quota of {self._user} there, and the server's log"
        return self._failed(doing, f"{error} (the server gives no reason)", hint)

    def _failed(self, doing: str, detail: str, hint: str) -> DestinationError:
        return DestinationError(self._what(doing), detail=detail, hint=hint)

    def _what(self, doing: str) -> str:
        return f"destination {self.name} ({self._where}): {doing} failed"

    # The marker

    def _has_marker(self, wire: Wire) -> bool:
        """Is the marker in the folder? Raises StatusError, LostError."""
        return exists(wire, self._path(layout.REPOSITORY))

    def _require(self, doing: str) -> None:
        """Raises DestinationError unless the marker is there."""
        with self._guard(doing):
            self._sessions.run(lambda wire: self._check_marker(wire, doing))

    def _require_way(self, above: str, doing: str) -> None:
        """As ``require``, and raises DestinationError where a folder on the way to ``above`` is a symbolic link: it may
        lead nowhere, and would show that nothing is there."""
        folders = folders_of(above)
        with self._guard(doing):
            marker, *found = self._sessions.run(
                lambda wire: wire.looks([self._path(layout.REPOSITORY), *map(self._path, folders)])
            )
            if marker is None or marker.is_link:
                self._sessions.run(lambda wire: self._check_marker(wire, doing))
        for folder, one in zip(folders, found, strict=True):
            if one is not None and one.is_link:
                raise self._linked(folder, doing)

    def _linked(self, key: str, doing: str) -> DestinationError:
        """What to say of a symbolic link below the root, as ``Folder._linked`` does."""
        return self._failed(doing, f"{self._path(key)} is a symbolic link", LINK_HINT)

    def _check_marker(self, wire: Wire, doing: str) -> None:
        """Raises DestinationError unless the marker is there: an unmounted disk leaves an empty folder in its place."""
        if not self._has_marker(wire):
            hint = (
                f"check that the file system of {self.root} is mounted there; backupd never re-initializes a "
                "destination that was in use"
            )
            raise self._failed(doing, f"{layout.REPOSITORY} is not there", hint)

    def _mark(self, wire: Wire, temporary: Temporary) -> None:
        try:
            # It fails where there is one already, so of two first users one wins.
            wire.move_unless_there(temporary.path, self._path(layout.REPOSITORY))
        except StatusError:
            if not self._has_marker(wire):
                raise
        else:
            temporary.kept = True
            self._sync(wire, self.root)

    def _prepare(self, wire: Wire) -> bool:
        """Make the folder where it is missing; False when it is a destination already. Raises RefusedError."""
        if self._has_marker(wire):
            return False
        listing = wire.folders([self.root])[0]
        parent = posixpath.dirname(self.root)
        if listing is None:
            if not exists(wire, parent):
                raise DestinationError(
                    f"destination {self.name} ({self._where}): its folder has no parent",
                    detail=f"{parent} is not there",
                    hint=f"create {parent} there first",
                )
            self._make(wire, self.root)
        strangers = sorted(
            {name for name, _found in listing or ()} - {".", "..", "lost+found", _TEMPORARY, layout.REPOSITORY}
        )
        if strangers:
            raise not_empty(self._where, strangers, f"give destination {self.name} its own folder")
        self._make(wire, self._path(_TEMPORARY))
        return True

    # Temporary names

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Temporary]:
        """The name of a new temporary file; the file is removed at the end unless it was ``kept``."""
        name = secrets.token_hex(12)
        temporary = Temporary(self._path(f"{_TEMPORARY}/{name}"))
        with self._lock:
            self._writing.add(name)
        try:
            yield temporary
        finally:
            if not temporary.kept:
                # The caller has to know what went wrong before; what stays here is found as a leftover one day.
                with contextlib.suppress(DestinationError, LostError, StatusError):
                    self._sessions.run(lambda wire: wire.remove(temporary.path))
            with self._lock:
                self._writing.discard(name)

    def _upload(self, temporary: Temporary, stream: BinaryIO, doing: str) -> Attributes:
        """Everything that ``stream`` yields, durable. Raises DestinationError, SourceFailedError."""
        with self._guard(doing):  # here, and not when the file is gone: that a disk is full would not be seen any more
            try:
                upload = Upload(self._sessions, temporary.path)
            except StatusError as error:
                if error.code != MISSING:
                    raise
                self._sessions.run(lambda wire: self._make_all(wire, posixpath.dirname(temporary.path)))
                upload = Upload(self._sessions, temporary.path)
            sure = False
            try:
                while chunk := read_source(stream):
                    upload.write(chunk)
                return upload.finish()
            except (StatusError, SourceFailedError):
                sure = True
                raise
            finally:
                upload.give_up(sure=sure)

    def _move(self, temporary: Temporary, target: str, found: Attributes) -> None:
        """Give a complete temporary file its final name, durably. After a lost connection it may have it already."""
        tries = 0

        def move(wire: Wire) -> None:
            nonlocal tries
            tries += 1
            while True:
                try:
                    wire.move(temporary.path, target)
                except StatusError as error:
                    if error.code != MISSING:
                        raise
                    if not exists(wire, temporary.path):
                        if tries > 1 and wire.stat(target) == found:
                            break
                        raise
                    self._make_all(wire, posixpath.dirname(target))
                else:
                    break
            temporary.kept = True
            self._sync(wire, posixpath.dirname(target))

        self._sessions.run(move)

    def _abandoned(self) -> Sequence[str]:
        """Names of temporary files that nobody has written to for a day, by the server's own clock."""
        with self._lock:
            writing = set(self._writing)
        listing = self._listings([_TEMPORARY + "/"])[0]
        found = [(name, file) for name, file in listing if file.is_file and name not in writing]
        if not found:
            return []
        with self._temporary() as probe:
            now = self._upload(probe, io.BytesIO(b""), "asking for the time").modified
        return sorted(f"{_TEMPORARY}/{name}" for name, file in found if now - file.modified > _ABANDONED_SECONDS)

    # Durable steps

    def _make_all(self, wire: Wire, folder: str) -> None:
        """Make ``folder`` and what is missing between it and the root, which has to be a destination."""
        if folder == self.root:
            self._check_marker(wire, "making folders")
        elif not exists(wire, folder):
            self._make_all(wire, posixpath.dirname(folder))
            self._make(wire, folder)

    def _make(self, wire: Wire, folder: str) -> None:
        try:
            wire.make_folder(folder, FOLDER_MODE)
        except StatusError:
            if not exists(wire, folder):
                raise
        else:
            self._sync(wire, posixpath.dirname(folder))

    def _sync(self, wire: Wire, folder: str) -> None:
        """Make names in ``folder`` durable. The protocol knows no folders that are synced; OpenSSH does it, and a
        server that once refused is not asked again."""
        if not self._syncs_folders:
            return
        try:
            wire.sync_folder(folder or "/", seconds=SYNC_SECONDS)
        except StatusError as error:
            if error.code != MISSING:  # somebody removed it, empty, meanwhile
                self._syncs_folders = False

    def _prune(self, wire: Wire, folder: str) -> None:
        """Remove ``folder`` (a key) and its parents up to two levels below the root, as far as they are empty."""
        while "/" in folder:
            try:
                wire.remove_folder(self._path(folder))
            except StatusError:
                return  # not empty, or somebody else was faster
            folder = posixpath.dirname(folder)


def exists(wire: Wire, path: str) -> bool:
    """Is there a file or folder at ``path``? Raises StatusError, LostError."""
    return tolerating(MISSING, lambda: wire.stat(path))


def tolerating(code: int, call: Callable[[], object]) -> bool:
    """Was it done? False where the server said ``code``."""
    try:
        call()
    except StatusError as error:
        if error.code != code:
            raise
        return False
    return True


def _info(key: str, found: Attributes) -> ObjectInfo:
    return ObjectInfo(key, found.size, datetime.fromtimestamp(found.modified, UTC))
