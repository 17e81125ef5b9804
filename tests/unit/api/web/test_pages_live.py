"""The pages to look at in a real browser: what goes on by itself, what a pointer and a keyboard can do, and a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from backupd.app.context.wiring import Wiring, owner
from backupd.model.access import Role
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.dice import SOAK
from tests.support.service.browser import CHROMIUM, chromium, visiting
from tests.support.service.rig import Rig, rig
from tests.support.service.stage import CRM, SHOP, Stage, settings_of

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def ids() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, ids: dict[str, str]) -> Iterator[Rig]:
    def prepared(wiring: Wiring) -> None:
        ids.update(Stage(wiring).set().ids)

    with rig(settings_of(tmp_path_factory.mktemp("live")), prepared=prepared) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def progress(done: int) -> dict[str, object]:
    return {
        "phase": "copy",
        "bytes": done << 30,
        "bytes_total": 8 << 30,
        "files": 0,
        "files_total": None,
        "note": "",
        "seconds_left": None,
    }


def test_a_job_is_followed_to_its_end_without_loading_the_page_again(browser: Browser, fleet: Rig) -> None:
    now = datetime.now(UTC)
    job = JobRecord(
        new_id(now), JobKind.FULL, SHOP, JobState.RUNNING, now, now, owner=owner(), token=1, progress=progress(1)
    )
    fleet.catalog.jobs.add(job)
    with visiting(browser, fleet.url, fleet.secret(Role.OPERATOR)) as page:
        with page.expect_response("**/v1/events?job=*") as stream:
            page.goto(f"/jobs/{job.id}")
        assert stream.value.headers["content-type"].startswith("text/event-stream"), "it need not ask each time"
        expect(page.locator("#live")).to_contain_text("copy: 1.0 GiB of 8.0 GiB")
        page.evaluate("window.untouched = true")
        fleet.catalog.jobs.heartbeat(job.id, 1, datetime.now(UTC), progress(6))
        expect(page.locator("#live")).to_contain_text("copy: 6.0 GiB of 8.0 GiB")
        expect(page.locator("#progress")).to_have_attribute("value", "75.0")
        fleet.catalog.jobs.finish(job.id, JobState.SUCCEEDED, datetime.now(UTC), token=1)
        expect(page.locator("#live .job-state")).to_contain_text("succeeded")
        expect(page.locator("#progress")).to_have_count(0)
        assert page.evaluate("window.untouched") is True


def test_a_page_whose_service_is_gone_says_since_when_it_is_not_current(browser: Browser, fleet: Rig) -> None:
    look = "skipped += 2000; document.dispatchEvent(new Event('visibilitychange'))"
    with visiting(browser, fleet.url, fleet.secret(Role.VIEWER)) as page:
        page.goto(f"/servers/{SHOP}")
        page.evaluate("(() => { const now = Date.now; window.skipped = 0; Date.now = () => now() + skipped; })()")
        stale, footer = page.locator(".stale"), page.locator("body > footer time")
        shown = footer.inner_text()
        page.context.set_offline(True)
        page.evaluate(look)
        expect(stale).to_have_text(f"✗ Not current since {shown}: the service cannot be reached.")
        expect(page.locator("h1")).to_contain_text(SHOP)
        page.context.set_offline(False)
        page.evaluate(look)
        expect(stale).to_have_count(0)
        page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
        shown = footer.inner_text()
        page.evaluate("skipped += 3600000")
        page.evaluate(look)
        expect(stale).to_have_text(f"✗ Not current since {shown}: something on it is open, marked or in use.")
        page.evaluate("getSelection().removeAllRanges()")
        page.evaluate(look)
        expect(stale).to_have_count(0)


def test_a_click_on_the_timeline_chooses_the_moment_that_the_pointer_showed(browser: Browser, fleet: Rig) -> None:
    with visiting(browser, fleet.url, fleet.secret(Role.VIEWER)) as page:
        page.goto(f"/servers/{SHOP}?span=7d")
        box = page.locator("svg.timeline").bounding_box()
        assert box is not None
        x, y = round(box["x"] + box["width"] * 0.5), round(box["y"] + 40)
        page.mouse.move(x, y)
        expect(page.locator(".hover-time")).to_have_text(re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ$"))
        shown = page.locator(".hover-time").inner_text()
        middle = datetime.now(UTC) - timedelta(days=3.5)
        assert abs(datetime.fromisoformat(shown) - middle) < timedelta(hours=3)
        page.mouse.click(x, y)
        page.wait_for_url("**/servers/*at=*")
        field = shown.replace(" ", "T").removesuffix("Z").removesuffix(":00")  # a browser leaves such seconds out
        assert page.get_by_label("A moment, UTC").input_value() == field
        assert page.locator("line.chosen").count() == 1
        expect(page.locator("#moment")).to_contain_text(shown.replace(" ", "T"))
        page.goto(f"/servers/{CRM}?span=7d")
        lonely = page.locator(".slices a.exact").first
        moment = re.search(r"to=([^&]+)", lonely.get_attribute("href") or "")
        lonely.click()
        page.wait_for_url("**/servers/*to=*")
        expect(page.locator("#moment")).to_contain_text("Restore to here")
        assert moment is not None
        assert moment[1] in page.url, "where there is but one moment, a click meets exactly that"


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=SOAK), "dark"])
def test_on_a_phone_nothing_is_cut_off_and_nothing_is_too_pale_to_be_read(
    browser: Browser, fleet: Rig, ids: dict[str, str], scheme: str
) -> None:
    with visiting(
        browser, fleet.url, fleet.secret(Role.ADMIN), viewport={"width": 360, "height": 740}, color_scheme=scheme
    ) as page:
        for path in (
            "/",
            f"/servers/{SHOP}?to=latest",
            f"/backups/{ids['shop']}",
            "/jobs",
            f"/jobs/{ids['failed']}",
            "/proofs",
            f"/proofs/{ids['proof']}",
            "/destinations",
            "/alerts",
        ):
            page.goto(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
            assert page.evaluate(_PALE) == [], path


def test_the_keyboard_reaches_the_content_first_and_never_walks_through_slices_of_time(
    browser: Browser,
    fleet: Rig,
) -> None:
    with visiting(browser, fleet.url, fleet.secret(Role.VIEWER)) as page:
        page.goto(f"/servers/{SHOP}")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        seen = []
        for _ in range(60):
            page.keyboard.press("Tab")
            seen.append(
                page.evaluate(
                    "document.activeElement.closest('.slices') ? 'slice' : "
                    "document.activeElement.id || document.activeElement.getAttribute('aria-label')"
                )
            )
            if seen[-1] == "at":
                break
        assert seen[-1] == "at", "the form is a few steps away"
        assert "slice" not in seen
        assert any(str(one).startswith("full backup of ") for one in seen), "backups have names to be read out"


_PALE = """() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const found = rgb(getComputedStyle(one).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const pale = [];
  for (const one of document.querySelectorAll("main *, header *, footer *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || one.closest("svg, option") || !one.checkVisibility({ opacityProperty: true })) continue;
    const [a, b] = [light(rgb(getComputedStyle(one).color)), light(ground(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) pale.push(`${contrast.toFixed(2)} ${one.className} ${one.textContent.trim().slice(0, 30)}`);
  }
  return [...new Set(pale)];
}"""
"""What has less contrast than 4.5, with what it says."""
