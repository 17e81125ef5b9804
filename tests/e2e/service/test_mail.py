"""Failures and silence are mailed by the real service: once each, and once when it is well again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.catalog.session import Catalog
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.dice import SOAK
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, Serving, catalog_of, make_due, serving, until
from tests.support.service.mail_server import MailBox, mail_server
from tests.support.service.serving import held_port

LEG = "physical.full"
POLICY = ONCE_A_YEAR.replace("retry: {attempts: 1}", "retry: {attempts: 2, pause: 1s}")
IMPATIENT = POLICY + "limits: {hang: 3s}\n"
REPORTING = "api: {enabled: false}\nalerts:\n  email: {smtp: %s, from: backupd@example.com, to: [dba@example.com]}\n"


@pytest.fixture
def box() -> Iterator[MailBox]:
    with held_port() as port:
        yield MailBox(port=port)


@pytest.fixture
def tool(short_tmp: Path) -> Path:
    """What mariadb-backup does instead of its work while this file is there: its content, as a shell."""
    return short_tmp / "instead"


@pytest.fixture
def watched(house: House, tool: Path, box: MailBox) -> House:
    """A house that mails, and whose policy asks for everything once a year."""
    real, stand = shutil.which("mariadb-backup"), house.base / "mariadb-backup"
    stand.write_text(f'#!/bin/sh\ncase "$*" in *--backup*) [ -e {tool} ] && . {tool};; esac\nexec {real} "$@"\n')
    stand.chmod(0o755)
    house.programs = {"mariadb-backup": str(stand)}
    house.config_extra = REPORTING % box.url
    house.write()
    (house.base / "policies" / "gold.yaml").write_text(POLICY)
    return house


@pytest.fixture
def catalog(watched: House) -> Iterator[Catalog]:
    with catalog_of(watched) as opened:
        yield opened


def scheduled(catalog: Catalog) -> JobRecord:
    """A run of the leg, as its schedule would queue it."""
    now = datetime.now(UTC)
    job = JobRecord(
        id=new_id(now),
        kind=JobKind.FULL,
        server=SERVER,
        state=JobState.QUEUED,
        queued_at=now,
        leg=LEG,
        due_at=now,
        requested_by="schedule",
    )
    catalog.jobs.enqueue(job)
    return job


def over(catalog: Catalog, job: JobRecord) -> JobRecord:
    until(lambda: catalog.jobs.get(job.id).finished_at is not None, lambda: "its end")
    return catalog.jobs.get(job.id)


def again(catalog: Catalog, job: JobRecord) -> JobRecord:
    (found,) = catalog.jobs.list(previous=job.id)
    return over(catalog, found)


def follow(service: Serving, catalog: Catalog, policy: Path, text: str) -> None:
    """Let the service go by another policy."""
    before = len(catalog.events.list(kind="config-reloaded"))
    policy.write_text(text)
    service.reload()
    until(lambda: len(catalog.events.list(kind="config-reloaded")) > before, lambda: "the policy's reading")


def test_a_job_that_fails_one_that_never_started_and_one_that_hangs_are_one_mail_each_and_one_when_it_is_well(
    watched: House, catalog: Catalog, tool: Path, box: MailBox
) -> None:
    fails, hangs = (f"shop-db1: {LEG} {word}" for word in ("failed", "hung"))
    missed = "shop-db1: verify did not run"
    with mail_server(box, port=box.port), serving(watched) as service:
        until(lambda: len(catalog.schedules.all()) == 6, lambda: "the schedules' rows")
        tool.write_text("echo no room left on the planet >&2; exit 1\n")
        make_due(catalog, "verify")
        service.reload()
        failed = again(catalog, over(catalog, scheduled(catalog)))  # twice in vain
        assert (failed.state, failed.attempt) == (JobState.FAILED, 2)
        box.wait(
            lambda: (
                {f"[backupd] ERROR {fails}", f"[backupd] WARNING {missed}", f"[backupd] RECOVERED {missed}"}
                == set(box.subjects())
            )
        )
        tool.unlink()
        assert over(catalog, scheduled(catalog)).state is JobState.SUCCEEDED
        box.wait(lambda: f"[backupd] RECOVERED {fails}" in box.subjects())

        policy = watched.base / "policies" / "gold.yaml"
        follow(service, catalog, policy, IMPATIENT)  # only now: a slow machine's good backup is not to count as hung
        tool.write_text("exec sleep 600\n")
        hung = over(catalog, scheduled(catalog))
        assert (hung.state, hung.message[:7]) == (JobState.FAILED, "stopped")
        box.wait(lambda: f"[backupd] ERROR {hangs}" in box.subjects())
        tool.unlink()
        follow(service, catalog, policy, POLICY)
        if again(catalog, hung).state is not JobState.SUCCEEDED:  # its repetition hung as well
            assert over(catalog, scheduled(catalog)).state is JobState.SUCCEEDED
        box.wait(lambda: f"[backupd] RECOVERED {hangs}" in box.subjects())
        assert service.stop() == 0
    assert sorted(box.subjects()) == sorted(
        f"[backupd] {word}"
        for word in (
            f"ERROR {fails}",
            f"RECOVERED {fails}",
            f"WARNING {missed}",
            f"RECOVERED {missed}",
            f"ERROR {hangs}",
            f"RECOVERED {hangs}",
        )
    )
    (first,) = [mail for mail in box.mails if mail["Subject"] == f"[backupd] ERROR {fails}"]
    (second,) = [mail for mail in box.mails if mail["Subject"] == f"[backupd] RECOVERED {fails}"]
    body = first.get_body(("plain",))
    assert body is not None
    for part in ("no room left on the planet", "What to do next:", "backupd jobs log"):
        assert part in body.get_content()
    assert second["In-Reply-To"] == first["Message-ID"]
    late = [
        (message.sent_at - message.created_at).total_seconds()
        for message in catalog.messages.list()
        if message.sent_at is not None
    ]
    assert len(late) == 6
    assert max(late) < 240
    assert watched.ok("alerts") == []
    assert {one["state"] for one in watched.ok("alerts", "messages")} == {"sent"}


@SOAK  # tests/unit/app/alerting/test_threads.py always runs the same without a service
def test_a_mail_server_that_is_down_holds_nothing_up_and_the_mail_comes_later(
    watched: House, catalog: Catalog, tool: Path, box: MailBox
) -> None:
    tool.write_text("exit 1\n")
    with serving(watched) as service:
        until(lambda: len(catalog.schedules.all()) == 6, lambda: "the schedules' rows")
        over(catalog, scheduled(catalog))
        until(lambda: any(one.attempts for one in catalog.messages.list()), lambda: "a try")
        (message,) = watched.ok("alerts", "messages")
        assert (message["state"], "does not answer" in message["error"]) == ("queued", True)
        assert watched.fails("alerts", "test").out.startswith("email: NOT SENT")
        service.kill()
    (incident,) = watched.ok("alerts")
    watched.ok("alerts", "acknowledge", incident["id"])
    message = next(one for one in catalog.messages.list() if one.incident_id)
    catalog.messages.update(replace(message, next_try=datetime.now(UTC)))  # a minute later
    with mail_server(box, port=box.port), serving(watched) as service:
        box.wait(lambda: f"[backupd] ERROR shop-db1: {LEG} failed" in box.subjects())
        assert watched.run("alerts", "test").code == 0
        assert service.stop() == 0
    assert sum(subject.startswith("[backupd] ERROR") for subject in box.subjects()) == 1
    assert watched.ok("audit")[0]["action"] in {"alerts-tested", "alert-acknowledged"}
