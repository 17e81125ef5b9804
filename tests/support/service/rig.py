"""The interface as it runs: our server on a port of its own over a real catalog, in a thread of the test's process."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from api.server import ApiServer, create_app, server_of
from backupd.app.context.access import command_line, create_token
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.app.views import standings as standing
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.access import Role
from backupd.model.text import Clock
from backupd.process.run_context import utc_now
from tests.support.service.house import Office

_names = itertools.count(1)


@dataclass
class Rig:
    """``reloads``: how often somebody asked for a reload."""

    settings: Settings
    catalog: Catalog
    wiring: Wiring
    service: Service
    app: FastAPI
    server: ApiServer
    url: str
    reloads: list[None] = field(default_factory=list)
    _secrets: dict[tuple[Role, frozenset[str] | None], str] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def secret(self, role: Role | str, servers: Collection[str] | None = None) -> str:
        """Of a token with that role, the same one each time."""
        key = (Role(role), None if servers is None else frozenset(servers))
        if key not in self._secrets:
            _token, self._secrets[key] = create_token(
                self.wiring, command_line(), f"{role}-{next(_names)}", Role(role), servers=servers
            )
        return self._secrets[key]

    def client(
        self,
        role: Role | str | None = None,
        *,
        servers: Collection[str] | None = None,
        url: str = "",
        timeout: float = 240.0,
    ) -> httpx.Client:
        """With a token of that role, or without one; closed with the rig."""
        headers = {} if role is None else {"Authorization": f"Bearer {self.secret(role, servers)}"}
        return self._open.enter_context(httpx.Client(base_url=url or self.url, headers=headers, timeout=timeout))


@contextmanager
def rig(
    base: Path | Settings,
    *,
    extra: str = "",
    clock: Clock = utc_now,
    host: str = "127.0.0.1",
    prepared: Callable[[Wiring], None] = lambda _wiring: None,
    app: Callable[[FastAPI], None] = lambda _app: None,
) -> Iterator[Rig]:
    """Serve an installation until the block ends. ``base``: an empty folder, in which one with the server ``db1`` is
    made (``extra``: lines of its configuration), or the settings of one that is there; ``prepared``: fills its catalog
    first; ``app``: changes the application before it is served."""
    settings = base if isinstance(base, Settings) else Office(base).write(extra=extra)
    with ExitStack() as stack:
        # A slow machine has every server looked at as well, while whoever asks waits.
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(standing, "BUDGET", 240.0)
        catalog = stack.enter_context(open_catalog(settings.catalog))
        wiring = Wiring(settings, catalog, clock)
        prepared(wiring)
        service = Service(wiring, "")
        reloads: list[None] = []
        made = create_app(service, wiring, reload=lambda: reloads.append(None))
        app(made)
        listener = stack.enter_context(
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512)
        )
        port = listener.getsockname()[1]
        ready = threading.Event()
        server = server_of(made, settings.api.tls, ready.set)
        thread = threading.Thread(target=server.run, args=([listener],), name="api")
        thread.start()
        try:
            if not ready.wait(240) or not thread.is_alive():
                raise AssertionError("the server did not come up")
            scheme = "https" if settings.api.tls else "http"
            shown = f"[{host}]" if ":" in host else host
            found = Rig(settings, catalog, wiring, service, made, server, f"{scheme}://{shown}:{port}", reloads)
            with found._open:
                yield found
        finally:
            server.should_exit = True
            thread.join(240)


def scoped(settings: Settings, **changes: object) -> Settings:
    """``settings`` with another ``api`` section: these of its fields changed."""
    api = settings.api.model_copy(update=changes)
    return dataclasses.replace(settings, configuration=settings.configuration.model_copy(update={"api": api}))
