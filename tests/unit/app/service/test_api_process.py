"""The interface's process, started and watched by the service: real processes on a real socket."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.service import api_process as apiwatch
from backupd.app.service.api_process import ApiWatch, answers, listen
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.event import Event
from tests.support.service.house import Office
from tests.support.service.serving import held_port


def _until(what: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


@pytest.fixture
def catalog(office: Office) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{office.base}/catalog.db") as opened:
        yield opened


def _settings(office: Office, port: int, more: str = "") -> Settings:
    return office.write(extra=f'api: {{listen: "127.0.0.1:{port}"{more}}}\n')


def _events(catalog: Catalog) -> list[Event]:
    return [event for event in catalog.events.list() if event.kind.startswith("api-")]


def _get(url: str) -> int:
    """The status of an answer, on a connection of its own."""
    return httpx.get(url, timeout=240).status_code


def test_it_is_offered_outlives_its_process_and_changes_hands_without_losing_a_request(
    office: Office, catalog: Catalog, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apiwatch, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(apiwatch, "REPEATED", 1)
    monkeypatch.setattr(apiwatch, "HEALTHY", 0.5)
    url = f"http://127.0.0.1:{port}"
    wiring = Wiring(_settings(office, port), catalog)
    with ApiWatch(wiring) as watch:
        _until(watch.running)
        first = watch.running()
        assert first is not None
        assert _get(f"{url}/healthz") == 200
        assert _get(f"{url}/v1/servers") == 401

        # Settings with which no process answers leave the one before at work.
        bad = f", tls: {{certificate: {office.base}/none.pem, key: {office.base}/none.key}}"
        watch.reload(replace(wiring, settings=_settings(office, port, bad)))
        _until(lambda: _events(catalog))
        assert "certificate or key cannot be used" in _events(catalog)[0].detail
        assert watch.running() == first
        assert _get(f"{url}/healthz") == 200
        watch.reload(wiring)
        # By then the next try with the bad settings may have begun; that it fails is told once more, and what follows.
        _until(lambda: watch._state.next is None and _events(catalog)[0].kind == "api-recovered")
        assert watch.running() == first, "with the settings that it has already nothing changes hands"

        watch.reload(replace(wiring, settings=_settings(office, port, ", session: 1h")))
        answered = 0
        while watch.running() in (first, None):  # every request on a connection of its own, all the while
            assert _get(f"{url}/healthz") == 200
            answered += 1
        second = watch.running()
        assert answered > 3
        assert second is not None
        _until(lambda: not Path(f"/proc/{first}").exists())
        assert _get(f"{url}/healthz") == 200

        os.kill(second, signal.SIGKILL)
        # The socket is the service's: who connects meanwhile waits, and is answered by the next process.
        assert _get(f"{url}/healthz") == 200
        _until(lambda: watch.running() not in (None, second))
        hung = watch.running()
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)  # before anybody loses patience: one that works may be slow
        for name, value in (("TICK", 0.05), ("ASKED_EVERY", 0.1), ("HEARING", 0.3), ("UNHEARD", 2)):
            monkeypatch.setattr(apiwatch, name, value)
        watch._state.current.ask = 0.0  # type: ignore[union-attr]  # it runs
        _until(lambda: any("did not answer" in one.message for one in _events(catalog)))
        monkeypatch.setattr(apiwatch, "HEARING", 240.0)
        _until(lambda: watch.running() not in (None, hung))
        last = watch.running()
    assert not Path(f"/proc/{last}").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")
    told = [event.kind for event in reversed(_events(catalog))]
    assert told[:3] == ["api-failed", "api-recovered", "api-failed"], "by the settings, then by the kill"


def test_a_probe_hears_who_speaks_http_and_nobody_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()[:2]
        assert not answers(address, tls=False, seconds=0.1)
        assert not answers(address, tls=True, seconds=0.1)
    assert not answers(address, tls=False, seconds=0.1)


def test_a_port_that_another_program_has_is_told_once_and_tried_until_it_is_free(
    office: Office, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apiwatch, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(apiwatch, "HEALTHY", 0.1)
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    with ApiWatch(Wiring(_settings(office, port), catalog)) as watch:
        _until(lambda: _events(catalog))
        assert watch.running() is None
        told = _events(catalog)[0]
        assert told.kind == "api-failed"
        assert f"127.0.0.1:{port}" in told.message
        other.close()
        _until(watch.running)
        _until(lambda: len(_events(catalog)) == 2)
    assert [event.kind for event in _events(catalog)] == ["api-recovered", "api-failed"]


def test_it_is_not_offered_where_that_is_not_wanted(office: Office, catalog: Catalog, port: int) -> None:
    with ApiWatch(Wiring(_settings(office, port, ", enabled: false"), catalog)) as watch:
        watch.step()
        assert watch.running() is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz")


@pytest.mark.parametrize(
    ("place", "reach"),
    [("127.0.0.1", ["127.0.0.1"]), ("[::1]", ["::1"]), ("[::]", ["127.0.0.1", "::1"]), ("localhost", ["localhost"])],
)
def test_it_listens_where_the_configuration_says(place: str, reach: list[str]) -> None:
    with listen(f"{place}:0") as listener:
        for host in reach:
            socket.create_connection((host, listener.getsockname()[1]), timeout=60).close()


def test_a_place_that_is_none_is_told_in_words() -> None:
    with pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.1:8642"):
        listen("192.0.2.1:8642")
