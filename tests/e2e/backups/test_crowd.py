"""Two hundred people look while a backup runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from backupd.app.context.access import command_line, create_token
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.service.api_process import ApiWatch
from backupd.catalog.session import open_catalog
from backupd.model.access import Role
from tests.support.crowd import ask
from tests.support.dice import size
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import until
from tests.support.service.serving import held_port

PATHS = (
    "/v1/backups",
    "/v1/servers",
    f"/v1/servers/{SERVER}",
    f"/v1/servers/{SERVER}/timeline",
    "/v1/jobs",
    "/v1/whoami",
    "/v1/destinations",
    "/healthz",
)


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


def test_two_hundred_clients_are_answered_while_backups_run(
    house: House, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    house.config_extra = f'api: {{listen: "[::]:{port}"}}\n'
    house.write()
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog, ApiWatch(Wiring(settings, catalog)) as watch:
        _token, secret = create_token(Wiring(settings, catalog), command_line(), "crowd", Role.VIEWER)
        until(lambda: watch.running() is not None, lambda: "a process that answers")
        over = threading.Event()

        def back_up() -> None:
            while not over.is_set():
                house.backup()

        backups = threading.Thread(target=back_up)
        backups.start()
        try:
            crowd = ask(port, secret, PATHS, seconds=size(3, 60))
        finally:
            over.set()
            backups.join()
    with capsys.disabled():
        print(f"\n{crowd.told()}")
    assert crowd.errors == []
    assert crowd.families == {"127.0.0.1", "::1"}
    assert len(crowd.latencies) >= 200
    assert len(house.backups()) >= 1
