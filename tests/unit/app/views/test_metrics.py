"""What the overview says, as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from backupd.app.context.wiring import Wiring, owner
from backupd.app.views.metrics import measure
from backupd.app.views.overview import overview
from backupd.catalog.session import open_catalog
from backupd.metrics import METRICS, exposition
from backupd.model.backup_record import Copy, HoldKind
from backupd.model.event import Incident, Message, MessageKind, MessageState, Severity
from backupd.model.job import JobState
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Clock, Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
POLICY = GOLD + "binlog: {stream: true}\nobjectives: {rpo: 2h, rto: 99d}\nprotection: {copies: 1, off_site: 0}\n"


@pytest.fixture
def wiring(short_tmp: Path) -> Iterator[Wiring]:
    settings = Office(short_tmp, {"db1": "gold", "db2": "gold"}).write(gold=POLICY)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, Clock(NOW))


def told(wiring: Wiring, *, everything: bool = True) -> dict[tuple[str, ...], float]:
    """By name and the values of its labels, in their order."""
    order = {metric.name: metric.labels for metric in METRICS}
    text = exposition(measure(wiring, NOW, everything=everything)).decode()
    return {
        (sample.name, *(sample.labels[label] for label in order[sample.name])): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_server_that_has_done_something_has_all_its_figures(wiring: Wiring) -> None:
    catalog, at = wiring.catalog, NOW - HOUR
    record = replace(
        samples.backup(server="db1", copies=(Copy("local", "complete", at, at),)),
        started_at=at - timedelta(minutes=5),
        finished_at=at,
    )
    catalog.backups.add(record)
    catalog.proofs.add(replace(samples.proof(), server="db1", started_at=at, finished_at=at))
    catalog.binlogs.set_stream_state(
        "db1",
        {
            "state": "streaming",
            "since": "2026-11-21T10:00:00Z",
            "error": "",
            "trouble": "",
            "destinations": {},
            "owner": owner(),
            "spool_bytes": 7,
            "max_spool_bytes": 9,
        },
        NOW,
    )
    running = replace(samples.job(server="db1"), started_at=at)
    catalog.jobs.add(running)
    ended = replace(samples.job(2, server="db1"), leg="physical.full")
    catalog.jobs.add(ended)
    catalog.jobs.finish(ended.id, JobState.FAILED, at, token=1)
    catalog.holds.set("db1", HoldKind.HOLD, "audit", "anna", NOW)
    catalog.lags.note("db1", "local", 77.0, NOW)
    found = told(wiring)
    stamp = at.timestamp()
    for key, value in {
        ("server_recoverable", "db1"): 1,
        ("server_latest_recoverable_timestamp_seconds", "db1"): stamp,
        ("server_rpo_seconds", "db1"): 3600,
        ("server_rpo_objective_seconds", "db1"): 7200,
        ("server_rto_objective_seconds", "db1"): 99 * 86400,
        ("server_backups", "db1"): 1,
        ("server_protected_backups", "db1"): 1,
        ("server_held", "db1"): 1,
        ("server_paused", "db1"): 0,
        ("backup_last_success_timestamp_seconds", "db1", "physical-full", ""): stamp,
        ("backup_last_age_seconds", "db1", "physical-full", ""): 3600,
        ("backup_last_duration_seconds", "db1", "physical-full", ""): 300,
        ("backup_last_new_bytes", "db1", "physical-full", ""): record.stats.bytes_new,
        ("proof_last_good", "db1"): 1,
        ("proof_age_seconds", "db1"): 3600,
        ("proof_compared_tables", "db1"): 37,
        ("stream_up", "db1"): 1,
        ("stream_spool_bytes", "db1"): 7,
        ("stream_up", "db2"): 0,
        ("job_running_seconds", "db1", "physical-full"): 3600,
        ("job_last_failed", "db1", "physical-full", "physical.full"): 1,
        ("jobs_ended_last_day", "db1", "physical-full", "failed"): 1,
        ("jobs", "running"): 1,
        ("jobs", "queued"): 0,
        ("destination_binlog_lag_seconds", "local"): 77,
        ("destination_backups", "local"): 1,
        ("destination_server_rpo_seconds", "local", "db1"): 3600,
        ("server_recoverable", "db2"): 0,
        ("server_status", "db2"): 2,
        ("service_on_watch",): 0,
    }.items():
        assert found[f"backupd_{key[0]}", *key[1:]] == pytest.approx(value), key
    assert ("backupd_server_rpo_seconds", "db2") not in found, "what is not known is not told"
    assert wiring.catalog.watch.take("a test")
    assert told(wiring)["backupd_service_on_watch",] == 1
    wiring.catalog.watch.leave()
    assert told(wiring)["backupd_service_on_watch",] == 0


def test_a_failure_of_what_somebody_asked_for_is_over_when_a_later_one_of_its_kind_succeeds(wiring: Wiring) -> None:
    for number, leg, state, ago in (
        (1, "", JobState.FAILED, 3),
        (2, "physical.full", JobState.FAILED, 2),
        (3, "physical.full", JobState.SUCCEEDED, 1),
    ):
        job = replace(samples.job(number, server="db1"), leg=leg)
        wiring.catalog.jobs.add(job)
        assert (told(wiring).get(("backupd_job_last_failed", "db1", "physical-full", "")) == 1) is (number > 1)
        wiring.catalog.jobs.finish(job.id, state, NOW - ago * HOUR, token=1)
    assert told(wiring)["backupd_job_last_failed", "db1", "physical-full", ""] == 0
    (found,) = overview(wiring, NOW, ["db1"])
    assert not any("the last physical-full" in reason.text for reason in found.reasons)


def test_what_belongs_to_no_server_is_told_to_who_sees_everything(wiring: Wiring) -> None:
    catalog = wiring.catalog
    catalog.incidents.record(
        [Incident("20261121T120001Z-00000001", "job-failed", "db1", "", Severity.ERROR, "m", "d", "h", NOW, NOW)],
        [],
        {},
    )
    catalog.messages.add(
        Message(
            "20261121T120001Z-00000002",
            "email",
            MessageKind.ALERT,
            MessageState.QUEUED,
            "s",
            ("ops@example.com",),
            "text",
            NOW - HOUR,
        )
    )
    found = told(wiring)
    assert found["backupd_incidents_open", "error"] == 1
    assert found["backupd_messages", "queued"] == 1
    assert found["backupd_message_oldest_queued_seconds",] == 3600
    narrow = told(wiring.of({"db2"}), everything=False)
    assert {key[1] for key in narrow if key[0].startswith("backupd_server")} == {"db2"}
    assert not any("destination_status" in key[0] or "message" in key[0] or "incident" in key[0] for key in narrow)


def test_every_metric_that_is_announced_is_also_told() -> None:
    source = (Path(__file__).parents[4] / "backupd" / "app" / "views" / "metrics.py").read_text()
    for metric in METRICS:
        word = metric.name.removeprefix("backupd_")
        parts = [word, word.removeprefix("backup_last_"), word.removeprefix("destination_")]
        assert any(f'"{part}"' in source or f'"backupd_{part}"' in source for part in parts), metric.name
