"""Work that goes on whatever happens in one round of it."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable

from backupd.app.context.logging_setup import say
from backupd.model.errors import BackupdError


class Guard:
    """A watch that outlives every trouble of one look: the next one may go well. The same trouble is told once, until
    it is another one or over; ``kind`` is what such a log line is called. ``well_at``: the monotonic time at which a
    look last ended well."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._trouble = ""
        self.well_at = time.monotonic()

    def __call__(self, work: Callable[[], None]) -> None:
        trouble = ""
        try:
            work()
        except BackupdError as error:
            trouble = str(error)
        except Exception as error:  # noqa: BLE001  a watch that died would be missed by nobody; all is told
            trouble = "".join(traceback.format_exception(error))
        if trouble and trouble != self._trouble:
            say(self._kind, trouble, level=logging.ERROR)
        if not trouble:
            self.well_at = time.monotonic()
        self._trouble = trouble
