"""A process of this installation that this one has not started, and cannot wait for: one that outlived the service that
did.

It is held by a descriptor (pidfd), so nobody who gets its number afterwards is ever meant by it.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from typing import Self

from backupd.app.context import wiring
from backupd.app.context.wiring import owner_state


class OtherProcess:
    """As ``ChildProcess``, but how it ended is not known. ``asked``: when it was asked to end; monotonic."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.asked: float | None = None
        self._descriptor = descriptor
        self._gone = False

    @classmethod
    def of(cls, owner: str) -> Self | None:
        """The process that calls itself so (see ``wiring.owner``); None where it has ended or is not seen from here."""
        owner = _of_here(owner)
        if owner_state(owner) is not True:
            return None
        pid = int(owner.split(" ")[-2])
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        if owner_state(owner) is not True:  # its number may have been another one's before the descriptor was here
            os.close(descriptor)
            return None
        return cls(pid, descriptor)

    def ended(self) -> bool:
        """Is it over?"""
        if not self._gone and select.select([self._descriptor], [], [], 0)[0]:
            self.close()
        return self._gone

    def end(self, now: float, grace: float) -> None:
        """Ask it to end; one that was asked ``grace`` seconds ago is killed, and with it all that it has started."""
        if self.asked is None:
            self.asked = now
            self._send(signal.SIGTERM)
        elif now - self.asked > grace:
            self._send(signal.SIGKILL)

    def last_words(self) -> str:
        """Nobody has heard them."""
        return ""

    def close(self) -> None:
        """Let it go, and whatever becomes of it."""
        if not self._gone:
            self._gone = True
            os.close(self._descriptor)

    def _send(self, number: signal.Signals) -> None:
        if not self._gone:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)


def _of_here(owner: str) -> str:
    """The same, where the host has got another name since it was written: boot and namespace tell which host it is."""
    words, here = owner.split(" "), wiring.owner().split(" ")
    return " ".join([here[0], *words[1:]]) if words[1:3] == here[1:3] and len(words) == len(here) else owner
