"""The server itself: who sends too much, too slowly or nonsense; TLS; IPv6; and how answers look."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from api import middleware
from api.auth import anybody
from api.middleware import HEADERS
from api.server import HEAD_BYTES, Http, tls_context
from backupd.app.service.api_process import answers
from backupd.model.access import Role
from backupd.model.errors import (
    BackupdError,
    BusyError,
    CatalogError,
    ConfigurationError,
    DamagedError,
    DestinationError,
    NotFoundError,
    Problem,
    RefusedError,
    UsageError,
)
from policies.configuration import Tls
from tests.support.service.house import Office
from tests.support.service.rig import Rig, rig
from tests.support.stores.gate import until

ERRORS: dict[str, tuple[BackupdError, int]] = {
    "usage": (UsageError("m", hint="h"), 422),
    "refused": (RefusedError("m", detail="d", hint="h"), 409),
    "busy": (BusyError("m"), 409),
    "missing": (NotFoundError("m"), 404),
    "catalog": (CatalogError("m"), 503),
    "place": (DestinationError("m"), 502),
    "damaged": (DamagedError("m", ["a", "b"]), 502),
    "many": (
        ConfigurationError([Problem("f.yaml", 3, "physical.full", "wrong"), Problem("f.yaml", 9, "", "odd")]),
        422,
    ),
}


def _trouble(app: FastAPI) -> None:
    """Routes that fail in each way."""
    router = APIRouter(dependencies=[Depends(anybody)])

    @router.get("/trouble/{word}")
    def trouble(word: str) -> None:
        if word in ERRORS:
            raise ERRORS[word][0]
        raise KeyError("password=hunter2 at /secret/place")

    @router.get("/cut-off")
    def cut_off() -> StreamingResponse:
        def parts() -> Iterator[bytes]:
            yield b"begun"
            raise KeyError("in the middle")

        return StreamingResponse(parts())

    @router.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @router.post("/careless")
    async def careless(request: Request) -> None:
        with contextlib.suppress(ClientDisconnect):
            await request.body()
        raise KeyError("after half a body")

    app.include_router(router)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An interface with routes that fail, and its usual patience."""
    with rig(tmp_path_factory.mktemp("api"), app=_trouble) as running:
        yield running


class Impatient(Http):
    head_seconds = 1.0


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An interface with less patience than usual: only for those who are slow on purpose."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("api.server.Http", Impatient)
            patch.setattr(
                middleware.Limits.__init__,
                "__kwdefaults__",
                {"largest": middleware.LARGEST, "sending": 1.0, "taking": 1.0},
            )
            running = stack.enter_context(rig(tmp_path_factory.mktemp("impatient"), app=_trouble))
        yield running


def _connected(house: Rig) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(house.url.rpartition(":")[2])), timeout=240)


def _until_closed(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


@pytest.mark.parametrize("word", ERRORS)
def test_each_error_says_what_the_command_line_says(troubled: Rig, word: str) -> None:
    error, status = ERRORS[word]
    answer = troubled.client().get(f"/trouble/{word}")
    told = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, told["status"]) == (status, status)
    assert (told["message"], told["detail"], told["hint"]) == (error.message, error.detail, error.hint)
    assert told["type"] == f"urn:backupd:problem:{error.problem_type}"
    assert ("retry-after" in answer.headers) is (word in ("busy", "catalog", "place"))


def test_all_problems_of_a_configuration_are_told_at_once_with_their_lines(troubled: Rig) -> None:
    errors = troubled.client().get("/trouble/many").json()["errors"]
    assert [(one["file"], one["line"], one["field"]) for one in errors] == [
        ("f.yaml", 3, "physical.full"),
        ("f.yaml", 9, ""),
    ]


def test_what_nobody_foresaw_is_told_by_a_number_and_without_a_traceback(troubled: Rig) -> None:
    answer = troubled.client().get("/trouble/other")
    assert answer.status_code == 500
    assert answer.json()["message"].startswith("internal error ")
    for word in ("hunter2", "KeyError", "Traceback", "/secret"):
        assert word not in answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_answer_that_breaks_off_does_not_look_whole(troubled: Rig) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        troubled.client().get("/cut-off")
    assert troubled.client().get("/healthz").status_code == 200


def test_every_answer_has_the_headers_that_protect_browsers(troubled: Rig) -> None:
    for path in ("/docs", "/v1/whoami", "/static/backupd.css", "/nothing", "/healthz", "/trouble/usage"):
        answer = troubled.client().get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, (path, name)
        assert "server" not in answer.headers
        assert "cache-control" in answer.headers


def test_the_reference_needs_no_other_host_and_no_script_in_the_page(troubled: Rig) -> None:
    text = troubled.client().get("/docs").text
    assert "POST /v1/restores/plan" in text
    assert "//cdn" not in text
    assert 'src="http' not in text
    assert 'href="http' not in text
    assert "style=" not in text
    assert "<script>" not in text


# -- ETags


