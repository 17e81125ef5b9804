"""The request of a restore: its rules, and that every surface has its fields."""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import signature
from typing import Any

import pytest

from api.schemas.restores import KeptRequest, PlanRequest, RestoreAtOnce
from api.web.pages.wizard import Question
from backupd.app.restores.request import RestoreRequest, json_name, option_name, source_address
from backupd.cli.commands.restores import plan, restore
from backupd.cli.commands.tables import requested

WHOLE = RestoreRequest("db1", "latest", datadir="/srv/new", start=True, mode="replica", replay_with="pipe")
SOME = RestoreRequest("db1", "latest", mode="tables", tables=("a.b",), into="db2", rename="*_x", triggers="none")
NODE = RestoreRequest("db1", "latest", mode="galera", datadir="/srv/new", cluster="lab", start=True)
FIELDS = {one.name: one.default for one in fields(RestoreRequest)}


def names(model: type[Any]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def test_rest_the_page_and_the_command_line_have_every_field_of_a_request_and_no_other() -> None:
    known = {json_name(name) for name in FIELDS}
    assert names(PlanRequest) == names(KeptRequest) == known
    assert names(RestoreAtOnce) == known | {"confirm"}
    assert {one.name for one in fields(Question)} == FIELDS.keys() | {"what", "when", "at"}
    assert signature(restore).parameters.keys() == FIELDS.keys() | {"run", "confirm", "keys"}
    assert FIELDS.keys() | {"run"} >= signature(plan).parameters.keys()


def test_a_request_that_was_kept_has_the_defaults_of_a_request() -> None:
    kept = KeptRequest.model_validate({"server": "db1", "target": "latest"}).model_dump(by_alias=True)
    asked = RestoreRequest("db1", "latest")
    assert {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()} == {
        json_name(name): getattr(asked, name) for name in FIELDS
    }


@pytest.mark.parametrize(
    ("request_", "said", "problems"),
    [
        (WHOLE, (), []),
        (SOME, ("triggers", "confirm", "keys"), []),
        (WHOLE, ("keys", "triggers"), ["--keys: only for tables", "--triggers: only for tables"]),
        (replace(WHOLE, source="logical"), (), ["--from: only for tables"]),
        (NODE, (), []),
        (
            replace(NODE, accept_inexact=True, accept_older=True),
            (),
            [
                f"--{name}: a node has the same rows as its cluster, or it must not join: use backup:ID"
                for name in ("accept-older", "accept-inexact")
            ],
        ),
        (
            replace(SOME, datadir="/x"),
            ("mode",),
            ["--datadir: only for a whole server", "--mode: only for a whole server"],
        ),
        (replace(SOME, tables=()), (), ["--tables: no tables given"]),
        (replace(WHOLE, replicate_from="db2", delay="1h", server_id=7), (), []),
        (replace(WHOLE, delay="1h"), (), ["--delay: only with --source, the source to replicate from"]),
        (replace(WHOLE, mode="new-server", replicate_from="db2"), (), ["--source: only with --mode replica"]),
        (replace(SOME, replicate_from="db2"), (), ["--source: only for a whole server"]),
        (
            replace(WHOLE, replicate_from="db 2", delay="-1h", server_id=2**32),
            (),
            [
                "--server-id: 4294967296 is not between 1 and 4294967295",
                "--delay: '-1h' is not a duration: write 10s, 15m, 2h, 7d or 1d12h",
                "--source: 'db 2' is neither the name of a server nor host:port",
            ],
        ),
        (
            replace(SOME, sql="/x"),
            ("keys",),
            ["--sql: not together with --into", "--as, --keys: not with --sql, which touches no server"],
        ),
    ],
)
def test_what_does_not_go_together_is_named_as_the_caller_calls_it(
    request_: RestoreRequest, said: tuple[str, ...], problems: list[str]
) -> None:
    assert request_.mixed(option_name, said=said) == problems
    assert not any("only for" in one for one in request_.alone().mixed())


def test_a_request_is_written_as_the_command_that_asks_for_the_same() -> None:
    assert WHOLE.command() == (
        "backupd restore db1 --to latest --mode replica --datadir /srv/new --start --replay-with pipe"
    )
    tables = replace(SOME, exclude=("0-1-2", "0-1-3"), accept_older=True)
    assert tables.command() == (
        "backupd restore db1 --to latest --tables a.b --into db2 --as '*_x' --triggers none --exclude-gtid 0-1-2 "
        "--exclude-gtid 0-1-3 --accept-older --confirm db2"
    )
    assert replace(SOME, compare=True, rename="").command().endswith("--into db2 --compare --triggers none")


def test_options_that_are_given_become_the_fields_of_a_request() -> None:
    assert requested("db1", "latest", tables=["a.b"], into="db2", exclude=None, start=False) == RestoreRequest(
        "db1", "latest", mode="tables", tables=("a.b",), into="db2"
    )


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", ("", 0)),
        ("db1.example.com", ("db1.example.com", 3306)),
        ("10.0.0.7:3307", ("10.0.0.7", 3307)),
        ("[fe80::1]:3307", ("fe80::1", 3307)),
    ],
)
def test_a_source_has_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert source_address(text) == address


@pytest.mark.parametrize("text", ["db1:0", "db1:65536", "db1:x", "fe80::1", "a b", ":3306", "db1\n"])
def test_what_is_no_address_is_no_source(text: str) -> None:
    with pytest.raises(ValueError, match="neither the name of a server nor host:port"):
        source_address(text)
