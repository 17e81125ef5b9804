"""What is kept on purpose: by this catalog, and by what is written at the destinations by whomever. Both count."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backupd.app.context.wiring import Wiring
from backupd.model.errors import BackupdError, DestinationError
from backupd.model.hold import EVERY_SERVER, Hold, HoldKind
from backupd.transfer.guards.holds_and_marks import Kept, kept_at
from storage.contract.destination import Destination


def kept_by_catalog(wiring: Wiring) -> Kept:
    holds = {hold.server: hold for hold in wiring.catalog.holds.all() if hold.kind is HoldKind.HOLD}
    everything = wiring.catalog.backups.list(foreign=True)
    return Kept(
        holds,
        frozenset((record.server, record.id) for record in everything if record.pinned),
        frozenset((record.server, record.id) for record in everything if record.foreign),
    )


def kept_anywhere(wiring: Wiring) -> Kept:
    """By the catalog, or by any destination that can be asked; no sweep goes against what another one says."""
    known = kept_by_catalog(wiring)
    holds, backups = dict(known.holds), set(known.backups)
    for destination in wiring.usable_destinations():
        try:
            found = kept_at(destination)
        except DestinationError:
            continue  # nothing can be removed there either
        holds = {**found.holds, **holds}
        backups |= found.backups
    return Kept(holds, frozenset(backups), known.foreign)


def holds_of(kept: Kept, server: str) -> tuple[Hold, ...]:
    """The holds that concern ``server``, its own before that of every server."""
    return tuple(kept.holds[name] for name in dict.fromkeys((server, EVERY_SERVER)) if name in kept.holds)


def written(wiring: Wiring, names: Iterable[str], act: Callable[[Destination], None]) -> tuple[str, ...]:
    """Do ``act`` at each destination of these names; gives where it could not be done, and why."""
    problems = []
    for name in names:
        try:
            destination = wiring.destination(name)
            if destination.is_initialised():
                act(destination)
                continue
            problem = "it is not mounted, or no repository yet"
        except BackupdError as error:
            problem = error.message
        problems.append(f"{name}: {problem}")
    return tuple(problems)
