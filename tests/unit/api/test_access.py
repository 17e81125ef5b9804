"""Who comes in, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from api.site import ALL, FREE, Site, Throttle
from backupd.app.context.access import command_line, create_token, log_in, revoke_token
from backupd.model.access import Role
from backupd.model.errors import NotFoundError, UnauthenticatedError, UsageError
from tests.support.service.house import Clock
from tests.support.service.rig import Rig, rig

WHO = "/v1/whoami"


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock(datetime(2026, 11, 21, 9, tzinfo=UTC))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[Rig]:
    """An interface whose clock the tests move."""
    with rig(tmp_path_factory.mktemp("api"), clock=clock) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh_throttle(moved: Rig, clock: Clock) -> None:
    """Its time passes when a test says so: on a slow machine guesses are no fewer."""
    site: Site = moved.app.state.site
    site.throttle = Throttle(clock.passing)


def _asks(moved: Rig, secret: str) -> httpx.Response:
    return moved.client().get(WHO, headers={"Authorization": f"Bearer {secret}"})


def test_without_a_token_nothing_beneath_v1_is_told_not_even_what_there_is(moved: Rig) -> None:
    for path in (WHO, "/v1/backups", "/v1/no-such-thing"):
        answer = moved.client().get(path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["content-type"] == "application/problem+json"
        assert "backupd token create" in answer.json()["hint"]


def test_a_token_says_who_asks(moved: Rig) -> None:
    token, secret = create_token(moved.wiring, command_line(), "grafana", Role.VIEWER)
    answer = _asks(moved, secret).json()
    assert (answer["name"], answer["role"], answer["via"], answer["token"]) == ("grafana", "viewer", "api", token.id)


def test_no_secret_is_kept_anywhere(moved: Rig) -> None:
    _token, secret = create_token(moved.wiring, command_line(), "once", Role.VIEWER)
    base = Path(str(moved.settings.file)).parent
    for file in base.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer  x y", "Basic cm9vdDpyb290", "Token x"])
def test_what_is_no_bearer_token_is_401(moved: Rig, header: str) -> None:
    assert moved.client().get(WHO, headers={"Authorization": header}).status_code == 401


def test_a_token_counts_until_it_expires(moved: Rig, clock: Clock) -> None:
    _token, secret = create_token(
        moved.wiring, command_line(), "short", Role.VIEWER, expires_at=clock() + timedelta(hours=1)
    )
    assert _asks(moved, secret).status_code == 200
    clock.now += timedelta(hours=1)
    answer = _asks(moved, secret)
    assert answer.status_code == 401
    assert "expired" in answer.json()["message"]


def test_a_token_counts_until_it_is_revoked(moved: Rig) -> None:
    token, secret = create_token(moved.wiring, command_line(), "gone", Role.VIEWER)
    assert _asks(moved, secret).status_code == 200
    revoke_token(moved.wiring, command_line(), token.id)
    assert _asks(moved, secret).status_code == 401
    entries = moved.catalog.audit.list(limit=2)
    assert [entry.action for entry in entries] == ["token-revoked", "token-created"]


def test_a_token_of_one_server_does_not_know_of_others(moved: Rig) -> None:
    secret = moved.secret(Role.ADMIN, {"db1"})
    client = moved.client()
    client.headers["Authorization"] = f"Bearer {secret}"
    there, not_there = client.get("/v1/servers/other"), client.get("/v1/backups?server=other")
    assert {there.status_code, not_there.status_code} == {404}
    assert "db1" not in there.text


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"name": ""}, UsageError),
        ({"name": "a\nb"}, UsageError),
        ({"name": "x" * 101}, UsageError),
        ({"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, UsageError),
        ({"servers": ()}, UsageError),
        ({"servers": ("nowhere",)}, NotFoundError),
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(moved: Rig, wrong: dict[str, object], error: type[Exception]) -> None:
    before = len(moved.catalog.tokens.list())
    asked: dict[str, object] = {"name": "n", **wrong}
    with pytest.raises(error):
        create_token(moved.wiring, command_line(), role=Role.VIEWER, **asked)  # type: ignore[arg-type]  # on purpose
    assert len(moved.catalog.tokens.list()) == before
    assert moved.catalog.audit.list(limit=1)[0].outcome == "refused"


# -- guessing


def test_who_guesses_has_to_wait_and_who_has_a_right_token_is_let_in_from_there_all_the_while(moved: Rig) -> None:
    right = moved.secret(Role.VIEWER)
    answers = [_asks(moved, f"backupd_wrong{number}").status_code for number in range(FREE + 2)]
    assert answers[: FREE + 1] == [401] * (FREE + 1)
    late = _asks(moved, "backupd_wrong")
    assert (answers[-1], late.status_code) == (429, 429)
    assert 1 <= int(late.headers["retry-after"]) <= 6
    assert _asks(moved, right).status_code == 200
    site: Site = moved.app.state.site
    for number in range(ALL):
        site.throttle.failed(f"198.51.{number}.1")
    session, _csrf = _session(moved)
    assert moved.client().get(WHO, headers=session).status_code == 200
    assert moved.client().get("/v1/whoami").status_code == 401, "who sends no token is only told that one is needed"


def test_an_expired_token_is_no_guess(moved: Rig) -> None:
    token, secret = create_token(moved.wiring, command_line(), "old", Role.VIEWER)
    revoke_token(moved.wiring, command_line(), token.id)
    assert {_asks(moved, secret).status_code for _ in range(FREE * 3)} == {401}


def test_guesses_cost_more_and_more_and_are_forgotten_by_a_right_token() -> None:
    clock = Clock(datetime(2026, 11, 21, tzinfo=UTC))
    throttle = Throttle(clock.passing)
    costs = [throttle.failed("192.0.2.7") for _ in range(FREE + 8)]
    assert costs[:FREE] == [0.0] * FREE
    assert costs[FREE : FREE + 4] == [5.0, 10.0, 20.0, 40.0]
    assert max(costs) == 300.0
    assert throttle.wait("192.0.2.7") == 300.0
    assert throttle.wait("192.0.2.8") == 0.0
    clock.sleep(timedelta(seconds=300))
    assert throttle.wait("192.0.2.7") == 0.0
    throttle.passed("192.0.2.7")
    assert throttle.failed("192.0.2.7") == 0.0


def test_one_net_of_ipv6_is_one_guesser() -> None:
    throttle = Throttle()
    for number in range(FREE + 1):
        throttle.failed(f"2001:db8::{number}")
    assert throttle.wait("2001:db8::ffff") > 0
    assert throttle.wait("2001:db8:0:1::1") == 0
    assert throttle.wait("::ffff:192.0.2.7") == 0


def test_guesses_from_everywhere_slow_strangers_down_and_nobody_who_came_in_before() -> None:
    clock = Clock(datetime(2026, 11, 21, tzinfo=UTC))
    throttle = Throttle(clock.passing)
    throttle.passed("192.0.2.7")
    for number in range(ALL + 5):
        throttle.failed(f"198.51.{number}.1")
    assert throttle.wait("203.0.113.9") > 0
    assert throttle.wait("192.0.2.7") == 0
    clock.sleep(timedelta(seconds=1))
    assert throttle.wait("203.0.113.9") == 0


# -- the page's sessions


def _session(moved: Rig, role: Role = Role.ADMIN) -> tuple[dict[str, str], str]:
    session, cookie, _actor = log_in(moved.wiring, moved.secret(role), "127.0.0.1")
    return {"Cookie": f"backupd={cookie}"}, session.csrf


def test_a_session_reads_without_and_changes_only_with_the_word_of_its_page(moved: Rig) -> None:
    headers, csrf = _session(moved)
    client = moved.client()
    assert client.get(WHO, headers=headers).json()["via"] == "page"
    for wrong in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": csrf + "x"}):
        assert client.post("/v1/policies/reload", headers={**headers, **wrong}).status_code == 403
    before = len(moved.reloads)
    assert client.post("/v1/policies/reload", headers={**headers, "X-CSRF-Token": csrf}).status_code < 300
    assert len(moved.reloads) == before + 1


def test_another_sites_page_changes_nothing_with_our_cookie(moved: Rig) -> None:
    headers, csrf = _session(moved)
    for site in ("cross-site", "same-site"):
        answer = moved.client().post(
            "/v1/policies/reload", headers={**headers, "X-CSRF-Token": csrf, "Sec-Fetch-Site": site}
        )
        assert answer.status_code == 403


def test_a_session_ends_with_its_time_and_with_its_token(moved: Rig, clock: Clock) -> None:
    headers, _csrf = _session(moved)
    token, secret = create_token(moved.wiring, command_line(), "page", Role.VIEWER)
    _other, cookie, _actor = log_in(moved.wiring, secret, "127.0.0.1")
    theirs = {"Cookie": f"backupd={cookie}"}
    assert moved.client().get(WHO, headers=theirs).status_code == 200
    revoke_token(moved.wiring, command_line(), token.id)
    assert moved.client().get(WHO, headers=theirs).status_code == 401
    clock.now += timedelta(hours=12)
    assert moved.client().get(WHO, headers=headers).status_code == 401


def test_nobody_logs_in_with_what_is_no_token(moved: Rig) -> None:
    with pytest.raises(UnauthenticatedError):
        log_in(moved.wiring, "backupd_guess", "127.0.0.1")


def test_a_browser_that_is_not_logged_in_is_led_to_the_login_and_back(moved: Rig) -> None:
    answer = moved.client().get("/jobs?server=db1", headers={"Accept": "text/html"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=%2Fjobs%3Fserver%3Ddb1"


def test_refused_changes_and_failed_logins_stand_in_the_audit(moved: Rig) -> None:
    moved.client(Role.VIEWER).post("/v1/policies/reload")
    refused = moved.catalog.audit.list(action="access-refused", limit=1)[0]
    assert (refused.role, refused.outcome, refused.subject) == ("viewer", "refused", "POST /v1/policies/reload")
    _asks(moved, "backupd_guess")
    moved.app.state.site.aside.submit(lambda: None).result()
    assert moved.catalog.audit.list(action="login-failed", limit=1)[0].address == "127.0.0.1"
