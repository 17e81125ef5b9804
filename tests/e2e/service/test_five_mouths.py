"""What command line, REST, page, metrics and mail say of a real installation while a backup fails, its stream fails, a
dump is not whole, and after each has healed. More states, without a server: tests/unit/api/test_five_mouths.py."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from backupd.app.context.access import command_line, create_token
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.model.access import Role
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, serving, until
from tests.support.servers.server import SERVICE_USER
from tests.support.service.mail_server import MailBox, mail_server
from tests.support.service.mouths import Mouths, State, mailed
from tests.support.service.serving import held_port

POLICY = (
    ONCE_A_YEAR.replace("required: [local]", "required: [local], others: [offsite]")
    + """\
logical: {schedule: "0 0 5 1 *"}
binlog: {stream: true, checkpoint: 1s}
objectives: {rpo: 1h}
protection: {copies: 2, off_site: 1}
"""
)


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    with held_port() as one, held_port() as other:
        yield one, other


def test_what_is_said_of_a_failed_backup_a_failed_stream_and_a_dump_that_is_not_whole(
    own_house: House, ports: tuple[int, int]
) -> None:
    house, (port, mail) = own_house, ports
    box, tool = MailBox(port=mail), house.base / "instead"
    real, stand = shutil.which("mariadb-backup"), house.base / "mariadb-backup"
    stand.write_text(f'#!/bin/sh\ncase "$*" in *--backup*) [ -e {tool} ] && . {tool};; esac\nexec {real} "$@"\n')
    stand.chmod(0o755)
    house.programs = {"mariadb-backup": str(stand)}
    house.config_extra = (
        f"api: {{listen: '127.0.0.1:{port}'}}\nalerts:\n"
        f"  email: {{smtp: {box.url}, from: backupd@example.com, to: [dba@example.com]}}\n"
    )
    house.write()
    away = f"destinations:\n  offsite: {{type: filesystem, path: {house.base}/offsite, off_site: true}}\n"
    house.config.write_text(house.config.read_text().replace("destinations:\n", away))
    (house.base / "policies" / "gold.yaml").write_text(POLICY)
    house.backup()
    house.ok("replicate", SERVER)
    settings = load_settings(house.config)
    with catalog_of(house) as catalog:
        _token, secret = create_token(Wiring(settings, catalog), command_line(), "mouths", Role.VIEWER)

        def command(*words: str) -> Any:
            return house.run(*words, "--json").json

        with (
            mail_server(box, port=mail),
            serving(house),
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {secret}"}, timeout=60
            ) as http,
        ):
            mouths = Mouths(command, http, SERVER, slack=timedelta(minutes=1))

            def all_say(status: str, *kinds: str) -> State:
                """Sooner or later, and then all of them."""
                found: list[State] = []
                why = [""]

                def agreed() -> bool:
                    try:
                        state = mouths.agree() if kinds else mouths.clean()
                        assert (state.status, state.kinds) == (status, set(kinds)), (state.reasons, state.told)
                        mailed(box.subjects(), catalog.incidents.list(limit=100))
                    except (AssertionError, httpx.TransportError) as error:
                        why[0] = str(error)
                        return False
                    found.append(state)
                    return True

                until(agreed, lambda: why[0])
                return found[0]

            all_say("good")

            tool.write_text("echo no room left on the planet >&2; exit 1\n")
            house.fails("backup", SERVER, "--kind", "full")
            assert any("mariadb-backup" in reason for reason in all_say("warning", "job-failed").reasons)
            tool.unlink()
            house.backup()
            all_say("good")

            house.server.execute(f"REVOKE REPLICATION SLAVE ON *.* FROM {SERVICE_USER}@localhost")
            _begin_again(catalog.binlogs.stream_state)
            assert all_say("bad", "stream-failed").stream["state"] == "failed"
            house.server.execute(f"GRANT REPLICATION SLAVE ON *.* TO {SERVICE_USER}@localhost")
            _begin_again(catalog.binlogs.stream_state)
            all_say("good")

            house.server.execute(
                "CREATE TABLE shop.broken (id INT PRIMARY KEY, v CHAR(100)) ENGINE=MyISAM",
                "INSERT INTO shop.broken VALUES (1, 'x'), (2, 'y')",
                "FLUSH TABLES",
            )
            rows = Path(house.server.datadir) / "shop/broken.MYD"
            rows.write_bytes(rows.read_bytes()[:50])
            house.fails("backup", SERVER, "--kind", "logical")
            all_say("warning", "job-partial")
            house.server.execute("DROP TABLE shop.broken")
            house.ok("backup", SERVER, "--kind", "logical")
            all_say("good")


def _begin_again(said: Callable[[str], tuple[Any, Any] | None]) -> None:
    """Let the service start the stream's process anew; one that cannot stream ends by itself after a while."""
    row = said(SERVER)
    assert row is not None
    with suppress(ProcessLookupError):
        os.kill(int(row[0]["pid"]), signal.SIGKILL)
