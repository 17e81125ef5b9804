"""What one running interface consists of, for whoever answers a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import Response

from api.throttle import Throttle
from backupd.app.service import Service
from backupd.app.wiring import Wiring


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

    @property
    def secure(self) -> bool:
        """Is it served with TLS by ourselves?"""
        return self.wiring.settings.api.tls is not None


def site_of(request: HTTPConnection) -> Site:
    site: Site = request.app.state.site
    return site
