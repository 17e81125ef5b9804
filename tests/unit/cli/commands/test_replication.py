"""What replicate says, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from backupd.app.copies.log_copies import LogsCopied
from backupd.app.copies.repairs import Examined
from backupd.app.copies.replication import Replicated
from backupd.cli.main import main
from backupd.model.errors import DestinationError
from backupd.transfer.copies import Copied
from tests.support.service.fake import FakeService, record
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import Stock

HEADER = Stock(MemoryDestination("a")).add(1, {"x": b"y"})
DONE = Replicated(
    "shop-db1",
    "offsite",
    (Copied(HEADER, 6 * 2**20, 812, 3, 2.0, ("local: objects/ab: is missing",)),),
    (("b0", "keep_fulls 2: there are 2 newer full ones"),),
    {},
    LogsCopied(4, 2**20, 2),
    Examined((HEADER.backup_id,), 2**20),
)


@pytest.fixture
def asked(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def replicate(
        server: str | None, place: str | None, _report: object, labels: Sequence[str] = ()
    ) -> tuple[Replicated, ...]:
        calls.append((server, place, *labels))
        failed = replace(
            DONE,
            problem=DestinationError("offsite does not answer", hint="is it up?"),
            waiting={"b9": "offsite does not answer"},
        )
        return (failed,) if place == "broken" else () if place == "none" else (DONE,)

    monkeypatch.setattr(service, "replicate", replicate, raising=False)
    return calls


def test_it_tells_what_was_copied_how_fast_and_what_was_not(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replicate", "shop-db1", "--to", "offsite"]) == 0
    assert asked == [("shop-db1", "offsite")]
    out = capsys.readouterr().out
    for text in (
        "shop-db1 at offsite: up to date",
        "6.0 MiB in 2.0s, 3.0 MiB/s",
        "4 segments copied",
        "not copied to offsite: b0: ",
        "read elsewhere: local",
        "verified: ",
    ):
        assert text in out


def test_servers_are_chosen_by_label(asked: list[Any]) -> None:
    assert main(["replicate", "--label", "env=prod", "--to", "offsite"]) == 0
    assert asked == [(None, "offsite", "env=prod")]


def test_what_waits_is_an_error_with_what_to_do(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicate", "--to", "broken"]) == 1
    out = capsys.readouterr().out
    assert "NOT up to date" in out
    assert "hint: is it up?" in out
    assert "waits: b9" in out
    assert asked == [(None, "broken")]


def test_the_document_names_rates_and_reasons(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicate", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["copied"][0]["rate"] == 3 * 2**20
    assert document["declined"] == [{"backup": "b0", "reason": "keep_fulls 2: there are 2 newer full ones"}]
    assert document["binlogs"]["segments"] == 4
    assert asked == [(None, None)]


def test_a_place_that_no_policy_names_is_said_to_be_that(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicate", "--to", "none"]) == 0
    assert "no server's policy names this destination" in capsys.readouterr().out
    assert asked


def test_the_list_shows_which_copies_were_read_again_and_what_is_protected(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.records = [replace(record(1), protected=True)]
    assert main(["backups"]) == 0
    assert "protected" in "".join(capsys.readouterr().out.split())
