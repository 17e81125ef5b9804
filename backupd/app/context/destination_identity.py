"""Which repository each configured destination leads to, by the id in its marker. One repository under two names would
be swept by two rules, and its one copy would count as two; so deletion and copying refuse it, and copies in it count
once.

The ids found are kept in the spool (places.json), so that counting copies needs no answer from a destination.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from backupd.app.context.settings import spool_unusable
from backupd.app.context.wiring import Wiring, gathered
from backupd.backup.finding import Finding, error
from backupd.model.errors import DestinationError, ObjectMissingError, RefusedError
from storage import layout
from storage.destination import Destination, repository_id

_HINT = (
    "remove all but one of these names from the configuration: with two names, backupd counts each copy twice and "
    "applies two retention rules to it. A separate destination needs a folder or bucket that was not copied from "
    "this one"
)


_EMPTIED = ""
"""Kept instead of the id of a repository that was emptied."""


def identities(wiring: Wiring) -> dict[str, str]:
    """Of each configured name the id of its repository, as it was last seen, or the name where nobody has looked yet.
    Left out is one that was seen to be empty though it holds backups by the catalog."""
    known = _remembered(wiring)
    return {name: marker for name in wiring.settings.destinations if (marker := known.get(name, name)) != _EMPTIED}


def note_seen(wiring: Wiring, name: str, *, initialised: bool) -> None:
    """Somebody has looked at the destination: copies do not count where it was emptied. Raises CatalogError,
    RefusedError where the spool cannot be written."""
    known = _remembered(wiring)
    if not initialised and known.get(name) != _EMPTIED and wiring.holds_backups(name):
        _remember(wiring, {**known, name: _EMPTIED})
    elif initialised and known.get(name) == _EMPTIED:
        _remember(wiring, {other: marker for other, marker in known.items() if other != name})


def require_single(wiring: Wiring, destination: Destination) -> None:
    """Raises RefusedError where another configured name leads to the same repository, and DestinationError."""
    found = _look(wiring, [destination, *_unseen(wiring)], needed=destination.name)
    mine = found.get(destination.name)
    twins = sorted(name for name, one in found.items() if mine and one == mine and name != destination.name)
    if twins:
        raise RefusedError(
            f"destinations {destination.name} and {', '.join(twins)} are the same repository",
            detail=f"its marker is {mine} under each of these names",
            hint=_HINT,
        )


def findings(wiring: Wiring) -> list[Finding]:
    """What `backupd check` says of names that lead to one repository; those that do not answer are left out."""
    usable = wiring.usable_destinations()
    others = wiring.settings.destinations.keys() - {destination.name for destination in usable}
    found = _look(wiring, [*usable, *_opened(wiring, others)])
    names = gathered((marker, name) for name, marker in found.items() if marker != _EMPTIED)
    twice = [
        error("destinations", f"{' and '.join(sorted(twins))} are the same repository (marker {marker})", _HINT)
        for marker, twins in sorted(names.items())
        if len(twins) > 1
    ]
    return [*twice, *_without_newest(wiring, [one for one in usable if found.get(one.name) != _EMPTIED])]


def _without_newest(wiring: Wiring, destinations: Iterable[Destination]) -> Iterator[Finding]:
    """Destinations that answer and do not hold the newest backup that should be there: perhaps they are others."""
    for destination in destinations:
        newest = wiring.catalog.backups.newest_at(destination.name)
        if newest is None:
            continue
        try:
            destination.stat(layout.manifest_key(newest.server, newest.id))
        except ObjectMissingError:
            yield error(
                f"destination {destination.name}",
                f"backup {newest.id} of {newest.server} is missing: by the catalog it is the newest one there",
                "is another folder, disk or bucket mounted there? `backupd verify` lists everything that is missing "
                f"there; `backupd replicate {newest.server} --to {destination.name}` copies it again from the "
                "others",
            )
        except DestinationError:
            continue  # what does not answer is reported elsewhere


def _unseen(wiring: Wiring) -> list[Destination]:
    known = _remembered(wiring)
    return [wiring.destination(name) for name in wiring.settings.destinations if name not in known]


def _opened(wiring: Wiring, names: Iterable[str]) -> Iterator[Destination]:
    for name in names:
        with suppress(DestinationError):
            yield wiring.destination(name)


def _look(wiring: Wiring, destinations: Iterable[Destination], *, needed: str = "") -> Mapping[str, str]:
    """What is known after a look at ``destinations``; one that does not answer raises only where it is ``needed``."""
    before = _remembered(wiring)
    found = dict(before)
    for destination in destinations:
        try:
            marker = repository_id(destination) if destination.is_initialised() else None
        except DestinationError:
            if destination.name == needed:
                raise
            continue
        if marker is not None:
            found[destination.name] = marker
        elif wiring.holds_backups(destination.name):
            found[destination.name] = _EMPTIED
        else:
            found.pop(destination.name, None)
    if found != before:
        _remember(wiring, found)
    return found


def _file(wiring: Wiring) -> Path:
    return wiring.settings.spool / "places.json"


def _address(wiring: Wiring, name: str) -> str:
    """Changes with where ``name`` leads to by the configuration."""
    return hashlib.sha256(repr(wiring.settings.destination(name)).encode()).hexdigest()


def _remembered(wiring: Wiring) -> dict[str, str]:
    try:
        rows = json.loads(_file(wiring).read_bytes())
        return {
            name: str(rows[name]["id"])
            for name in wiring.settings.destinations
            if name in rows and rows[name]["address"] == _address(wiring, name)
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # it is only what the destinations themselves say again


def _remember(wiring: Wiring, found: Mapping[str, str]) -> None:
    rows = {name: {"id": marker, "address": _address(wiring, name)} for name, marker in sorted(found.items())}
    file = _file(wiring)
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        fresh.replace(file)
    except OSError as failure:
        raise spool_unusable(file.parent, failure) from failure
