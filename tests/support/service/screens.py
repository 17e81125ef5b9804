"""`make screenshots`: every page as people see it; some of them also in the dark and on a phone.

python -m tests.support.service.screens FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from backupd.app.service.backups import Binlogs
from backupd.model.access import Role
from tests.support.service.browser import chromium, visiting
from tests.support.service.rig import rig
from tests.support.service.stage import CRM, LEGACY, SHOP, Stage, settings_of

WINDOWS: Mapping[str, Mapping[str, Any]] = {
    "light": {"viewport": {"width": 1200, "height": 760}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 760}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "is_mobile": True, "has_touch": True},
}
IN_EVERY_WINDOW = ("servers", "server", "server-in-trouble", "jobs")
"""Of the others one picture is enough: they are made of the same."""
_TALLEST = 1200
"""Pixels of a picture; what is below is more of the same."""


def addresses(ids: Mapping[str, str]) -> Mapping[str, str]:
    """Every page by the name of its picture. ``ids``: of the stage. The last is for who is not logged in."""
    return {
        "servers": "/",
        "server": f"/servers/{SHOP}",
        "server-in-trouble": f"/servers/{LEGACY}",
        "backup": f"/backups/{ids['shop']}",
        "jobs": "/jobs",
        "job-running": f"/jobs/{ids['running']}",
        "job-failed": f"/jobs/{ids['failed']}",
        "proofs": "/proofs",
        "proof": f"/proofs/{ids['proof']}",
        "destinations": "/destinations",
        "alerts": "/alerts",
        "restore": f"/restore?server={SHOP}",
        "restore-tables": f"/restore?server={SHOP}&what=tables&tables=shop.orders&when=time",
        "restore-search": f"/restore/search?server={SHOP}",
        "retention": f"/servers/{CRM}/retention",
        "policies": "/policies",
        "policy": "/policies/gold",
        "policy-broken": "/policies/silver",
        "policy-new": "/policies/new",
        "policy-check": "/policies/gold/check",
        "audit": "/audit?verify=1",
        "tokens": "/tokens",
        "docs": "/docs",
        "error": "/servers/nobody",
        "restore-plan-archived": f"/restore/plans/{ids['archived']}",
        "restore-found": f"/restore/search?server={SHOP}&table=shop.orders&kind=delete&look=1",
        "server-moment": f"/servers/{SHOP}?to=backup:{ids['shop']}",
        "login": "/login",
    }


def photograph(page: Page, file: Path) -> None:
    height = page.evaluate("document.documentElement.scrollHeight")
    size = page.viewport_size or {"width": 1200, "height": 760}
    page.screenshot(
        path=file,
        full_page=True,
        animations="disabled",
        clip={"x": 0, "y": 0, "width": size["width"], "height": min(height, _TALLEST)},
    )


def plan(page: Page, folder: str) -> None:
    """Ask the wizard for a whole server, up to its plan."""
    page.goto(f"/restore?server={CRM}")
    page.get_by_label("Folder on the restoring host").fill(f"{folder}/{CRM}")
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_role("button", name="Start the restore").wait_for()


def take(browser: Browser, url: str, secret: str, ids: Mapping[str, str], base: Path, folder: Path) -> None:
    for name, window in WINDOWS.items():
        with visiting(browser, url, secret, **window) as page:
            if name == "light":
                plan(page, f"{base}/restores")
                photograph(page, folder / f"restore-plan-{name}.png")
            for title, address in addresses(ids).items():
                if name == "light" or title in IN_EVERY_WINDOW:
                    if title == "login":
                        page.context.clear_cookies()
                    page.goto(address)
                    photograph(page, folder / f"{title}-{name}.png")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stages: list[Stage] = []
    with (
        tempfile.TemporaryDirectory(prefix="backupd-") as name,
        chromium() as browser,
        pytest.MonkeyPatch.context() as patched,
    ):
        base = Path(name)
        with rig(settings_of(base), prepared=lambda wiring: stages.append(Stage(wiring).mount().set())) as running:
            patched.setattr(Binlogs, "search", lambda *_asked, **_more: iter(stages[0].found()))
            take(browser, running.url, running.secret(Role.ADMIN), stages[0].ids, base, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
