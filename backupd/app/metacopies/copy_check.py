"""What was put at a destination beside backups (configuration, catalog, proofs) is read again and compared with the
digests from when it was put there. These are what is left on the day on which nothing else is, and no manifest names
them.

A note in the spool keeps the digests of the copies of catalog and configuration. It cannot be in the catalog, whose
copy would be another one each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from backupd.alerts.conditions import Key
from backupd.alerts.rules import DAMAGED
from backupd.app.context.incidents import Incidents
from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring
from backupd.app.copies.repairs import REPAIRED
from backupd.model.errors import ArchivedError, BackupdError, DamagedError, LockedError, ObjectMissingError
from backupd.model.event import Severity
from backupd.process.folders import write_whole
from backupd.transfer.records.authenticity import SignedDestination
from backupd.transfer.scrub_and_repair import Damage, share_of
from storage import layout
from storage.destination import Destination, exists

COPY_NOTE = "copies.json"
"""Name of the note in the spool."""
HERE = "this installation"
"""What a damaged copy was replaced from, where that was no other destination."""
_DAYS = 28
_CHUNK = 1 << 20

Turn = Callable[[str], bool]
"""Is what is stored under this key to be read now?"""


class CopyNote:
    """Digests in the spool: by destination and folder of the content of what was put last, and by destination and key
    of each copy as it was stored. Losing it costs one more copy."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self._digests: dict[str, str] = found if isinstance(found, dict) else {}

    def get(self, destination: str, folder: str) -> str | None:
        """The SHA-256 that was noted; None where nothing was."""
        return self._digests.get(f"{destination}/{folder}")

    def stored(self, destination: str) -> dict[str, str]:
        """Of each copy that was put there, by key."""
        found = {
            name.removeprefix(f"{destination}/"): digest
            for name, digest in self._digests.items()
            if name.startswith(f"{destination}/")
        }
        return {key: digest for key, digest in found.items() if layout.copy_of(key) is not None}

    def set(self, destination: str, folder: str, digest: str) -> None:
        """Note the SHA-256 of what was put, and write the note at once. Raises OSError."""
        self._digests[f"{destination}/{folder}"] = digest
        self._write()

    def marker(self, destination: str) -> bytes | None:
        """The marker of the destination, as it was seen there."""
        found = self.get(destination, layout.REPOSITORY)
        return found.encode() if found is not None else None

    def forget(self, destination: str, key: str) -> None:
        """Drop the note of a copy that was deleted."""
        if self._digests.pop(f"{destination}/{key}", None) is not None:
            self._write()

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self._digests, sort_keys=True).encode())


def of_today(now: datetime) -> Turn:
    """All in four weeks."""
    return lambda key: share_of(key) % _DAYS == now.toordinal() % _DAYS


def of_server(server: str | None) -> Turn:
    """Everything; with ``server`` without the proofs of other servers."""

    def turn(key: str) -> bool:
        proof = layout.proof_of(key)
        return server is None or proof is None or proof[0] == server

    return turn


def find_damaged(destination: Destination, recorded: Mapping[str, str], turn: Turn) -> dict[str, str]:
    """What is wrong, by key, with those whose turn it is, and with the newest of each folder. ``recorded``: SHA-256
    by key. What is missing is not damaged: it is put again anyway. Raises DestinationError."""
    newest: dict[str, str] = {}
    for key in recorded:
        if layout.copy_of(key) is not None:
            newest[_folder(key)] = max(newest.get(_folder(key), ""), key)  # their names begin with their time
    found = {
        key: problem(destination, key, digest)
        for key, digest in sorted(recorded.items())
        if turn(key) or key in newest.values()
    }
    return {key: text for key, text in found.items() if text}


def problem(destination: Destination, key: str, digest: str) -> str:
    """Why the object ``key`` is not what was put there; "" where it is, or is missing."""
    try:
        with destination.get(key) as stream:
            same = _digest(stream) == digest
    except ObjectMissingError:
        return ""
    except ArchivedError:
        return ""  # a rule of the destination has moved it; nobody can say
    except DamagedError as error:
        return " ".join((error.detail or error.message).split())
    except OSError as error:  # the medium itself
        return f"cannot be read: {error.strerror or error}"
    return "" if same else "holds other bytes than were stored (SHA-256 differs)"


def bring(key: str, digest: str, destination: Destination, sources: Iterable[Destination], folder: Path) -> str:
    """Put what ``destination`` should hold under ``key`` there from the first of ``sources`` that has these very bytes;
    its name, "" where none has. ``folder``: where there is room for it."""
    file = folder / "brought"
    for source in sources:
        if source.name == destination.name:
            continue
        with suppress(BackupdError, OSError):
            with source.get(key) as stream, file.open("wb") as target:
                same = _digest(stream, target) == digest
            if same:
                with file.open("rb") as stream:
                    destination.put(key, stream)
                return source.name
    return ""