def test_who_asks_again_for_what_has_not_changed_gets_no_body(troubled: Rig) -> None:
    client = troubled.client(Role.VIEWER)
    first = client.get("/v1/backups")
    tag = first.headers["etag"]
    for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
        again = client.get("/v1/backups", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get("/v1/backups", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/v1/backups").headers["cache-control"] == "private, no-cache"


# -- too much


def test_a_body_that_is_too_large_is_refused_before_it_is_read(troubled: Rig) -> None:
    client = troubled.client(Role.ADMIN)
    told = client.post("/v1/policies/validate", content=b"x" * (middleware.LARGEST + 1))
    assert (told.status_code, told.json()["type"]) == (413, "urn:backupd:problem:content-too-large")
    with _connected(troubled) as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert _until_closed(one).startswith(b"HTTP/1.1 413")


def test_a_body_in_chunks_is_cut_off_where_it_becomes_too_large(troubled: Rig) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 65536

    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        assert troubled.client().post("/echo", content=parts()).status_code == 413
    assert troubled.client().post("/echo", content=b"x" * middleware.LARGEST).json() == middleware.LARGEST


def test_a_head_that_is_too_long_is_refused(troubled: Rig) -> None:
    with _connected(troubled) as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * HEAD_BYTES)
        assert _until_closed(one).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"\x00" * 40,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ],
)
def test_nonsense_is_400_or_408_and_nothing_else_happens(impatient: Rig, nonsense: bytes) -> None:
    with _connected(impatient) as one:
        one.sendall(nonsense)
        assert _until_closed(one)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 408", b"HTTP/1.1 404")
    assert impatient.client().get("/healthz").status_code == 200


# -- too slow


def test_who_sends_its_head_too_slowly_is_cut_off_and_keeps_nobody_waiting(impatient: Rig) -> None:
    slow = [_connected(impatient) for _ in range(40)]
    for one in slow:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
    # Not after one of them and the next. (A machine that stands still for a moment may be too slow itself.)
    until(lambda: impatient.client().get("/healthz").status_code == 200, seconds=30)
    for one in slow:
        assert _until_closed(one).startswith(b"HTTP/1.1 408")
        one.close()


def test_a_connection_that_says_nothing_is_closed(impatient: Rig) -> None:
    with _connected(impatient) as one:
        assert _until_closed(one).startswith(b"HTTP/1.1 408")


def test_the_second_request_of_a_connection_may_not_be_slow_either(impatient: Rig) -> None:
    with _connected(impatient) as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert one.recv(65536).startswith(b"HTTP/1.1 200")
        one.sendall(b"GET /heal")
        assert b"HTTP/1.1 408" in _until_closed(one)


def test_who_sends_its_body_too_slowly_is_cut_off(impatient: Rig) -> None:
    with _connected(impatient) as one:
        one.sendall(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        assert _until_closed(one).startswith(b"HTTP/1.1 408")


def test_what_nobody_foresaw_is_told_also_behind_half_a_body(impatient: Rig) -> None:
    with _connected(impatient) as one:
        one.sendall(b"POST /careless HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        assert one.recv(65536).startswith(b"HTTP/1.1 500")


# -- the end


def test_who_connected_before_the_end_and_asks_after_it_began_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.LATE_SECONDS", 240.0)
    with rig(tmp_path) as running, _connected(running) as late:
        until(lambda: running.server.server_state.connections)
        running.server.should_exit = True
        until(lambda: running.app.state.broadcaster._closed)
        late.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _until_closed(late).startswith(b"HTTP/1.1 200")


def test_who_connected_and_asks_nothing_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    with rig(tmp_path) as running, _connected(running) as mute:
        until(lambda: running.server.server_state.connections)
        running.server.should_exit = True
        assert _until_closed(mute) == b""


# -- addresses


def test_it_answers_over_ipv6(tmp_path: Path) -> None:
    with rig(tmp_path, host="::1") as running:
        assert running.url.startswith("http://[::1]:")
        answer = running.client(Role.VIEWER).get("/v1/whoami")
        assert (answer.status_code, answer.json()["address"]) == (200, "::1")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8642", 200),
        ("[::1]:8642", 200),
        ("LOCALHOST.", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("localhost@evil.example", 421),
        ("", 421),
        ("[bad", 421),
    ],
)
def test_it_answers_to_its_own_names_only(troubled: Rig, host: str, status: int) -> None:
    assert troubled.client().get("/healthz", headers={"Host": host}).status_code == status


def test_one_address_cannot_take_all_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Http, "most_of_one", 5)
    with rig(tmp_path) as running, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(_connected(running)) for _ in range(5)]
        for connection in slow:
            connection.sendall(b"GET /")
        with _connected(running) as another:
            assert _until_closed(another).startswith(b"HTTP/1.1 503")
        slow[0].sendall(b"healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert _until_closed(slow[0]).startswith(b"HTTP/1.1 200")
        assert running.client().get("/healthz").status_code == 200


# -- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            folder / "key.pem",
            "-out",
            folder / "cert.pem",
        ],
        check=True,
        capture_output=True,
    )
    return Tls(certificate=folder / "cert.pem", key=folder / "key.pem")


def test_with_tls_browsers_are_kept_to_it_and_old_versions_are_refused(tmp_path: Path, certificate: Tls) -> None:
    extra = f"api: {{tls: {{certificate: {certificate.certificate}, key: {certificate.key}}}}}\n"
    with rig(Office(tmp_path).write(extra=extra)) as running:
        trust = ssl.create_default_context(cafile=str(certificate.certificate))
        with httpx.Client(base_url=running.url, verify=trust) as client:
            answer = client.get("/healthz")
        assert (answer.status_code, "strict-transport-security" in answer.headers) == (200, True)
        assert running.app.state.site.secure
        here = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        assert answers(here, tls=True, seconds=240)
        assert not answers(here, tls=False, seconds=5), "that is no HTTP"
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with _connected(running) as plain, pytest.raises(ssl.SSLError):
            old.wrap_socket(plain)


def test_a_certificate_that_cannot_be_used_is_told_in_words(tmp_path: Path, certificate: Tls) -> None:
    with pytest.raises(ConfigurationError, match="certificate or key cannot be used"):
        tls_context(Tls(certificate=tmp_path / "none.pem", key=certificate.key))
    with pytest.raises(ConfigurationError):
        tls_context(Tls(certificate=certificate.key, key=certificate.key))
