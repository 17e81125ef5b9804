"""Guesses at tokens: whoever fails too often has to wait with the next one.

What one running interface consists of, for whoever answers a request.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.catalog.session import Catalog
from backupd.model.errors import CatalogError

V = TypeVar("V")

FREE = 5
"""Wrong tokens from one address that cost nothing."""
FIRST = 5.0
"""Seconds that the next one costs; doubled with each."""
LONGEST = 300.0
FORGOTTEN = 900.0
"""Seconds after the last wrong one."""
ALL = 100
"""Wrong tokens within a minute from everywhere: then only of addresses that came in lately they are heard."""
KNOWN = 4096
"""So many addresses are remembered."""


@dataclass(slots=True)
class _Failures:
    count: int = 0
    last: float = 0.0
    until: float = 0.0


class Throttle:
    """Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, _Failures] = OrderedDict()
        self._welcome: OrderedDict[str, None] = OrderedDict()
        self._allowance, self._counted = float(ALL), clock()

    def wait(self, address: str) -> float:
        """Seconds until a wrong token from ``address`` is heard again; 0 when now."""
        now, key = self._clock(), network(address)
        with self._lock:
            self._refill(now)
            found = self._failures.get(key)
            if found is not None and found.until > now:
                return found.until - now
            if self._allowance < 1 and key not in self._welcome:
                return (1 - self._allowance) * 60 / ALL
            return 0.0

    def failed(self, address: str) -> float:
        """A wrong token came from there; gives the seconds that this costs."""
        now, key = self._clock(), network(address)
        with self._lock:
            self._refill(now)
            self._allowance = max(0.0, self._allowance - 1)
            found = self._failures.pop(key, None)
            if found is None or now - found.last > FORGOTTEN:
                found = _Failures()
            found.count, found.last = found.count + 1, now
            pause = min(LONGEST, FIRST * 2.0 ** (found.count - FREE - 1)) if found.count > FREE else 0.0
            found.until = now + pause
            _remember(self._failures, key, found)
            return pause

    def count(self, address: str) -> int:
        """How many in a row were wrong."""
        with self._lock:
            found = self._failures.get(network(address))
            return 0 if found is None else found.count

    def passed(self, address: str) -> None:
        """A right one came from there."""
        key = network(address)
        with self._lock:
            self._failures.pop(key, None)
            self._welcome.pop(key, None)
            _remember(self._welcome, key, None)

    def knows(self, address: str) -> bool:
        """Did a right token come from there lately?"""
        with self._lock:
            return network(address) in self._welcome

    def _refill(self, now: float) -> None:
        self._allowance = min(float(ALL), self._allowance + (now - self._counted) * ALL / 60)
        self._counted = now


def _remember(known: OrderedDict[str, V], key: str, value: V) -> None:
    known[key] = value
    while len(known) > KNOWN:
        known.popitem(last=False)


def network(address: str) -> str:
    """What one guesser can have many addresses of: of IPv6 a /64 net."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))


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


class Layer:
    """What a request passes on its way to ``app``; whatever is no HTTP goes by it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.answer if scope["type"] == "http" else self._app)(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request, or let ``_app`` do so."""
        raise NotImplementedError


def site_of(request: HTTPConnection) -> Site:
    site: Site = request.app.state.site
    return site
