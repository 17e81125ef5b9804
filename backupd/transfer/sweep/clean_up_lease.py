"""One at a time removes at a destination, whichever installation it belongs to.

Whoever wants to remove puts a lease and then looks for others'; when there is one it steps back. So of two that begin
together at least one does, maybe both, never none. That matters where bytes come back under a name that they had (a
copy from another destination, a repair): a second one that is slower would remove them behind the first one's back.
Whoever takes a mark away waits for the sweep that may have read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from backupd.model.errors import BusyError, LockedError
from backupd.model.text import Clock, new_id
from backupd.transfer.guards.lease import Alive, Holder, Lease, is_alive, leases
from storage.contract import layout
from storage.contract.destination import Destination

PATIENCE = 120.0
"""Seconds that taking a mark away waits for somebody's sweep."""
_LOOK = 0.2


def sweeps(destination: Destination) -> list[Lease]:
    """Every sweep at ``destination``, living or dead."""
    return leases(destination, layout.SWEEPS)


@contextmanager
def sweeping(destination: Destination, *, clock: Clock, alive: Alive = is_alive) -> Iterator[Holder]:
    """While the block runs nobody else removes here; ask ``assert_held`` before each step. Leases of the dead go.

    Raises BusyError when somebody is at it, LockedError where not even a lease may be removed: then nothing may.
    """
    _clear(destination, clock, alive)
    with Holder([destination], layout.sweep_key(new_id(clock())), (), clock=clock) as holder:
        _clear(destination, clock, alive, ours=holder.lease.key)
        yield holder


@contextmanager
def unswept(destination: Destination, *, clock: Clock, alive: Alive = is_alive) -> Iterator[Holder]:
    """While the block runs nobody removes here, whoever runs it may not remove anything either. Raises BusyError when
    somebody is at it."""
    with Holder([destination], layout.sweep_key(new_id(clock())), (), clock=clock) as holder:
        _dead(destination, clock, alive, ours=holder.lease.key)
        yield holder


def _clear(destination: Destination, clock: Clock, alive: Alive, *, ours: str = "") -> None:
    """Remove the leases of the dead. Raises BusyError when one lives that is not ``ours``."""
    for lease in _dead(destination, clock, alive, ours=ours):
        destination.delete(lease.key)


def _dead(destination: Destination, clock: Clock, alive: Alive, *, ours: str) -> list[Lease]:
    """Leases of the dead. Raises BusyError when one lives that is not ``ours``."""
    others = [lease for lease in sweeps(destination) if lease.key != ours]
    for lease in others:
        if alive(lease, clock()):
            who = "another process" if lease.owner is None else f"process {lease.owner.pid} on {lease.owner.host}"
            raise BusyError(
                f"{who} holds the clean-up lease at destination {destination.name}",
                hint="what is due is removed the next time",
            )
    return others


def await_sweeps(
    destination: Destination, *, clock: Clock, alive: Alive = is_alive, patience: float = PATIENCE
) -> None:
    """Wait for everybody who began to remove here before now. Raises BusyError after ``patience`` seconds."""
    began = {lease.key for lease in sweeps(destination) if alive(lease, clock())}
    deadline = time.monotonic() + patience
    pause = threading.Event()
    while began:
        if time.monotonic() >= deadline:
            raise BusyError(
                f"another process has held the clean-up lease at {destination.name} for {patience:g} s",
                detail=", ".join(sorted(began)),
                hint="run the command again when that has ended",
            )
        pause.wait(_LOOK)
        began &= {lease.key for lease in sweeps(destination) if alive(lease, clock())}


def refusal(error: BusyError | LockedError) -> str:
    """What to say of a removal that did not begin."""
    return error.line
