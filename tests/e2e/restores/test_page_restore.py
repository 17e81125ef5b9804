"""A restore wholly through the web page, by a real browser: find the statement that did it, plan, start, watch, and
have what was there before."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from backupd.app.context.settings import load_settings
from backupd.model.access import Role
from tests.support import sample
from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, serving
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER, Server
from tests.support.service.browser import chromium, visiting
from tests.support.service.rig import Rig, rig
from tests.support.service.stage import EVIL
from tests.support.stores.folders import give_to_database, short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

_HOSTILE = f"shop.`{EVIL[:64]}`"
_PATIENCE = 120_000
"""Milliseconds that a restore may take."""


@dataclass
class Story:
    """``before``: checksums of every table right before ``archive.pages`` was dropped."""

    house: House
    server: Server
    site: Rig
    browser: Browser
    folder: Path
    before: dict[str, int]


@pytest.fixture(scope="module")
def story(keys: Keys) -> Iterator[Story]:
    with short_directory() as base, PrivateServer() as server:
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        sample.create(server)
        server.execute("SET GLOBAL event_scheduler = OFF", f"CREATE TABLE {_HOSTILE} (id INT PRIMARY KEY)")
        folder = base / "restored"
        folder.mkdir()
        give_to_database(folder)
        house = House(base, server, keys)
        (base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR)
        house.config.write_text(house.config.read_text().replace("restore: {", f"restore: {{folders: [{folder}], "))
        house.backup()
        server.execute("UPDATE shop.products SET stock = stock + 1", f"INSERT INTO {_HOSTILE} VALUES (1)")
        with server.connect() as connection:
            before = checksum_everything(connection)
        server.execute("DROP TABLE archive.pages", "DELETE FROM shop.order_lines", f"INSERT INTO {_HOSTILE} VALUES (2)")
        Archive(house, server).take()
        with rig(load_settings(house.config)) as site, serving(house), chromium() as browser:
            yield Story(house, server, site, browser, folder, before)


def find(page: Page, tables: str, kind: str) -> None:
    """From the first page to what the search found."""
    page.goto("/")
    page.get_by_role("link", name=SERVER).first.click()
    page.get_by_role("link", name=re.compile("bad statement")).first.click()
    page.get_by_label("Tables, one on each line").fill(tables)
    if kind:
        page.get_by_label(kind, exact=True).check()
    page.get_by_role("button", name="Search").click()


def watch(page: Page) -> None:
    """Until the job that was just started is over, and well, without loading its page again."""
    expect(page.get_by_role("heading", level=1)).to_contain_text("Restore")
    expect(page.locator("#live .badge").first).to_contain_text("succeeded", timeout=_PATIENCE)


def test_the_whole_server_as_it_was_right_before_the_statement_that_did_it(story: Story) -> None:
    datadir = story.folder / "whole"
    with visiting(story.browser, story.site.url, story.site.secret(Role.OPERATOR)) as page:
        find(page, "archive.*", "drop")
        expect(page.locator("tbody tr")).to_have_count(1)
        page.get_by_role("link", name="the whole server").click()
        expect(page.get_by_label("Target")).to_have_value(re.compile("^before-gtid:"))
        page.get_by_label("Folder on the restoring host").fill(str(datadir))
        page.get_by_role("button", name="Show the plan").click()
        expect(page.get_by_role("heading", name="Steps")).to_be_visible()
        assert not datadir.exists(), "a plan moves nothing"
        page.get_by_role("button", name="Start the restore").click()
        watch(page)
    with PrivateServer(datadir=datadir) as restored, restored.connect() as connection:
        assert checksum_everything(connection) == story.before


@SOAK
def test_one_table_beside_the_live_ones_once_the_servers_name_was_typed(story: Story) -> None:
    with visiting(story.browser, story.site.url, story.site.secret(Role.OPERATOR)) as page:
        find(page, "shop.order_lines", "delete")
        page.get_by_role("link", name="only this table").click()
        expect(page.get_by_label("Tables, one on each line")).to_have_value("shop.order_lines")
        page.get_by_label("Into the running server").select_option(SERVER)
        page.get_by_label("Under another name").fill("*_restored")
        page.get_by_role("button", name="Show the plan").click()
        page.get_by_label(f"Type {SERVER} to go on").fill("another")
        page.get_by_role("button", name="Start the restore").click()
        expect(page.get_by_role("alert").first).to_contain_text("does not match the target server")
        page.get_by_label(f"Type {SERVER} to go on").fill(SERVER)
        page.get_by_role("button", name="Start the restore").click()
        watch(page)
    restored = int(story.server.query("CHECKSUM TABLE shop.order_lines_restored EXTENDED")[0][1])
    assert restored == story.before["`shop`.`order_lines`"]


def test_a_table_whose_name_is_html_is_text_in_the_search_the_question_and_the_plan(story: Story) -> None:
    with visiting(story.browser, story.site.url, story.site.secret(Role.OPERATOR)) as page:
        page.on("dialog", lambda dialog: pytest.fail(f"a script of a table's name ran: {dialog.message}"))
        find(page, "", "insert")
        name = EVIL[:64]
        row = page.locator("tbody tr", has_text=name).first
        expect(row).to_be_visible()
        row.get_by_role("link", name="only this table").click()
        expect(page.get_by_label("Tables, one on each line")).to_have_value(f"shop.{name}")
        page.get_by_label("Or a new folder for SQL files").fill(str(story.folder / "sql"))
        page.get_by_role("button", name="Show the plan").click()
        expect(page.get_by_text(name).first).to_be_visible()
        assert page.locator("main img").count() == 0


def test_an_operator_may_not_restore_beside_the_folders_and_learns_it_before_anything_moves(story: Story) -> None:
    elsewhere = story.folder.parent / "elsewhere"
    with visiting(story.browser, story.site.url, story.site.secret(Role.OPERATOR)) as page:
        page.goto(f"/restore?server={SERVER}")
        page.get_by_label("Folder on the restoring host").fill(f"{story.folder}/../elsewhere")
        page.get_by_role("button", name="Show the plan").click()
        expect(page.get_by_role("alert").first).to_contain_text("must be an absolute path")
        page.get_by_label("Folder on the restoring host").fill(str(elsewhere))
        page.get_by_role("button", name="Show the plan").click()
        page.get_by_role("button", name="Start the restore").click()
        expect(page.get_by_role("alert").first).to_contain_text(str(story.folder))
    assert not elsewhere.exists()
    assert len(story.site.catalog.restores.list(SERVER)) < 3
