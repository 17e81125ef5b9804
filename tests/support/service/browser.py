"""A real browser: Chromium without a window, driven by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Response, expect, sync_playwright

CHROMIUM = os.environ.get("BACKUPD_CHROMIUM", "/usr/bin/chromium")
_SECONDS = 240


@contextmanager
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=_SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=_SECONDS * 1000
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(browser: Browser, url: str, secret: str, **how: Any) -> Iterator[Page]:
    """Somebody who has logged in with this token. ``how``: the kind of window, as Playwright names it. Whatever a page
    complains of (a refused script, an error of one) or fails to load fails the test."""
    context = browser.new_context(base_url=url, **how)
    context.set_default_timeout(_SECONDS * 1000)
    page = context.new_page()
    troubles: list[str] = []

    def heard(said: ConsoleMessage) -> None:
        if said.type == "error" and not said.text.startswith("Failed to load resource"):
            troubles.append(said.text)

    def answered(response: Response) -> None:  # a page itself may say that something is wrong
        if response.status >= 400 and response.request.resource_type != "document":
            troubles.append(f"{response.status} {response.url}")

    page.on("console", heard)
    page.on("response", answered)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    try:
        page.goto("/login")
        page.get_by_label("Token").fill(secret)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("button", name="Log out").wait_for()
        yield page
    finally:
        context.close()
    assert not troubles, troubles
