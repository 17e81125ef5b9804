"""A service on a machine whose clock is set forward and back by an hour, a day, a year: the real daemon and its jobs,
with a clock that a file moves."""

from __future__ import annotations

from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupState
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.dice import rounds
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import catalog_of, serving, until

HOUR, DAY = 3600, 86400
STEPS = (
    ((400 * DAY, 2), (-400 * DAY, 2))
    if rounds(1) == 1
    else ((HOUR, 1), (-HOUR, 1), (DAY, 2), (-DAY, 2), (400 * DAY, 3), (-400 * DAY, 3))
)
"""By how much the clock is set, and how many full backups there are then."""
_CLOCK = """\
import datetime, os, time
_file, _time, _gettime, _datetime = os.environ["TEST_CLOCK"], time.time, time.clock_gettime, datetime.datetime
def _moved():
    with open(_file) as file:
        return [float(word) for word in file.read().split()]
class _Any(type):
    def __instancecheck__(cls, one):
        return isinstance(one, _datetime)
    def __subclasscheck__(cls, kind):
        return issubclass(kind, _datetime)
class datetime_(_datetime, metaclass=_Any):
    @classmethod
    def now(cls, tz=None):
        return _datetime.now(tz) + datetime.timedelta(seconds=_moved()[0])
datetime_.__name__ = datetime_.__qualname__ = "datetime"
datetime.datetime = datetime_
time.time = lambda: _time() + _moved()[0]
time.clock_gettime = lambda clock: _gettime(clock) + (_moved()[1] if clock == time.CLOCK_BOOTTIME else 0)
"""
POLICY = """\
physical: {full: every 24h}
destinations: {required: [local]}
retention: {local: {recovery_window: 2d}}
objectives: {rpo: 12h}
retry: {attempts: 1}
witness: {enabled: false}
protection: {copies: 1, off_site: 0}
"""


class MovedClock:
    """Of every program of ``house``. ``step``: as somebody sets it; ``wait``: as time goes."""

    def __init__(self, house: House) -> None:
        folder = house.base / "moved"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_CLOCK)
        self._file = folder / "clock"
        self._wall = self._passed = 0.0
        self._write()
        house.env |= {"PYTHONPATH": str(folder), "TEST_CLOCK": str(self._file)}

    def step(self, seconds: float) -> None:
        self._wall += seconds
        self._write()

    def wait(self, seconds: float) -> None:
        self._passed += seconds
        self.step(seconds)

    def _write(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{self._wall} {self._passed}")
        fresh.rename(self._file)


def ended(catalog: Catalog, kind: JobKind) -> tuple[JobRecord, ...]:
    return catalog.jobs.list(kind=kind, state=(JobState.SUCCEEDED, JobState.FAILED))


def test_a_clock_that_is_set_loses_no_backup_opens_no_incident_that_stays_and_runs_nothing_twice(house: House) -> None:
    (house.base / "policies" / "gold.yaml").write_text(POLICY)
    house.backup()
    clock = MovedClock(house)
    with catalog_of(house) as catalog, serving(house):

        def step(seconds: int) -> None:
            """And wait until the service has seen it; then let it stand long enough to be believed."""
            known = jumps()
            clock.step(seconds)
            until(lambda: jumps() > known, lambda: "clock-jump", 60)
            clock.wait(301)

        def jumps() -> int:
            return sum(event.kind == "clock-jump" for event in catalog.events.list())

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
