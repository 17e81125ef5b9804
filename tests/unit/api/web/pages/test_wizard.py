"""The restore wizard's question: what it understands, what it keeps, and what it says is wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import parse_qs

import pytest

from api.web.pages.wizard import Question
from api.web.site import Form, moment_of, own_path
from backupd.model.errors import UsageError

WHOLE = Question(server="db1", when="time", at="2026-11-21 09:41:03.25", datadir="/srv/new", start=True)
TABLES = Question(
    server="db1",
    what="tables",
    when="target",
    target="before-gtid:0-1-7",
    tables=("shop.orders", "`a b`.`c.d`"),
    into="db1",
    rename="*_restored",
    triggers="none",
    exclude=("0-1-3",),
    thaw="bulk",
)


def sent(**fields: str) -> Form:
    return Form({name: [value] for name, value in fields.items()})


def test_a_time_without_an_offset_is_utc_and_one_with_an_offset_is_what_it_says() -> None:
    assert WHOLE.wanted() == "2026-11-21T09:41:03.250000Z"
    assert moment_of(" 2026-11-21T10:41:03+01:00 ") == datetime(2026, 11, 21, 9, 41, 3, tzinfo=UTC)
    assert moment_of("2026-11-21 09:41") == datetime(2026, 11, 21, 9, 41, tzinfo=UTC)
    for wrong in ("", "yesterday", "2026-13-01", "9999-12-31T23:59:59-23:00"):
        with pytest.raises(UsageError, match="is not a time") as raised:
            moment_of(wrong)
        assert "2026-11-21 09:41:03.25" in raised.value.hint


def test_a_question_about_a_whole_server_asks_for_nothing_of_tables() -> None:
    request = replace(TABLES, what="whole", datadir="/srv/new").request()
    assert (request.tables, request.into, request.rename, request.datadir) == ((), "", "", "/srv/new")
    request.check()


def test_a_question_about_tables_asks_for_nothing_of_a_whole_server() -> None:
    request = replace(TABLES, datadir="/srv/new", start=True, replay_with="pipe").request()
    assert (request.mode, request.datadir, request.start, request.replay_with) == ("tables", "", False, "")
    assert request.tables == TABLES.tables
    request.check()


@pytest.mark.parametrize("question", [Question(server="db1"), TABLES, WHOLE])
def test_a_question_comes_back_from_its_link_and_from_its_request_as_it_was(question: Question) -> None:
    assert Question.linked(Form(parse_qs(question.query()))) == question
    again = Question.again(question.request().as_json())
    assert again.request() == question.request()


def test_what_is_missing_is_told_before_anything_is_planned() -> None:
    with pytest.raises(UsageError, match="which server"):
        Question().request()
    with pytest.raises(UsageError, match="no target is named"):
        Question(server="db1", when="target").request()


def test_a_link_with_a_target_or_tables_chooses_what_it_means() -> None:
    assert Question.linked(sent(server="db1", target="latest")).when == "latest"
    assert Question.linked(sent(server="db1", target="backup:x")).when == "target"
    found = Question.linked(sent(server="db1", tables="shop.orders\r\n\r\n  shop.lines "))
    assert (found.what, found.tables) == ("tables", ("shop.orders", "shop.lines"))


@pytest.mark.parametrize(
    "address",
    [
        "//evil.example",
        "https://evil.example/",
        "/\\evil.example",
        "javascript:alert(1)",
        "",
        "jobs",
        "/jobs\r\nSet-Cookie: a=b",
        "/\tevil",
    ],
)
def test_after_the_login_nobody_is_led_to_another_site(address: str) -> None:
    assert own_path(address) == "/"


def test_after_the_login_one_goes_on_where_one_was() -> None:
    assert own_path("/servers/db1?to=latest&x=//y") == "/servers/db1?to=latest&x=//y"


def test_what_was_accepted_stays_accepted_through_form_link_and_request() -> None:
    asked = Question.of(sent(server="db1", when="latest", datadir="/srv/new", accept_older="yes", accept_inexact="yes"))
    for found in (asked, Question.linked(Form(parse_qs(asked.query()))), Question.again(asked.request().as_json())):
        request = found.request()
        assert (request.accept_older, request.accept_inexact) == (True, True)
        assert (request.options.accept_older, request.options.accept_inexact) == (True, True)
    tables = replace(asked, what="tables", tables=("shop.orders",), into="db1").request()
    assert tables.table_options.options.accept_older
    assert not WHOLE.request().accept_older