class DamagedCopies:
    """Which copies at one destination are not what was put there, and what becomes of them."""

    def __init__(self, wiring: Wiring, destination: Destination, note: CopyNote) -> None:
        self._wiring, self._destination, self._note = wiring, destination, note
        self._found: dict[str, Damage] = {}

    @property
    def keys(self) -> frozenset[str]:
        """Those that are still damaged."""
        return frozenset(key for key, damage in self._found.items() if not damage.repaired_from)

    @property
    def damages(self) -> tuple[Damage, ...]:
        """Every damaged copy that was found, replaced or not."""
        return tuple(self._found.values())

    def find(self, turn: Turn, sources: Sequence[Destination], folder: Path) -> None:
        """Find them: all, whosever turn it is, where some were left the last time. Those of which another destination
        has the very same bytes are put right from there."""
        name = self._destination.name
        recorded = {**self._note.stored(name), **self._wiring.catalog.deposits.at(name)}
        due = of_server(None) if Incidents(self._wiring.catalog).is_open(Key(DAMAGED, subject=name)) else turn
        for key, text in find_damaged(self._destination, recorded, due).items():
            self._found[key] = Damage(
                name,
                key,
                text,
                trouble="no other destination has it",
                aged=_only_unsigned(self._destination, key, recorded[key]),
            )
            self._mend(key, bring(key, recorded[key], self._destination, sources, folder))

    def settle(self, proofs: Collection[str]) -> None:
        """After everything was put that can be: what was replaced so goes, unless nothing beside it can be read."""
        stored = self._note.stored(self._destination.name)
        for key in self.keys:
            mine = layout.copy_of(key)
            others = [
                other
                for other in stored
                if mine is not None
                and (copy := layout.copy_of(other)) is not None
                and copy[1] == mine[1]
                and other != key
                and _folder(other) == _folder(key)
            ]
            if key in proofs or (key in stored and self._reads(key, stored[key])):
                self._mend(key, HERE)
            elif any(self._reads(other, stored[other]) for other in sorted(others, reverse=True)):
                with suppress(LockedError):
                    self._destination.delete(key)
                self._note.forget(self._destination.name, key)
                self._mend(key, HERE)

    def _reads(self, key: str, digest: str) -> bool:
        return exists(self._destination, key) and not problem(self._destination, key, digest)

    def _mend(self, key: str, source: str) -> None:
        if source:
            self._found[key] = replace(self._found[key], repaired_from=source, trouble="")


def report(wiring: Wiring, destination: str, damages: Iterable[Damage]) -> None:
    """An event for what was damaged and replaced; for what could not be, one until nothing of that is found any more.
    What had only aged is in the log."""
    found = list(damages)
    mended = [damage for damage in found if damage.repaired_from and not damage.aged]
    for damage in found:
        if damage.repaired_from and damage.aged:
            say("copy-renewed", f"{damage.destination}: {damage.key}: {damage.problem}")
    left = [damage for damage in found if not damage.repaired_from]
    if mended:
        wiring.note(
            REPAIRED,
            Severity.WARNING,
            f"{len(mended)} copies of configuration, catalog or proofs at destination "
            f"{destination} were damaged and have been replaced",
            subject=destination,
            detail=_lines(mended),
            hint=f"silent corruption indicates a failing disk: check the storage of {destination}",
        )
    key = Key(DAMAGED, subject=destination)
    if left:
        wiring.alert(
            key,
            Severity.WARNING,
            f"{len(left)} copies of configuration, catalog or proofs at "
            f"destination {destination} are damaged and cannot be replaced",
            detail=_lines(left),
            hint="no backup depends on them; those that are not needed can be deleted there",
        )
    else:
        none = f"no damaged copy of configuration, catalog or proofs is left at destination {destination}"
        wiring.settle(looked={key: none})


def _only_unsigned(destination: Destination, key: str, digest: str) -> bool:
    """Is it what was put there, before anything had to be signed?"""
    with suppress(ObjectMissingError, DamagedError):
        return (
            isinstance(destination, SignedDestination)
            and destination.unsigned(key)
            and hashlib.sha256(destination.as_it_lies(key)).hexdigest() == digest
        )
    return False


def _folder(key: str) -> str:
    return key.partition("/")[0]


def _lines(damages: Iterable[Damage]) -> str:
    return "\n".join(
        f"{damage.key}: {damage.problem}" + (f": {damage.trouble}" if damage.trouble else "") for damage in damages
    )


def _digest(stream: BinaryIO, target: BinaryIO | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()
