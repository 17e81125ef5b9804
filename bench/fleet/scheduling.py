"""1,000 servers scheduled by the real service: processor time in a quiet minute, how late jobs are queued, how long a
rebuild takes; and what happens when every server is due in the same second.

Part of ``make bench``. No job starts: a job of this process takes the only slot. What is measured is the service alone.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import owner
from backupd.app.schedule.calendar import AlarmClock, all_legs, start_of
from backupd.app.schedule.timetable import Timetable
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.job import JobRecord, JobState
from backupd.model.text import new_id
from tests.support.stores.folders import short_directory

SERVERS = 1000
MINUTE = 60.0
POLICY = """\
physical: {{full: "30 2 * * *", incremental: "{minute} * * * *"}}
destinations: {{required: [local]}}
retention: {{local: {{keep_fulls: 2}}}}
test_restore: {{schedule: "0 6 * * *"}}
timing: {{timezone: Europe/Berlin}}
"""
STEADY = {f"at{minute:02}": POLICY.format(minute=minute) for minute in range(60)}
"""Increments come each hour, at another minute for each policy: 17 starts a minute. The rest comes daily."""
BURST = {name: POLICY.format(minute="*") for name in STEADY}


def main() -> str:
    lines = [f"| {SERVERS:,} servers scheduled | measured | goal |", "|---|---|---|"]
    with short_directory() as base:
        config = write(base, STEADY)
        lines.append(rebuild(config))
        with open_catalog(f"sqlite:///{base}/catalog.db") as catalog:
            occupy(catalog)
            with (
                (base / "log").open("wb") as log,
                subprocess.Popen(
                    [str(Path(sys.executable).with_name("backupd")), "--config", str(config), "serve"],
                    stderr=log,
                    env={**os.environ, "BACKUPD_RUNTIME": str(base / "run")},
                ) as service,
            ):
                try:
                    lines += steady(service, catalog, config, base)
                    lines += burst(service, catalog, base)
                finally:
                    service.terminate()
                    service.wait(60)
    return "\n".join(lines)


def write(base: Path, policies: Mapping[str, str]) -> Path:
    (base / "policies").mkdir(exist_ok=True)
    for name, text in policies.items():
        (base / "policies" / f"{name}.yaml").write_text(text)
    servers = "".join(
        f"  db{number:04}: {{socket: {base}/no.sock, user: nobody, policy: at{number % 60:02}}}\n"
        for number in range(SERVERS)
    )
    config = base / "backupd.yaml"
    config.write_text(
        f"catalog: sqlite:///{base}/catalog.db\nspool: {base}/spool\nservers:\n{servers}"
        f"destinations:\n  local: {{type: filesystem, path: {base}/repository}}\n"
        f"encryption: {{gnupg_home: {base}/gnupg, recipients: [ops@example.com]}}\n"
        "concurrency: {jobs: 1}\n"
    )
    return config


def occupy(catalog: Catalog) -> None:
    now = datetime.now(UTC)
    catalog.jobs.add(
        JobRecord(
            id=new_id(now),
            kind="verify",
            server="",
            state=JobState.RUNNING,
            queued_at=now,
            started_at=now,
            owner=owner(),
            token=1,
        )
    )


def rebuild(config: Path) -> str:
    """From files to an alarm clock that is set, in this process."""
    begun = time.perf_counter()
    settings = load_settings(config)
    read = time.perf_counter()
    with open_catalog(settings.catalog) as catalog, AlarmClock(lambda: None) as alarm:
        opened = time.perf_counter()
        timetable = Timetable(catalog)
        timetable.follow(settings, datetime.now(UTC))
        alarm.set(timetable.coming())
        done = time.perf_counter()
    return (
        f"| {len(all_legs(settings)):,} schedules rebuilt | {done - opened:.2f} s, after {read - begun:.2f} s of "
        "reading the configuration | |"
    )


def steady(service: subprocess.Popen[bytes], catalog: Catalog, config: Path, base: Path) -> list[str]:
    wait_for(lambda: b"daemon-started" in (base / "log").read_bytes())
    time.sleep(10)  # its beginning is over then
    legs = {leg.key: leg for leg in all_legs(load_settings(config))}
    before, begun = processor_seconds(service.pid), time.monotonic()
    seen = watch(catalog, begun + MINUTE)
    share = (processor_seconds(service.pid) - before) / (time.monotonic() - begun)
    drifts = [
        (moment - start_of(legs[job.server, job.leg], job.due_at)).total_seconds()
        for job, moment in seen
        if job.due_at is not None
    ]
    return [
        f"| processor time in a minute at work | {share:.1%} of one core | < 5 % |",
        f"| from due to queued | {tell(drifts)} | < 1 s |",
    ]


def burst(service: subprocess.Popen[bytes], catalog: Catalog, base: Path) -> list[str]:
    """Every server in the same second, then the same again while all of them wait."""
    write(base, BURST)
    begun = time.monotonic()
    service.send_signal(signal.SIGHUP)
    wait_for(lambda: b"config-reloaded" in (base / "log").read_bytes())
    reload = time.monotonic() - begun
    now = datetime.now(UTC)
    if now.second > 50:
        time.sleep(15)
    due = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    before = processor_seconds(service.pid)
    seen = watch(catalog, time.monotonic() + (due - datetime.now(UTC)).total_seconds() + 10)
    drifts = [(moment - due).total_seconds() for job, moment in seen if job.due_at == due]
    cost = processor_seconds(service.pid) - before
    return [
        f"| a reload of everything | {reload:.2f} s | |",
        f"| all of them due in one second | {tell(drifts)}; {cost:.1f} s of one core | < 1 s |",
    ]


def watch(catalog: Catalog, until: float) -> list[tuple[JobRecord, datetime]]:
    """Jobs that appear in the catalog, each with when it was seen there first."""
    begun = datetime.now(UTC)
    known = {job.id for job in catalog.jobs.list()}
    seen = []
    while time.monotonic() < until:
        fresh = [job for job in catalog.jobs.list(since=begun) if job.id not in known]
        now = datetime.now(UTC)
        seen += [(job, now) for job in fresh]
        known |= {job.id for job in fresh}
        time.sleep(0.05)
    return seen


def tell(drifts: list[float]) -> str:
    if not drifts:
        return "no starts"
    return (
        f"{len(drifts)} starts, queued {statistics.median(drifts):.2f} s (median) to {max(drifts):.2f} s (last) "
        "after their time"
    )


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the service did not come that far")
        time.sleep(0.02)


if __name__ == "__main__":
    print(main())
