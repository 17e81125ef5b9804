"""What the timeline says of a stream that does not go on as it should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.binlogs.status import stream_of
from backupd.app.context.server_identity import kept_apart
from backupd.app.context.wiring import Wiring, owner
from backupd.app.views.timeline import timeline
from backupd.catalog.session import open_catalog
from backupd.model.binlog import Branch, BranchReason
from backupd.model.server_facts import Identity, Verdict
from backupd.model.text import format_time
from restore.planning.target import LIMIT, Stream
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Clock, Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.fixture
def wiring(short_tmp: Path) -> Iterator[Wiring]:
    settings = Office(short_tmp).write(gold=GOLD + "binlog: {stream: true}\n")
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, Clock(NOW))


def told(
    wiring: Wiring,
    *,
    state: str = "streaming",
    error: str = "",
    process: str | None = None,
    ago: timedelta = timedelta(seconds=2),
    behind_since: datetime | None = None,
    local: str = "",
) -> tuple[str, ...]:
    place = {"error": local, "behind_since": format_time(behind_since) if behind_since else None}
    wiring.catalog.binlogs.set_stream_state(
        "db1",
        {
            "state": state,
            "since": format_time(NOW),
            "error": error,
            "trouble": "",
            "destinations": {"local": place},
            "owner": owner() if process is None else process,
        },
        NOW - ago,
    )
    return timeline(wiring, "db1").warnings


def test_a_stream_that_goes_on_is_not_worth_a_word(wiring: Wiring) -> None:
    assert told(wiring) == ()
    assert told(wiring, behind_since=NOW - timedelta(minutes=1)) == (), "not for every checkpoint"


def test_a_stream_that_is_not_running_is_told(wiring: Wiring) -> None:
    assert "has never been streamed" in timeline(wiring, "db1").warnings[0]
    for warnings in (
        told(wiring, state="stopped"),
        told(wiring, process=f"{owner()}0"),
        told(wiring, ago=timedelta(minutes=2)),
    ):
        (warning,) = warnings
        assert "is not streamed now (last report at 2026-11-21T1" in warning
        assert "new commits are not recoverable" in warning
    (warning,) = told(wiring, state="waiting", error="the server cannot be reached")
    assert warning == "the stream of db1 is waiting since 2026-11-21T12:00:00Z: the server cannot be reached"


def test_a_destination_that_is_out_of_reach_or_late_is_told(wiring: Wiring) -> None:
    why = "looking for it failed\ndetail: repository.json is not there\nhint: is the disk mounted?"
    assert told(wiring, local=why) == ("destination local: looking for it failed: repository.json is not there",)
    assert told(wiring, behind_since=NOW - timedelta(hours=1)) == (
        "destination local: lacks binary logs since 2026-11-21T11:00:00Z",
    )


def test_where_the_policy_asks_for_no_stream_nothing_is_missed(short_tmp: Path) -> None:
    with open_catalog(Office(short_tmp).write().catalog) as catalog:
        assert timeline(Wiring(Office(short_tmp).write(), catalog, Clock(NOW)), "db1").warnings == ()


def seen(wiring: Wiring, state: str, *, since: datetime = NOW, **more: object) -> Stream:
    wiring.catalog.binlogs.set_stream_state(
        "db1",
        {
            "state": state,
            "since": format_time(since),
            "error": "",
            "trouble": "",
            "destinations": {},
            "owner": owner(),
            **more,
        },
        NOW,
    )
    found = stream_of(wiring, wiring.settings.server("db1"))
    assert found is not None
    return found


def test_a_plan_knows_whether_a_stream_failed_or_its_server_is_only_out_of_reach(wiring: Wiring) -> None:
    never = stream_of(wiring, wiring.settings.server("db1"))
    assert never is not None
    assert (never.limit, never.failed) == (None, False), "a catalog that was made anew knows of no stream"
    well = seen(wiring, "streaming")
    assert (well.trouble, well.failed, well.unseen_since, well.limit, well.promised) == ("", False, None, LIMIT, False)
    assert seen(wiring, "failed", error="denied").failed
    before = NOW - timedelta(hours=3)
    away = seen(wiring, "waiting", since=before, error="the server cannot be reached", away=True)
    assert (away.failed, away.unseen_since) == (False, before)
    stuck = seen(wiring, "waiting", since=before, error="a file is damaged", away=False)
    assert (stuck.failed, stuck.unseen_since) == (False, None), "it counts by its age"
    for ended, why in (("failed", "denied"), ("waiting", "a file is damaged")):
        over = seen(wiring, "stopped", ended=ended, error=why)
        assert over.failed
        assert over.trouble.endswith(f"; last error: {why}")
    assert not seen(wiring, "stopped", ended="waiting", error="the server cannot be reached", away=True).failed
    assert not seen(wiring, "stopped", ended="streaming").failed


def test_a_stream_of_another_server_is_none_of_this_one(wiring: Wiring) -> None:
    ours = Identity("db1", "ours", Verdict.OWN, NOW - timedelta(days=1), NOW - timedelta(hours=1), server_id=1)
    wiring.catalog.identities.put(ours)
    assert not seen(wiring, "streaming").failed
    wiring.catalog.identities.put(
        Identity(
            "db1",
            "theirs",
            Verdict.STRANGER,
            NOW - timedelta(minutes=9),
            NOW,
            server_id=2,
            evidence="it lacks the last archived transactions",
        )
    )
    found = seen(wiring, "streaming")
    assert found.failed
    assert found.trouble.startswith("another server, theirs, answers under this name since 2026-11-21T11:51:00Z, and")
    assert "backupd server accept db1" in found.trouble


def test_only_a_stranger_of_whom_something_is_kept_is_told_in_a_timeline(wiring: Wiring) -> None:
    wiring.catalog.identities.put(Identity("db1", "theirs", Verdict.STRANGER, NOW - timedelta(minutes=9), NOW))
    assert kept_apart(wiring, "db1") == (), "its only backup was deleted, and nothing was streamed"
    wiring.catalog.backups.add(replace(samples.backup(server="db1"), server_uuid="theirs"))
    (words,) = kept_apart(wiring, "db1")
    assert "1 backups of it are kept separate" in words
    wiring.catalog.binlogs.add_branch(
        Branch(
            server="db1",
            id="b",
            noticed_at=NOW,
            reason=BranchReason.UNKNOWN,
            server_uuid="theirs",
            flavour="mariadb",
            basename="bin",
            first_number=1,
        )
    )
    (words,) = kept_apart(wiring, "db1")
    assert "1 backups and the binary logs of it are kept separate" in words
