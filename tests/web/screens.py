"""`make screenshots`: every page as people see it; some of them also in the dark and on a phone.

    python -m tests.web.screens FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from backupd.model.access import Role
from tests.api.rig import rig
from tests.web.browser import chromium, visiting
from tests.web.stage import CRM, LEGACY, SHOP, Stage, settings_of

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
    """Every page by the name of its picture. ``ids``: of the stage."""
    return {
        "servers": "/", "server": f"/servers/{SHOP}", "server-in-trouble": f"/servers/{LEGACY}",
        "backup": f"/backups/{ids['shop']}", "jobs": "/jobs", "job-running": f"/jobs/{ids['running']}",
        "job-failed": f"/jobs/{ids['failed']}", "proofs": "/proofs", "proof": f"/proofs/{ids['proof']}",
        "destinations": "/destinations", "alerts": "/alerts", "restore": f"/restore?server={SHOP}",
        "restore-tables": f"/restore?server={SHOP}&what=tables&tables=shop.orders&when=time",
        "restore-search": f"/restore/search?server={SHOP}", "retention": f"/servers/{CRM}/retention",
        "policies": "/policies", "policy": "/policies/gold", "policy-broken": "/policies/silver",
        "audit": "/audit?verify=1", "tokens": "/tokens",
    }


def photograph(page: Page, file: Path) -> None:
    height = page.evaluate("document.documentElement.scrollHeight")
    size = page.viewport_size or {"width": 1200, "height": 760}
    page.screenshot(path=file, full_page=True, animations="disabled", clip={
        "x": 0, "y": 0, "width": size["width"], "height": min(height, _TALLEST)})


def plan(page: Page, folder: str) -> None:
    """Ask the wizard for a whole server, up to its plan."""
    page.goto(f"/restore?server={CRM}")
    page.get_by_label("Folder on the restoring host").fill(f"{folder}/{CRM}")
    page.get_by_role("button", name="Show the plan").click()
    page.get_by_role("button", name="Start the restore").wait_for()


def take(browser: Browser, url: str, secret: str, ids: Mapping[str, str], base: Path, folder: Path) -> None:
    for name, window in WINDOWS.items():
        with visiting(browser, url, secret, **window) as page:
            for title, address in addresses(ids).items():
                if name == "light" or title in IN_EVERY_WINDOW:
                    page.goto(address)
                    photograph(page, folder / f"{title}-{name}.png")
            if name != "light":
                continue
            plan(page, f"{base}/restores")
            photograph(page, folder / f"restore-plan-{name}.png")
            page.context.clear_cookies()
            page.goto("/login")
            photograph(page, folder / f"login-{name}.png")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stages: list[Stage] = []
    with tempfile.TemporaryDirectory(prefix="backupd-") as name, chromium() as browser:
        base = Path(name)
        with rig(settings_of(base), prepared=lambda wiring: stages.append(Stage(wiring).mount().set())) as running:
            take(browser, running.url, running.secret(Role.ADMIN), stages[0].ids, base, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
