"""Asking the service of this host to read its configuration anew, and waiting for its answer, which is an event."""

from __future__ import annotations

import os
import signal
import time

from backupd.alerts.rules import REFUSED
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.service_manager import service_process
from backupd.model.errors import BackupdError, RefusedError
from backupd.model.event import Event

PATIENCE = 30.0
"""Seconds that the service has for an answer: it looks at the signal when it has time."""
_LOOK = 0.1
_START = "start it: systemctl start backupd, or backupd serve"


def reload(wiring: Wiring, *, patience: float = PATIENCE) -> Event:
    """Its answer. The files were read by whoever calls, so they are valid by themselves; the service may refuse them
    all the same, for what it cannot change while it runs. Raises RefusedError where no service runs here, BackupdError
    where it does not answer."""
    process = service_process(wiring.settings.spool)
    if process is None:
        raise RefusedError("no service is running on this host", hint=_START)
    before = wiring.catalog.events.newest()
    try:
        os.kill(process, signal.SIGHUP)
    except ProcessLookupError:
        raise RefusedError("the service has just ended", hint=_START) from None
    except PermissionError:
        raise RefusedError(
            f"the service, process {process}, belongs to another user",
            hint="call backupd as root, or as the user of the service",
        ) from None
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for event in wiring.catalog.events.since(before):
            if event.kind in (REFUSED.broken, REFUSED.mended):
                return event
        time.sleep(_LOOK)
    raise BackupdError(
        f"the service, process {process}, did not answer within {patience:.0f} s",
        hint="it may be busy, and reads the files later; see its log: journalctl -u backupd",
    )
