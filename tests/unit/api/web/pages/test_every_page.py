"""Every page for every role, over an installation in whose every text somebody else has written HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fastapi.routing import APIRoute

from api import docs
from api.auth import stated_role
from api.web import pages
from backupd.model.access import Role
from tests.support.service import screens
from tests.support.service.rig import Rig, rig
from tests.support.service.stage import CRM, EVIL, LEGACY, SHOP, Stage, settings_of
from tests.support.service.visitor import Visitor, stranger, visitor

ESCAPED = "&lt;img src=x onerror="
"""As it must look in the text of a page."""
NOT_HTML = ("<img src=x", "<script>alert", 'onerror="alert', "onerror='alert")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Stage]]:
    stages: list[Stage] = []
    base: Path = tmp_path_factory.mktemp("web")
    with rig(settings_of(base), prepared=lambda wiring: stages.append(Stage(wiring, taint=EVIL).set())) as running:
        yield running, stages[0]


@pytest.fixture(scope="module")
def people(scene: tuple[Rig, Stage]) -> Mapping[Role, Visitor]:
    return {role: visitor(scene[0], role) for role in Role}


def routes(method: str) -> list[APIRoute]:
    """Those of the pages."""
    return [
        route
        for router in pages.ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and method in (route.methods or ())
    ]


def address(route: APIRoute, stage: Stage) -> str:
    """One where there is something to see."""
    names = {
        "server": SHOP,
        "backup_id": stage.ids["shop"],
        "job_id": stage.ids["running"],
        "name": "gold",
        "proof_id": stage.ids["proof"],
        "plan_id": stage.ids["plan"],
        "incident_id": stage.ids["incident"],
        "token_id": "20261121T000000Z-00000000",
    }
    return re.sub(r"\{(\w+)\}", lambda found: names[found.group(1)], route.path)


@pytest.fixture(scope="module", autouse=True)
def plan(scene: tuple[Rig, Stage], people: Mapping[Role, Visitor]) -> None:
    """A plan to look at."""
    scene[1].ids["plan"] = (
        people[Role.VIEWER]
        .send(
            "/restore",
            {
                "server": CRM,
                "what": "whole",
                "when": "latest",
                "datadir": f"/srv/{EVIL.replace('/', '')}",
            },
        )
        .headers["Location"]
        .rpartition("/")[2]
    )


def test_every_page_is_there_for_those_roles_that_may_see_it_and_none_lets_html_of_others_in(
    scene: tuple[Rig, Stage], people: Mapping[Role, Visitor]
) -> None:
    _site, stage = scene
    pages = routes("GET")
    assert len(pages) >= 16
    for route in pages:
        needed, where = stated_role(route)[1], address(route, stage)
        for role, somebody in people.items():
            answer = somebody.get(where)
            expected = 303 if where == "/login" else 200 if needed is None or role.rank >= needed.rank else 403
            assert answer.status_code == expected, (where, role, answer.text[:2000])
            assert answer.headers["Cache-Control"] == "no-store" or expected == 303, where
            assert not [found for found in NOT_HTML if found in answer.text], where


@pytest.mark.parametrize(
    "page",
    [
        "/",
        f"/servers/{SHOP}",
        f"/servers/{LEGACY}",
        f"/servers/{LEGACY}/retention",
        "/backups/shop",
        "/jobs",
        "/jobs/running",
        "/jobs/failed",
        "/jobs/partial",
        "/proofs/proof",
        "/alerts",
        "/audit",
        "/restore/plans/plan",
        f"/restore?server={SHOP}&target={EVIL}&tables={EVIL}",
        f"/restore/search?server={SHOP}&table={EVIL}&look=1",
        f"/servers/{EVIL}",
        f"/backups/{EVIL}",
        f"/policies/{EVIL}",
        f"/login?next=/{EVIL}",
    ],
)
def test_what_others_wrote_is_shown_as_text(
    scene: tuple[Rig, Stage], people: Mapping[Role, Visitor], page: str
) -> None:
    head, _, last = page.rpartition("/")
    found = (stranger(scene[0]) if "login" in page else people[Role.ADMIN].http).get(
        f"{head}/{scene[1].ids.get(last, last)}"
    )
    assert ESCAPED in found.text.replace("&#34;", '"'), page
    assert not [one for one in NOT_HTML if one in found.text]


def test_a_policy_and_a_form_that_hold_html_come_back_as_text(people: Mapping[Role, Visitor]) -> None:
    text = f"physical: {{full: '{EVIL}'}}\n</textarea>{EVIL}"
    checked = people[Role.VIEWER].send("/policies/validate", {"text": text})
    assert checked.status_code == 422
    assert ESCAPED in checked.text
    asked = people[Role.OPERATOR].send(
        "/restore", {"server": EVIL, "what": "tables", "when": "time", "at": EVIL, "tables": EVIL, "as": EVIL}
    )
    assert asked.status_code == 422
    made = people[Role.ADMIN].send("/tokens", {"name": f"a {EVIL}"[:90], "role": "viewer"})
    assert ESCAPED in made.text
    for answer in (checked, asked, made):
        assert not [one for one in NOT_HTML if one in answer.text]


def test_every_page_has_its_picture_and_every_picture_a_page(scene: tuple[Rig, Stage]) -> None:
    pages = {
        route.path: route.path_regex
        for route in (*routes("GET"), *docs.router.routes)
        if isinstance(route, APIRoute) and route.path != "/openapi.json"
    }
    shown = [urlsplit(one).path for one in screens.addresses(scene[1].ids).values()]
    assert sorted(path for path, pattern in pages.items() if not any(map(pattern.match, shown))) == []
    assert [path for path in shown if not any(pattern.match(path) for pattern in pages.values())] == []


def test_no_form_works_for_a_stranger_for_a_lower_role_or_for_another_site(
    scene: tuple[Rig, Stage], people: Mapping[Role, Visitor]
) -> None:
    site, stage = scene
    jobs, holds = site.catalog.jobs.list(), site.catalog.holds.all()
    forms = [route for route in routes("POST") if route.path != "/login"]
    assert len(forms) >= 17
    nobody, token, admin = stranger(site), site.client(Role.ADMIN), people[Role.ADMIN]
    for route in forms:
        needed, where = stated_role(route)[1], address(route, stage)
        assert needed is not None
        refused = nobody.post(where, data={"csrf": admin.csrf})
        assert (refused.status_code, refused.headers["Location"]) == (303, "/login"), where
        for role, somebody in people.items():
            if role.rank < needed.rank:
                assert somebody.send(where).status_code == 403, (where, role)
        for told, answer in (
            ("no word", admin.http.post(where, data={"x": ""})),
            ("an empty word", admin.http.post(where, data={"csrf": ""})),
            ("another session's word", admin.http.post(where, data={"csrf": people[Role.VIEWER].csrf})),
            ("another site", admin.send(where, Origin="https://evil.example")),
            ("no site", admin.send(where, Origin="null")),
            ("a page of a sister site", admin.send(where, Sec_Fetch_Site="same-site")),
            ("by a token, not a session", token.post(where, data={"csrf": admin.csrf})),
        ):
            assert answer.status_code == 403, (where, told)
        wrong = admin.http.post(where, content=b'{"csrf": "x"}', headers={"Content-Type": "application/json"})
        assert wrong.status_code == 422, where
    assert (site.catalog.jobs.list(), site.catalog.holds.all()) == (jobs, holds), "nothing was done"


def test_servers_that_a_token_does_not_see_are_on_no_page(scene: tuple[Rig, Stage]) -> None:
    site, stage = scene
    somebody = visitor(site, Role.ADMIN, frozenset({CRM}))
    for page in ("/", "/jobs", "/proofs", "/alerts", "/restore", "/restore/search"):
        text = somebody.get(page).text
        assert SHOP not in text, page
        assert LEGACY not in text, page
    for page in (
        f"/servers/{SHOP}",
        f"/servers/{SHOP}/retention",
        f"/backups/{stage.ids['shop']}",
        f"/jobs/{stage.ids['running']}",
    ):
        assert somebody.get(page).status_code == 404, page
    for page, fields in (
        (f"/servers/{SHOP}/jobs", {"kind": "verify"}),
        (f"/backups/{stage.ids['shop']}/delete", {}),
        (f"/jobs/{stage.ids['running']}/cancel", {}),
        (f"/servers/{SHOP}/holds", {"kind": "hold", "reason": "x"}),
    ):
        assert somebody.send(page, fields).status_code == 404, page
    assert somebody.send("/restore", {"server": SHOP, "datadir": "/srv/x"}).status_code == 404
    for page in ("/audit", "/tokens"):
        assert somebody.get(page).status_code == 403, "these tell of every server"
