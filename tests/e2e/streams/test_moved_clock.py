"""A service on a machine whose clock is set forward and back by an hour, a day, a year: the real daemon and its jobs,
with a clock that a file moves."""

from __future__ import annotations

import time

from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupState
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.dice import rounds
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.moved_clock import MovedClock
from tests.support.e2e.service import catalog_of, serving, until

HOUR, DAY = 3600, 86400
STEPS = (
    ((400 * DAY, 2), (-400 * DAY, 2))
    if rounds(1) == 1
    else ((HOUR, 1), (-HOUR, 1), (DAY, 2), (-DAY, 2), (400 * DAY, 3), (-400 * DAY, 3))
)
"""By how much the clock is set, and how many full backups there are then."""
POLICY = """\
physical: {full: every 24h}
destinations: {required: [local]}
retention: {local: {recovery_window: 2d}}
objectives: {rpo: 12h}
retry: {attempts: 1}
witness: {enabled: false}
protection: {copies: 1, off_site: 0}
"""


def ended(catalog: Catalog, kind: JobKind) -> tuple[JobRecord, ...]:
    return catalog.jobs.list(kind=kind, state=(JobState.SUCCEEDED, JobState.FAILED))


def test_a_clock_that_is_set_loses_no_backup_opens_no_incident_that_stays_and_runs_nothing_twice(house: House) -> None:
    (house.base / "policies" / "gold.yaml").write_text(POLICY)
    house.backup()
    clock = MovedClock(house)
    clock.step((36 * HOUR - time.time()) % DAY)  # noon: none is due by the time that the test takes
    with catalog_of(house) as catalog, serving(house):

        def step(seconds: int) -> None:
            """And wait until the service has seen it; then let it stand long enough to be believed."""
            known = jumps()
            clock.step(seconds)
            until(lambda: jumps() > known, lambda: "clock-jump")
            clock.wait(301)

        def jumps() -> int:
            return sum("clock was set" in event.message for event in catalog.events.list(kind="clock-jump"))

        def incidents() -> set[str]:
            return {one.kind for one in catalog.incidents.open()} - {"clock-jump"}

        def at_rest(fulls: int) -> None:
            """So many full backups have been taken, all of them are there, and nothing is open or at work."""
            until(
                lambda: (
                    len(ended(catalog, JobKind.FULL)) == fulls
                    and not catalog.jobs.list(state=(JobState.QUEUED, JobState.RUNNING))
                ),
                lambda: f"full backup {fulls}",
            )
            assert {job.state for job in ended(catalog, JobKind.FULL)} == {JobState.SUCCEEDED}
            assert [record.state for record in catalog.backups.list(SERVER)] == [BackupState.COMPLETE] * fulls
            until(lambda: not incidents(), lambda: str(catalog.incidents.open()))

        at_rest(1)
        for seconds, fulls in STEPS:
            step(seconds)
            at_rest(fulls)
        assert len(ended(catalog, JobKind.RETENTION)) < 12
    assert house.ok("retention", SERVER, "--apply")["marked"] in ({}, {"local": []})
    assert "ended in the future" in house.run("timeline", SERVER).all
    assert house.fsck() == []
