"""What `check` says about where the page is reached, and the links that lead there."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.alerting.sender import site_of
from backupd.app.context.api_address import expiry, findings
from backupd.app.context.settings import Settings, load_settings
from backupd.app.service.facade import Service
from tests.support.catalog.configuration_files import CONFIGURATION, write
from tests.support.service.house import Office
from tests.support.service.mail_server import certificate

NOW = datetime(2026, 11, 22, 3, tzinfo=UTC)
MAIL = "alerts: {email: {smtp: 'smtp://localhost', from: a@example.com, to: [b@example.com]}}\n"


def settings(folder: Path, api: str) -> Settings:
    return load_settings(write(folder, f"{CONFIGURATION}{MAIL}api: {{{api}}}\n"))


def said(folder: Path, api: str) -> list[str]:
    return [finding.message for finding in findings(settings(folder, api), NOW)]


@pytest.mark.parametrize(
    "api",
    [
        "enabled: false, listen: '0.0.0.0:8642'",
        "listen: '127.0.0.1:8642', metrics: token",
        "listen: '[::1]:8642', metrics: open",
        "listen: '10.0.0.1:8642', url: 'https://backup.example.com'",
    ],
)
def test_nothing_is_said_where_tokens_stay_here_or_a_proxy_stands_in_front(tmp_path: Path, api: str) -> None:
    assert said(tmp_path, api) == []


@pytest.mark.parametrize("listen", ["127.0.0.1:8642", "[::1]:8642", "localhost:8642"])
def test_what_every_local_user_can_read_is_said(tmp_path: Path, listen: str) -> None:
    (one,) = findings(settings(tmp_path, f"listen: '{listen}'"), NOW)
    assert (one.severity, one.subject) == ("ok", "api")
    assert f"every local user can read at http://{listen}/metrics, without a token" in one.message
    assert "api.metrics: token" in one.message


@pytest.mark.parametrize("listen", ["10.0.0.1:8642", "[fd00::1]:8642", "backup.example.com:8642"])
@pytest.mark.parametrize("url", ["", ", url: 'http://backup.example.com:8642'"])
def test_tokens_in_the_clear_are_warned_of(tmp_path: Path, listen: str, url: str) -> None:
    (one,) = findings(settings(tmp_path, f"listen: '{listen}'{url}"), NOW)
    assert (one.severity, one.subject) == ("warning", "api")
    assert "in the clear" in one.message
    assert listen in one.message
    assert "api.tls" in one.hint


def test_check_says_so(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.write(extra="api: {listen: '10.0.0.1:8642'}\n")
    with Service.open(office.file) as service:
        (told,) = [finding.message for finding in service.servers.check(None) if finding.subject == "api"]
    assert "in the clear" in told


@pytest.mark.parametrize("listen", ["0.0.0.0:8642", "[::]:8642"])
def test_links_name_this_host_where_every_address_is_listened_on(tmp_path: Path, listen: str) -> None:
    mine = f"http://{socket.gethostname()}:8642"
    assert site_of(settings(tmp_path, f"listen: '{listen}'")).page("jobs/1") == f"{mine}/jobs/1"
    clear, guessed = said(tmp_path, f"listen: '{listen}'")
    assert "in the clear" in clear
    assert mine in guessed
    named = f"listen: '{listen}', url: 'https://backup.example.com'"
    assert site_of(settings(tmp_path, named)).page("jobs/1") == "https://backup.example.com/jobs/1"
    assert said(tmp_path, named) == []


def test_a_certificate_that_ends_soon_or_has_ended_or_is_none_is_told(tmp_path: Path) -> None:
    pem = certificate(tmp_path)
    end = expiry(pem)
    assert timedelta(0) < end - datetime.now(UTC) < timedelta(days=400)
    api = f"listen: '0.0.0.0:8642', url: 'https://b.example.com', tls: {{certificate: {pem}, key: {pem}}}"
    here = settings(tmp_path, api)
    assert findings(here, end - timedelta(days=15)) == []
    (soon,) = findings(here, end - timedelta(days=13))
    (late,) = findings(here, end)
    assert (soon.severity, late.severity) == ("warning", "error")
    assert "reload" in soon.hint
    text = pem.read_text()
    for broken in ("", "no certificate", text[:200] + "-----END CERTIFICATE-----\n"):
        pem.write_text(broken)
        (none,) = findings(here, NOW)
        assert (none.severity, "cannot be read" in none.message) == ("error", True), broken
