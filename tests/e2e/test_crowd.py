"""Two hundred people look while a backup runs."""

from __future__ import annotations

import threading
import time

import pytest

from backupd.app.apiwatch import ApiWatch
from backupd.app.auditing import command_line
from backupd.app.settings import load_settings
from backupd.app.tokens import create_token
from backupd.app.wiring import Wiring
from backupd.catalog.session import open_catalog
from backupd.model.access import Role
from tests.e2e.house import SERVER, House
from tests.support.crowd import ask
from tests.support.dice import size
from tests.support.serving import free_port

PATHS = ("/v1/backups", "/v1/servers", f"/v1/servers/{SERVER}", f"/v1/servers/{SERVER}/timeline", "/v1/jobs",
         "/v1/whoami", "/v1/destinations", "/healthz")


def test_two_hundred_clients_are_answered_while_backups_run(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    house.config_extra = f'api: {{listen: "[::]:{port}"}}\n'
    house.write()
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog, ApiWatch(Wiring(settings, catalog)) as watch:
        _token, secret = create_token(Wiring(settings, catalog), command_line(), "crowd", Role.VIEWER)
        while watch.running() is None:
            time.sleep(0.05)
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
