"""What one running interface consists of, for whoever answers a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import Response

from api.throttle import Throttle
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.catalog.session import Catalog
from backupd.model.errors import CatalogError

TRIED_EVERY = 10.0
"""Seconds for which it is known whether the catalog can be written: anybody may ask."""
_TRIED = "tried"
"""The cursor that is moved for that."""


class WriteTrial:
    """Whether the catalog can be written: one that can only be read (its disk is full, say) is of no use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works, self._until = True, 0.0

    def works(self, catalog: Catalog) -> bool:
        """Tries it, unless somebody does or did lately."""
        if self._lock.acquire(blocking=False):  # who waited would keep a thread from other requests
            try:
                if time.monotonic() >= self._until:
                    self._works = _can_write(catalog)
                    self._until = time.monotonic() + TRIED_EVERY
            finally:
                self._lock.release()
        return self._works


def _can_write(catalog: Catalog) -> bool:
    try:
        catalog.cursors.move({_TRIED: int(time.time())})
    except CatalogError:
        return False
    return True


@dataclass
class Site:
    """``page``: how a problem is shown to who came with a browser: (request, status, problem as JSON, headers);
    ``reload``: asks the service to read its configuration anew; ``aside``: for what no request waits for; ``noted``:
    when the use of each token was written last."""

    wiring: Wiring
    service: Service
    throttle: Throttle
    reload: Callable[[], None]
    page: Callable[[HTTPConnection, int, Mapping[str, Any], Mapping[str, str]], Response]
    aside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="aside"))
    noted: dict[str, datetime] = field(default_factory=dict)
    trial: WriteTrial = field(default_factory=WriteTrial)

    @property
    def secure(self) -> bool:
        """Do people reach it with TLS, ours or that of a proxy before us?"""
        api = self.wiring.settings.api
        return api.tls is not None or (api.url or "").lower().startswith("https://")

    @property
    def metrics_are_open(self) -> bool:
        """May anybody who can connect read them?"""
        api = self.wiring.settings.api
        return api.metrics == "open" or (api.metrics == "auto" and api.is_private)


def site_of(request: HTTPConnection) -> Site:
    site: Site = request.app.state.site
    return site
