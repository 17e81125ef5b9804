"""Coming in by the page and going out, and what the buttons do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from api.site import FREE, Throttle
from backupd.app.context.access import command_line, create_token, revoke_token
from backupd.model.access import Role
from backupd.model.backup_record import HoldKind
from backupd.model.job import JobKind, JobRecord, JobState, RestoreRecord
from backupd.model.text import new_id
from backupd.process.run_context import utc_now
from tests.support.service.house import Clock
from tests.support.service.rig import Rig, rig
from tests.support.service.stage import CRM, LEGACY, SHOP, Stage, settings_of
from tests.support.service.visitor import stranger, visitor
from tests.support.stores.folders import short_directory


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Rig, Stage]]:
    stages: list[Stage] = []
    with (
        short_directory() as base,
        rig(
            settings_of(base), clock=Clock(utc_now()), prepared=lambda wiring: stages.append(Stage(wiring).set())
        ) as running,
    ):
        yield running, stages[0]


@pytest.fixture
def site(scene: tuple[Rig, Stage]) -> Rig:
    return scene[0]


def test_a_token_opens_a_session_whose_cookie_no_script_and_no_other_site_can_use(site: Rig) -> None:
    http = stranger(site)
    led = http.get("/jobs?server=x")
    assert (led.status_code, led.headers["Location"]) == (303, "/login?next=%2Fjobs%3Fserver%3Dx")
    entered = http.post("/login", data={"token": f" {site.secret(Role.VIEWER)} ", "next": "/jobs?server=x"})
    assert (entered.status_code, entered.headers["Location"]) == (303, "/jobs?server=x")
    cookie = entered.headers.get_list("Set-Cookie")[-1]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/")), cookie
    assert site.secret(Role.VIEWER) not in str(entered.headers)
    assert http.get("/").status_code == 200
    assert http.get("/login").headers["Location"] == "/"


def test_a_wrong_token_is_told_and_too_many_of_them_have_to_wait_but_no_right_one(tmp_path: Path) -> None:
    with rig(tmp_path) as own:
        own.app.state.site.throttle = Throttle(lambda: 0.0)  # however slow this machine is
        http = stranger(own)
        wrong = [http.post("/login", data={"token": "backupd_wrong"}) for _ in range(FREE + 1)]
        assert {answer.status_code for answer in wrong} == {403}
        assert "this token is unknown" in wrong[0].text
        assert "backupd_wrong" not in wrong[0].text
        waits = http.post("/login", data={"token": "backupd_wrong"})
        assert waits.status_code == 429
        assert int(waits.headers["Retry-After"]) >= 1
        assert "too many wrong tokens" in waits.text
        assert "Set-Cookie" not in waits.headers
        assert "Set-Cookie" in http.post("/login", data={"token": own.secret(Role.ADMIN)}).headers


def test_behind_a_proxy_with_tls_the_cookie_is_of_tls_alone_and_metrics_need_a_token(tmp_path: Path) -> None:
    with rig(tmp_path, extra="api: {url: 'https://backup.example.com'}\n") as own:
        http = stranger(own)
        entered = http.post("/login", data={"token": own.secret(Role.ADMIN)})
        assert entered.headers["Set-Cookie"].startswith("__Host-backupd=")
        assert "; Secure" in entered.headers["Set-Cookie"]
        assert "max-age" in entered.headers["Strict-Transport-Security"]
        assert http.get("/metrics", headers={"Accept": "text/plain"}).status_code == 401


def test_another_site_cannot_log_anybody_in(site: Rig) -> None:
    http = stranger(site)
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = http.post("/login", data={"token": site.secret(Role.VIEWER)}, headers=headers)
        assert answer.status_code == 403
        assert "Set-Cookie" not in answer.headers


def test_after_logging_out_the_cookie_is_worth_nothing_wherever_it_was_kept(site: Rig) -> None:
    somebody = visitor(site, Role.ADMIN)
    kept = dict(somebody.http.cookies)
    left = somebody.send("/logout")
    assert left.headers["Location"] == "/login?done=logged-out"
    assert "You are logged out" in somebody.get("/login?done=logged-out").text
    thief = stranger(site)
    thief.cookies.update(kept)
    assert thief.get("/").headers["Location"] == "/login"


def test_logging_in_again_ends_the_session_of_before(site: Rig) -> None:
    somebody = visitor(site, Role.VIEWER)
    before = dict(somebody.http.cookies)
    somebody.http.post("/login", data={"token": site.secret(Role.OPERATOR)})
    assert dict(somebody.http.cookies) != before
    thief = stranger(site)
    thief.cookies.update(before)
    assert thief.get("/").status_code == 303


def test_a_session_ends_with_its_token_and_with_its_time(site: Rig) -> None:
    actor = command_line()
    token, secret = create_token(site.wiring, actor, "short", Role.VIEWER)
    http = stranger(site)
    http.post("/login", data={"token": secret})
    assert http.get("/").status_code == 200
    revoke_token(site.wiring, actor, token.id)
    assert http.get("/").status_code == 303
    _token, secret = create_token(
        site.wiring, actor, "hour", Role.VIEWER, expires_at=site.wiring.clock() + timedelta(hours=1)
    )
    assert http.post("/login", data={"token": secret}).status_code == 303
    assert http.get("/").status_code == 200
    clock = site.wiring.clock
    assert isinstance(clock, Clock)
    clock.sleep(timedelta(hours=2))
    try:
        assert http.get("/").status_code == 303
    finally:
        clock.sleep(timedelta(hours=-2))


def test_what_was_done_is_told_by_words_of_ours_alone(site: Rig) -> None:
    somebody = visitor(site, Role.VIEWER)
    assert "Kept: no rule deletes this backup" in somebody.get("/jobs?done=kept").text
    assert "your account is in danger" not in somebody.get("/jobs?done=your account is in danger").text


def test_an_operators_buttons_queue_jobs_in_their_name(scene: tuple[Rig, Stage]) -> None:
    site, _stage = scene
    somebody = visitor(site, Role.OPERATOR)
    name = next(token.name for token in site.catalog.tokens.list() if token.role is Role.OPERATOR)
    for kind in (JobKind.FULL, JobKind.LOGICAL, JobKind.TEST_RESTORE, JobKind.VERIFY):
        server = SHOP if kind is JobKind.LOGICAL else CRM
        answer = somebody.send(f"/servers/{server}/jobs", {"kind": str(kind)})
        assert answer.status_code == 303, answer.text
        job = site.catalog.jobs.get(answer.headers["Location"].rpartition("/")[2])
        assert (job.kind, job.server, job.state, job.requested_by) == (kind, server, JobState.QUEUED, name)
    assert somebody.send(f"/servers/{CRM}/jobs", {"kind": "restore"}).status_code == 422
    assert somebody.send(f"/jobs/{job.id}/cancel").headers["Location"] == f"/jobs/{job.id}?done=cancelled"
    assert site.catalog.jobs.get(job.id).state is JobState.CANCELLED
    again = somebody.send(f"/jobs/{job.id}/cancel")
    assert again.status_code == 409
    assert "is cancelled" in again.text


def test_an_admins_buttons_hold_pause_and_let_go(scene: tuple[Rig, Stage]) -> None:
    site, _stage = scene
    admin = visitor(site, Role.ADMIN)
    for kind, back in ((HoldKind.HOLD, "held"), (HoldKind.PAUSE, "paused")):
        assert admin.send(f"/servers/{SHOP}/holds", {"kind": str(kind), "reason": " "}).status_code == 422
        told = admin.send(f"/servers/{SHOP}/holds", {"kind": str(kind), "reason": "audit"})
        assert told.headers["Location"].startswith(f"/servers/{SHOP}?done={back}")
        assert [one.reason for one in site.catalog.holds.of(SHOP, kind)] == ["audit"]
        page = admin.get(f"/servers/{SHOP}").text
        assert ("Release the hold" if kind is HoldKind.HOLD else "Resume") in page
        assert admin.send(f"/servers/{SHOP}/holds/release", {"kind": str(kind)}).status_code == 303
        assert not site.catalog.holds.of(SHOP, kind)
    assert admin.send(f"/servers/{SHOP}/holds", {"kind": "stop"}).status_code == 422


def test_an_admin_makes_a_token_that_is_shown_once_and_revokes_it(scene: tuple[Rig, Stage]) -> None:
    site, _stage = scene
    admin = visitor(site, Role.ADMIN)
    wrong = admin.send("/tokens", {"name": "grafana", "role": "viewer", "expires": "soon"})
    assert wrong.status_code == 422
    assert 'value="grafana"' in wrong.text, "what was filled in stays"
    made = admin.send("/tokens", {"name": "grafana", "role": "viewer", "expires": "90d", "servers": CRM})
    token = next(one for one in site.catalog.tokens.list() if one.name == "grafana")
    assert (token.role, token.servers) == (Role.VIEWER, frozenset({CRM}))
    assert made.headers["Cache-Control"] == "no-store"
    secret = made.text.partition('<code class="secret">')[2].partition("<")[0]
    assert stranger(site).post("/login", data={"token": secret}).status_code == 303
    assert secret not in admin.get("/tokens").text
    assert admin.send(f"/tokens/{token.id}/revoke").headers["Location"] == "/tokens?done=token-revoked"
    assert stranger(site).post("/login", data={"token": secret}).status_code == 403


def test_the_rules_are_applied_as_a_job_and_only_by_an_admin(scene: tuple[Rig, Stage]) -> None:
    site, _stage = scene
    assert "Apply the rules" not in visitor(site, Role.OPERATOR).get(f"/servers/{LEGACY}/retention").text
    admin = visitor(site, Role.ADMIN)
    assert "full backup 1 of the newest 3" in admin.get(f"/servers/{CRM}/retention").text
    started = admin.send(f"/servers/{CRM}/retention", {"really": "yes"})
    job = site.catalog.jobs.get(started.headers["Location"].rpartition("/")[2])
    assert (job.kind, job.arguments) == (JobKind.RETENTION, {"really": True})


def test_the_service_is_asked_to_read_its_files_again(site: Rig) -> None:
    before = len(site.reloads)
    assert visitor(site, Role.ADMIN).send("/policies/reload").headers["Location"] == "/policies?done=policies-reloaded"
    assert len(site.reloads) == before + 1


def test_a_policy_is_checked_line_by_line_and_no_file_is_written(site: Rig) -> None:
    somebody = visitor(site, Role.VIEWER)
    folder = site.settings.configuration.policies
    files = {path: path.read_text() for path in folder.iterdir()}
    checked = somebody.send(
        "/policies/validate",
        {"name": "gold", "text": 'physical: {full: "0 25 * * *"}\ndestinations: {required: [vault]}\nretentoin: {}\n'},
    )
    assert checked.status_code == 422
    for line in (1, 2, 3):
        assert f'<a href="#L{line}">line {line}</a>' in checked.text
    assert somebody.send("/policies/validate", {"text": files[folder / "gold.yaml"]}).status_code == 200
    assert {path: path.read_text() for path in folder.iterdir()} == files
    assert somebody.get("/policies/nothing").status_code == 404


def test_a_file_that_was_changed_and_not_read_again_is_shown_as_not_in_force(site: Rig) -> None:
    somebody = visitor(site, Role.VIEWER)
    folder = site.settings.configuration.policies
    gold, silver = folder / "gold.yaml", folder / "silver.yaml"
    text, broken = gold.read_text(), silver.read_text()
    unread = "changed, not read again"

    def told(name: str) -> str:
        return somebody.get(f"/policies/{name}").text

    try:
        gold.write_text("# a remark changes nothing\n" + text)
        assert unread not in somebody.get("/policies").text
        assert "changed since" not in told("gold") + told("silver")
        gold.write_text(text.replace("rpo: 60s", "rpo: 5m"))
        assert unread in somebody.get("/policies").text
        assert "and the version below is not in force. The version read before is." in told("gold")
        gold.write_text(text.replace("rpo: 60s", "rpo: soon"))
        assert "cannot be used as it is now; what was read before is in force" in told("gold")
        assert 'id="L9" class="line-bad"' in told("gold")
        gold.unlink()
        assert "The file is gone, empty or cannot be read" in told("gold")
        silver.write_text(text)
        mended = told("silver")
        assert "and the version below is not in force." in mended
        assert "runs until it is mended and read again" in mended
        assert "line-bad" not in mended, "what was wrong stood in another text"
    finally:
        gold.write_text(text)
        silver.write_text(broken)
    assert unread not in somebody.get("/policies").text


def test_a_question_that_cannot_be_planned_keeps_its_answers_and_says_why(site: Rig) -> None:
    somebody = visitor(site, Role.VIEWER)
    answer = somebody.send(
        "/restore",
        {
            "server": SHOP,
            "what": "whole",
            "when": "time",
            "at": "2001-01-01 00:00",
            "datadir": "/srv/new",
            "start": "yes",
        },
    )
    assert answer.status_code in (404, 409), answer.text
    assert 'role="alert"' in answer.text
    for kept in ('value="2001-01-01 00:00"', 'value="/srv/new"', 'name="start" value="yes" checked'):
        assert kept in answer.text
    found = somebody.send("/restore", {"server": SHOP, "step": "search", "tables": "shop.orders"})
    assert found.headers["Location"] == f"/restore/search?server={SHOP}&table=shop.orders"


def test_a_plan_is_shown_to_whoever_has_its_address_and_started_by_operators_only(site: Rig) -> None:
    folder = site.settings.needs_restore().folders[0]
    viewer, operator = visitor(site, Role.VIEWER), visitor(site, Role.OPERATOR)
    made = viewer.send("/restore", {"server": CRM, "what": "whole", "when": "latest", "datadir": f"{folder}/crm"})
    address = made.headers["Location"]
    assert "Your role may plan restores, but not start them" in viewer.get(address).text
    assert viewer.send(address).status_code == 403
    assert "Start the restore" in operator.get(address).text
    clock = site.wiring.clock
    assert isinstance(clock, Clock)
    clock.sleep(timedelta(hours=2))
    try:
        assert operator.send(address).status_code == 404, "it was a plan for an hour"
    finally:
        clock.sleep(timedelta(hours=-2))


def test_nobody_is_offered_to_start_a_plan_that_goes_nowhere(scene: tuple[Rig, Stage]) -> None:
    site, stage = scene
    viewer, operator = visitor(site, Role.VIEWER), visitor(site, Role.OPERATOR)
    question = {"server": CRM, "what": "whole", "when": "latest"}
    made = viewer.send("/restore", question).headers["Location"]
    for address in (made, f"/restore/plans/{stage.ids['nowhere']}"):
        page = operator.get(address).text
        assert "It does not say where to, so it cannot be started." in page
        assert "Change the question" in page
        assert "Start the restore" not in page
        assert "<code></code>" not in page
    asked = operator.send("/restore", question)
    assert asked.status_code == 422, "who may start it is asked at once"
    assert "no data directory given" in asked.text
    assert (
        "no target given: tables need either into or sql"
        in operator.send("/restore", {"server": CRM, "what": "tables", "when": "latest", "tables": "shop.orders"}).text
    )


def test_a_restore_that_was_cancelled_is_asked_for_again_from_its_job_as_it_was(site: Rig) -> None:
    folder = site.settings.needs_restore().folders[0]
    operator = visitor(site, Role.OPERATOR)
    now = site.wiring.clock()
    kept = {
        "request": {
            "server": CRM,
            "target": "latest",
            "mode": "replica",
            "datadir": f"{folder}/again",
            "exclude_gtid": ["0-1-7"],
        },
        "promise": {"until": None},
    }
    job = JobRecord(id=new_id(now), kind=str(JobKind.RESTORE), server=CRM, state=JobState.QUEUED, queued_at=now)
    record = RestoreRecord(
        id=new_id(now),
        server=CRM,
        backup_id="b",
        target="latest",
        datadir=f"{folder}/again",
        state=JobState.QUEUED,
        started_at=now,
        job_id=job.id,
        request=kept,
    )
    job = replace(job, arguments={"restore": record.id, "target": "latest"})
    site.catalog.restores.queue(record, job)
    operator.send(f"/jobs/{job.id}/cancel")
    page = operator.get(f"/jobs/{job.id}").text
    assert f'href="/restore?again={record.id}"' in page
    asked = operator.get(f"/restore?again={record.id}").text
    for filled in (f'value="{folder}/again"', 'value="replica" checked', ">0-1-7</textarea>"):
        assert filled in asked
    assert operator.get("/restore?again=20261121T000000Z-00000000").status_code == 404
