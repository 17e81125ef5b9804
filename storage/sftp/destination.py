"""A destination in a folder of another host, by SFTP.

A put is: temporary file, fsync, rename in place of what was there, fsync of the folder, the last as far as the server
can. What a kill or a lost connection leaves is a temporary file in ``.tmp`` that no listing shows. Nobody can tell from
here whether its writer lives, so it counts as left over when nothing was written to it for a day.

It knows no hard links that could be counted, so it has no trees. Memory: 4 MiB for each stream that is open.
"""

from __future__ import annotations

import io
import posixpath
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import BinaryIO

from backupd.model.errors import DestinationError, ObjectMissingError
from storage.contract import layout
from storage.contract.config import SftpConfig
from storage.contract.destination import Capability, ObjectInfo, Space
from storage.sftp.folder import Listing, RemoteFolder, SourceFailedError, tolerating
from storage.sftp.session import ANSWER_SECONDS, Sessions
from storage.sftp.stream import Download
from storage.sftp.wire import MISSING, Attributes, LostError, StatusError, Wire

_BUFFER = 256 * 1024
_FOLDERS_AT_ONCE = 8
"""Folders that are listed in one go, so that a listing of the pool does not take a way there and back for each."""


class SftpDestination:
    """Nothing is touched before the first call. ``seconds``: how long an answer of the server may take."""

    def __init__(self, name: str, config: SftpConfig, *, seconds: float = ANSWER_SECONDS) -> None:
        self._sessions = Sessions(name, config, seconds)
        self._folder = RemoteFolder(name, config, self._sessions)
        weakref.finalize(self, self._sessions.close)

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def capabilities(self) -> Capability:
        return Capability.SPACE if self._folder.tells_space else Capability.NONE

    def close(self) -> None:
        """Close the connections that nobody uses; the next call makes new ones."""
        self._sessions.close()

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        target, doing = self._path(key), f"writing {key}"
        try:
            with self._folder.guard(doing), self._folder.temporary() as temporary:
                found = self._folder.upload(temporary, stream, doing)
                self._folder.move(temporary, target, found)
                return _info(key, found)
        except SourceFailedError as failed:
            raise failed.error from None

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        path, doing = self._path(key), f"reading {key}"

        def failed(error: StatusError | LostError) -> DestinationError:
            return self._failure(error, doing, key)

        try:
            return io.BufferedReader(Download(self._sessions, path, offset, length, failed), _BUFFER)
        except (StatusError, LostError) as error:
            raise failed(error) from error

    def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        try:
            return _info(key, self._sessions.run(lambda wire: wire.stat(path)))
        except (StatusError, LostError) as error:
            raise self._failure(error, f"looking at {key}", key) from error

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        doing = f"listing {prefix}"
        above = prefix.rpartition("/")[0]
        if ".." in above.split("/") or above.startswith("/"):
            raise DestinationError(f"{prefix!r} is not the beginning of a key")
        self._folder.require_way(above, doing)
        above = f"{above}/" if above else ""
        with self._folder.guard(doing):
            yield from self._walk(above, self._folder.listings([above])[0], prefix)

    def _walk(self, above: str, listing: Listing, prefix: str) -> Iterator[ObjectInfo]:
        # Keys sort as if a folder's name ended with its slash: "a.b" comes before "a/c".
        shown = sorted(
            (
                (above + name + ("/" if found.is_folder else ""), found)
                for name, found in listing
                if name[0] != "." and not layout.in_tree(above + name)
            ),
            key=lambda pair: pair[0],
        )
        wanted = [
            key
            for key, found in shown
            if found.is_folder
            and key.count("/") < layout.DEEPEST
            and (key.startswith(prefix) or prefix.startswith(key))
        ]
        for key, found in shown:
            if found.is_link and ((key + "/").startswith(prefix) or prefix.startswith(key + "/")):
                raise self._folder.linked(key, f"listing {prefix}")
        listed: dict[str, Listing] = {}
        for key, found in shown:
            if found.is_file and key.startswith(prefix):
                yield _info(key, found)
            if wanted and key == wanted[0]:
                some, wanted = wanted[:_FOLDERS_AT_ONCE], wanted[_FOLDERS_AT_ONCE:]
                listed = dict(zip(some, self._folder.listings(some), strict=True))
            if key in listed:
                yield from self._walk(key, listed.pop(key), prefix)

    def delete(self, key: str) -> None:
        path, doing = self._path(key), f"deleting {key}"

        def remove(wire: Wire) -> None:
            if not tolerating(MISSING, lambda: wire.remove(path)):
                self._folder.check_marker(wire, doing)
            # The order of deletions is what keeps a power cut harmless (manifest before objects), and an object that
            # comes back is only garbage again: so objects alone go without waiting for the disk.
            elif not key.startswith(layout.OBJECTS):
                self._folder.sync(wire, posixpath.dirname(path))
                self._folder.prune(wire, posixpath.dirname(key))

        with self._folder.guard(doing):
            self._sessions.run(remove)

    def space(self) -> Space | None:
        with self._folder.guard("asking for free space"):
            return self._folder.space()

    def is_initialised(self) -> bool:
        with self._folder.guard(f"looking for {layout.REPOSITORY}"):
            return self._sessions.run(self._folder.has_marker)

    def initialise(self, now: datetime) -> None:
        with self._folder.guard("initialising"):
            self._folder.initialise(now)

    def leftovers(self) -> Iterator[str]:
        self._folder.require("looking for leftovers")
        with self._folder.guard("looking for leftovers"):
            yield from self._folder.abandoned()

    def clear_leftovers(self) -> int:
        def remove(wire: Wire, name: str) -> bool:
            return tolerating(MISSING, lambda: wire.remove(self._folder.path(name)))

        self._folder.require("clearing leftovers")
        with self._folder.guard("clearing leftovers"):
            names = self._folder.abandoned()
            return self._sessions.run(lambda wire: sum(remove(wire, name) for name in names))

    def _path(self, key: str) -> str:
        layout.check_key(key)
        return self._folder.path(key)

    def _failure(self, error: StatusError | LostError, doing: str, key: str) -> DestinationError:
        """The destination's own absence is another thing than that of ``key``, and comes first."""
        if not isinstance(error, StatusError) or error.code != MISSING:
            return self._folder.failure(error, doing)
        try:
            self._folder.require(doing)
        except DestinationError as missing:
            return missing
        return ObjectMissingError(f"destination {self.name} ({self._folder.where}) has no {key}")


def _info(key: str, found: Attributes) -> ObjectInfo:
    return ObjectInfo(key, found.size, datetime.fromtimestamp(found.modified, UTC))
