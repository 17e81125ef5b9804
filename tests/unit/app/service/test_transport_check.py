"""A server that is reached without a word on TLS: told once, until there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.alerts.rules import TLS
from backupd.app.context.settings import load_settings
from backupd.app.context.settings_problems import report_transport
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import open_catalog
from backupd.engine.sql.option_files import Tls
from tests.support.catalog.configuration_files import POLICY, problems, write

CONFIGURATION = """\
catalog: sqlite:///{folder}/catalog.db
servers:
  far: {{policy: gold, host: db1.example.com{tls}}}
  near: {{policy: gold, host: 127.0.0.1, port: 3307}}
  local: {{policy: gold, socket: /run/mysqld/mysqld.sock}}
destinations:
  local: {{type: filesystem, path: /srv/backups}}
encryption: {{gnupg_home: gnupg, recipients: [ops@example.com]}}
"""


def configured(folder: Path, tls: str) -> Path:
    return write(folder, CONFIGURATION.format(folder=folder, tls=tls), gold=POLICY)


def test_one_incident_until_somebody_chose(tmp_path: Path) -> None:
    settings = load_settings(configured(tmp_path, ""))
    with open_catalog(settings.catalog) as catalog:

        def told(kind: str) -> list[str]:
            return [event.server for event in catalog.events.list(kind=kind)]

        for _ in range(2):
            report_transport(Wiring(settings, catalog))
        assert told(TLS.broken) == ["far"]
        (event,) = catalog.events.list(kind=TLS.broken)
        assert "`tls: verify-full`" in event.hint
        assert "its backups continue" in event.hint
        for tls in (", tls: off", ", tls: verify-full, tls_ca: /etc/ssl/ca.pem"):
            report_transport(Wiring(load_settings(configured(tmp_path, tls)), catalog))
            assert (told(TLS.broken), told(TLS.mended)) == (["far"], ["far"])
        asked = load_settings(configured(tmp_path, ", tls: verify-full, tls_ca: /x.pem")).server("far").connection()
        assert (asked.tls, asked.ssl) == (Tls.VERIFY_FULL, {"ca": "/x.pem", "verify-server-cert": ""})


@pytest.mark.parametrize(
    ("tls", "why"),
    [(", tls: verify", "tls"), (", tls: off, tls_ca: /ca.pem", "tls_ca"), (", tls_ca: /ca.pem", "tls_ca")],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, tls: str, why: str) -> None:
    assert any(why in field + message for _file, _line, field, message in problems(configured(tmp_path, tls)))


def test_a_socket_needs_none(tmp_path: Path) -> None:
    text = CONFIGURATION.format(folder=tmp_path, tls="").replace("mysqld.sock}", "mysqld.sock, tls: off}")
    ((_file, _line, _field, message),) = problems(write(tmp_path, text, gold=POLICY))
    assert "tls is for a host" in message
