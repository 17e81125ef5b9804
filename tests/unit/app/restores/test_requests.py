"""Thaws as jobs: what a plan needs out of an archive, asked for once, whatever dies on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.context.wiring import JobRun, Result
from backupd.app.jobs import jobs as pulse
from backupd.app.jobs.jobs import cancel
from backupd.app.restores import thaw_jobs as thawing
from backupd.app.restores.execution import thaw_wait_of
from backupd.app.restores.jobs import thaw_for, thaws
from backupd.app.restores.plan import plan
from backupd.app.restores.request import RestoreOptions
from backupd.app.restores.thaw_jobs import JobThawWait, ThawWatch, advance, raise_tier
from backupd.app.restores.thaw_wait import cold_of_part, with_thaw
from backupd.app.retention.preview import preview
from backupd.app.service import dispatch
from backupd.app.service.dispatch import run_here
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop
from backupd.model.errors import ArchivedError, CancelledError, RefusedError
from backupd.model.event import Severity
from backupd.model.job import JobKind, JobState, Progress, silent
from backupd.model.server_facts import Position
from backupd.model.thaw import LOGS, ThawState
from backupd.process.run_context import RunContext
from backupd.transfer import log_segments
from restore.fetch.sources import Sources
from restore.planning.plan import Plan
from restore.replay.logs import fetch_logs
from storage import layout
from storage.destination import Tier
from tests.support.catalog.installation import SERVER, Installation
from tests.support.keys import Keys
from tests.support.logs.log_store import BRANCH, key_of, store, wired
from tests.support.logs.real_logs import real_logs
from tests.support.stores.cold import ColdPlace
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import backup_id

FULL, INCREMENT = backup_id(1), backup_id(2)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def house(tmp_path: Path, catalog: Catalog, *places: str, storage_class: str = "DEEP_ARCHIVE") -> Installation:
    """A full backup and an increment at every place; those whose names begin with ``vault`` are archives."""
    installation = Installation(tmp_path, catalog, "", places)
    for name in places:
        installation.wiring._opened[name] = (
            ColdPlace(name, installation.clock, storage_class)
            if name.startswith("vault")
            else (MemoryDestination(name))
        )
    installation.add(1, days=1)
    installation.add(2, days=0.5, parent=1)
    return installation


def vault_of(installation: Installation, name: str = "vault") -> ColdPlace:
    found = installation.wiring.destination(name)
    assert isinstance(found, ColdPlace)
    return found


def planned(installation: Installation, **options: str) -> Plan:
    return plan(installation.wiring, SERVER, "latest", None, options=RestoreOptions(**options))  # type: ignore[arg-type]  # texts


def begun(installation: Installation, tier: str = "standard", days: int = 7) -> str:
    done = thaw_for(installation.wiring, SERVER, "latest", RestoreOptions(thaw=tier, days=days), ())
    assert done.job is not None
    return done.job.id


def states(installation: Installation, job_id: str) -> set[ThawState]:
    return {item.state for item in installation.catalog.thaws.of(job_id)}


def test_a_plan_names_every_cold_object_the_hours_and_the_cost_of_each_tier(tmp_path: Path, catalog: Catalog) -> None:
    made = planned(house(tmp_path, catalog, "vault"), thaw="bulk")
    assert made.thaw is not None
    shown = json.loads(json.dumps(made.as_json()))["thaw"]
    assert {(one["of"], one["class"], one["state"]) for one in shown["objects"]} == {
        (FULL, "DEEP_ARCHIVE", "archived"),
        (INCREMENT, "DEEP_ARCHIVE", "archived"),
    }
    assert all(layout.cold_kind(one["key"]) == "object" for one in shown["objects"])
    assert [(offer["tier"], offer["hours"]) for offer in shown["offers"]] == [("bulk", 48), ("standard", 12)]
    assert (shown["count"], shown["tier"], shown["hours"], shown["currency"]) == (2, "bulk", 48, "USD")
    assert made.steps[0].name == "thawed"
    assert made.steps[0].seconds == 48 * 3600


def test_a_tier_that_a_class_does_not_have_is_refused_with_those_it_has(tmp_path: Path, catalog: Catalog) -> None:
    with pytest.raises(RefusedError, match="cannot be thawed at the tier expedited") as refused:
        planned(house(tmp_path, catalog, "vault"), thaw="expedited")
    assert "bulk, standard" in refused.value.hint


def test_where_no_tier_is_asked_for_one_that_every_class_has_is_taken(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    settings = installation.wiring.settings
    archive = settings.configuration.archive.model_copy(update={"tier": "expedited"})
    installation.wiring = replace(
        installation.wiring,
        settings=replace(settings, configuration=settings.configuration.model_copy(update={"archive": archive})),
    )
    installation.wiring._opened["vault"] = ColdPlace("vault", installation.clock)
    installation.add(3, days=0.1)
    made = planned(installation)
    assert made.thaw is not None
    assert made.thaw.tier == "standard"


def test_a_copy_that_can_be_read_as_it_is_is_always_preferred(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault", "local")
    made = planned(installation)
    assert made.thaw is None
    assert made.destinations == ("local", "vault")
    assert any("vault would have to be thawed" in text for text in made.warnings)
    assert made.steps[0].title.startswith("fetch")
    assert "from local," in made.steps[0].title


def test_a_warm_place_that_does_not_answer_does_not_count(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault", "local")
    installation.wiring._opened["local"] = MemoryDestination("local", initialised=False)
    made = planned(installation)
    assert made.thaw is not None
    assert made.destinations[0] == "vault"
    assert any("local" in text and "cannot determine the storage class" in text for text in made.warnings)


def test_what_another_archive_has_thawed_is_not_thawed_again(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault", "vault2")
    first = planned(installation)
    assert first.thaw is not None
    one = first.thaw.objects[0].key
    vault_of(installation, "vault2").thaw(one, Tier.STANDARD, 7)
    installation.clock.move(hours=13)
    made = planned(installation)
    assert made.thaw is not None
    assert one not in {cold.key for cold in made.thaw.objects}
    assert len(made.thaw.objects) == 1


def test_a_thaw_asks_once_for_each_object_the_base_first_and_waits_without_anybody(
    tmp_path: Path, catalog: Catalog
) -> None:
    installation = house(tmp_path, catalog, "vault")
    before = threading.active_count()
    job_id = begun(installation)
    job = catalog.jobs.get(job_id)
    assert job.state is JobState.WAITING
    assert job.not_before is not None
    assert job.not_before > installation.clock()
    assert threading.active_count() == before
    vault = vault_of(installation)
    assert set(vault.requests.values()) == {1}
    parts = {item.key: item.part for item in catalog.thaws.of(job_id)}
    assert {parts[key] for key in vault.order} == {FULL, INCREMENT}
    advance(installation.wiring, job_id)
    assert begun(installation) == job_id  # the same again is the same thaw
    assert set(vault.requests.values()) == {1}
    installation.clock.move(hours=12, minutes=1)
    assert advance(installation.wiring, job_id).state is JobState.SUCCEEDED
    assert catalog.events.list(kind="thaw-ready")[0].job_id == job_id
    assert planned(installation).thaw is None
    assert thaw_for(installation.wiring, SERVER, "latest", RestoreOptions(), ()).job is None


def test_what_a_killed_call_had_asked_for_is_not_paid_for_again(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    vault = vault_of(installation)
    vault.after = 1
    job_id = begun(installation)
    assert "does not answer" in catalog.jobs.get(job_id).message
    # As if it was killed before anything could be recorded.
    catalog.thaws.record(
        [
            replace(item, state=ThawState.WANTED, requested_at=None, expected_at=None)
            for item in catalog.thaws.of(job_id)
        ]
    )
    vault.silent, vault.after = False, None
    installation.clock.move(minutes=11)
    watch = ThawWatch()
    watch.look(installation.wiring, installation.clock())
    watch.join(240)
    assert states(installation, job_id) == {ThawState.THAWING}
    assert sorted(vault.requests.values()) == [1, 1]


def test_the_service_looks_only_when_it_is_time_and_less_often_the_longer_it_takes(
    tmp_path: Path, catalog: Catalog
) -> None:
    installation = house(tmp_path, catalog, "vault")
    job_id = begun(installation, "bulk")
    looks = vault_of(installation).looks
    watch = ThawWatch()
    watch.look(installation.wiring, installation.clock())
    watch.join(240)
    assert vault_of(installation).looks == looks
    job = catalog.jobs.get(job_id)
    assert job.not_before == installation.clock() + thawing.MOST
    installation.clock.move(hours=47, minutes=55)
    job = advance(installation.wiring, job_id)
    assert job.not_before == installation.clock() + thawing.LEAST
    assert catalog.jobs.waiting(installation.clock(), timedelta(hours=1)) == ()
    assert catalog.jobs.waiting(installation.clock() - timedelta(days=3), timedelta(hours=1)) == (
        job,
    )  # a clock set back


def test_a_raised_tier_is_asked_for_at_once_and_only_for_what_is_not_there(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault", storage_class="GLACIER")
    job_id = begun(installation, "bulk")
    with pytest.raises(RefusedError, match="not faster"):
        raise_tier(installation.wiring, job_id, "bulk")
    raise_tier(installation.wiring, job_id, "expedited")
    assert catalog.thaws.of(job_id)[0].state is ThawState.RAISED
    job = advance(installation.wiring, job_id)
    assert job.arguments["tier"] == "expedited"
    assert sorted(vault_of(installation).requests.values()) == [2, 2]
    installation.clock.move(hours=1, minutes=1)
    assert advance(installation.wiring, job_id).state is JobState.SUCCEEDED
    with pytest.raises(RefusedError, match="not a waiting thaw"):
        raise_tier(installation.wiring, job_id, "expedited")


def test_a_tier_that_the_place_refuses_is_told_and_changes_no_expectation(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault", storage_class="GLACIER")
    job_id = begun(installation, "bulk")
    before = {item.key: (item.tier, item.requested_at, item.expected_at) for item in catalog.thaws.of(job_id)}
    vault_of(installation).stubborn = True
    installation.clock.move(minutes=1)
    raise_tier(installation.wiring, job_id, "expedited")
    advance(installation.wiring, job_id)
    found = catalog.thaws.of(job_id)
    assert {item.key: (item.tier, item.requested_at, item.expected_at) for item in found} == before
    assert states(installation, job_id) == {ThawState.THAWING}
    (told,) = catalog.events.list(kind="thaw-not-raised")
    assert "destination vault refused tier expedited for 2 objects" in told.message


def test_who_joins_a_thaw_and_wants_it_for_longer_gets_it_for_longer(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    job_id = begun(installation, days=2)
    assert begun(installation, days=30) == job_id
    assert catalog.jobs.get(job_id).arguments["days"] == 30
    installation.clock.move(hours=13)
    assert advance(installation.wiring, job_id).state is JobState.SUCCEEDED
    until = catalog.thaws.count(job_id).ready_until
    assert until is not None
    assert until >= installation.clock() + timedelta(days=29)
    assert {vault_of(installation).coldness(item.key).until for item in catalog.thaws.of(job_id)} == {until}
    assert set(vault_of(installation).requests.values()) == {2}


def test_who_joins_a_thaw_asks_again_for_what_could_not_be_asked_for(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    job_id = begun(installation)
    first, *rest = catalog.thaws.of(job_id)
    catalog.thaws.record([replace(first, state=ThawState.FAILED, message="not now")])
    assert rest
    assert begun(installation) == job_id
    assert states(installation, job_id) == {ThawState.THAWING}


def test_what_a_rule_of_the_place_has_archived_is_found_by_asking_when_somebody_wants_a_thaw(
    tmp_path: Path, catalog: Catalog
) -> None:
    installation = house(tmp_path, catalog, "local")
    vault = installation.wiring._opened["local"] = ColdPlace("local", installation.clock, expected=False)
    for number, parent in ((1, None), (2, 1)):
        installation.add(number, days=1, parent=parent, known=False)
    assert planned(installation).thaw is None
    assert vault.looks == 0, "each question costs"
    assert cold_of_part(installation.wiring, planned(installation), FULL), "once it was met, it is asked for"
    made = planned(installation, thaw="standard")
    assert made.thaw is not None
    job_id = begun(installation)
    installation.clock.move(hours=13)
    assert advance(installation.wiring, job_id).state is JobState.SUCCEEDED
    installation.clock.move(days=30)
    again = thaw_for(installation.wiring, SERVER, "latest", RestoreOptions(), ())
    assert again.job is not None, "no tier has to be named for that"


def test_deep_archive_is_not_raised_to_what_it_does_not_have(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    job_id = begun(installation, "bulk")
    with pytest.raises(RefusedError, match="DEEP_ARCHIVE cannot be thawed at the tier expedited"):
        raise_tier(installation.wiring, job_id, "expedited")
    assert states(installation, job_id) == {ThawState.THAWING}


def test_an_expired_thaw_is_noticed_by_a_plan_and_asked_for_again(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    first = begun(installation)
    installation.clock.move(hours=13)
    advance(installation.wiring, first)
    installation.clock.move(days=8)
    made = planned(installation)
    assert made.thaw is not None
    assert len(made.thaw.objects) == 2
    again = begun(installation)
    assert again != first
    assert set(vault_of(installation).requests.values()) == {2}


def test_what_was_thawed_goes_away_soon_is_told_with_the_plan(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    begun(installation, days=1)
    installation.clock.move(hours=12 + 23.5)
    made = planned(installation)
    assert made.thaw is None
    assert any("thawed copies expire" in text for text in made.warnings)


def test_what_came_early_is_kept_until_the_rest_is_there(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    vault = vault_of(installation)
    job_id = begun(installation, "bulk", days=1)
    early = catalog.thaws.of(job_id)[0].key
    vault.thaw(early, Tier.STANDARD, 1)
    installation.clock.move(hours=13)
    assert advance(installation.wiring, job_id).state is JobState.WAITING
    installation.clock.move(hours=22)  # its day is nearly over, the other one takes 48 hours
    advance(installation.wiring, job_id)
    kept = next(item for item in catalog.thaws.of(job_id) if item.key == early)
    assert kept.state is ThawState.READY
    assert kept.ready_until is not None
    assert kept.ready_until > installation.clock() + timedelta(hours=12)


def test_one_that_is_gone_fails_the_thaw_and_is_named_when_the_others_have_come(
    tmp_path: Path, catalog: Catalog
) -> None:
    installation = house(tmp_path, catalog, "vault")
    job_id = begun(installation)
    gone = catalog.thaws.of(job_id)[0].key
    vault_of(installation).delete(gone)
    installation.clock.move(hours=13)
    job = advance(installation.wiring, job_id)
    assert job.state is JobState.FAILED
    assert gone in job.detail
    assert [event.kind for event in catalog.events.list(limit=1)] == ["job-failed"]


def test_a_waiting_thaw_can_be_cancelled_and_is_forgotten_only_with_its_job(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    job_id = begun(installation)
    assert catalog.jobs.prune(installation.clock() + timedelta(days=100)) == ()
    assert cancel(installation.wiring, job_id, "anna").state is JobState.CANCELLED
    assert advance(installation.wiring, job_id).state is JobState.CANCELLED
    assert [(job.id, count.open) for job, count in thaws(installation.wiring, SERVER)] == [(job_id, 2)]
    assert catalog.thaws.forget() == 0


def test_what_is_being_thawed_does_not_expire_meanwhile(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    for number, days in ((3, 0.4), (4, 0.3)):
        installation.add(number, days=days)
    installation.write("{vault: {keep_fulls: 1}}")
    installation.wiring._opened["vault"] = vault = ColdPlace("vault", installation.clock)
    for number in (1, 3, 4):
        installation.add(number, days=0, known=False)
    done = thaw_for(installation.wiring, SERVER, f"backup:{FULL}", RestoreOptions(), ())
    assert done.job is not None
    rules = {
        one.backup.id: [ground.rule for ground in one.grounds]
        for one in preview(installation.wiring, SERVER, now=installation.clock())[0].backups
    }
    assert (rules[FULL], rules[backup_id(3)]) == (["read"], [])
    installation.clock.move(hours=13)
    assert advance(installation.wiring, done.job.id).state is JobState.SUCCEEDED
    assert vault.requests


def test_a_restore_refuses_what_is_archived_and_says_what_thawing_takes(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    with pytest.raises(ArchivedError, match="have to be thawed first") as refused:
        thaw_wait_of(installation.wiring, planned(installation), RestoreOptions())
    assert "bulk: at most 48 h" in refused.value.detail
    assert "backupd thaw shop --to latest" in refused.value.hint


def test_the_gate_opens_for_the_base_while_the_increment_still_thaws(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thawing, "STEP", 0.0)
    installation = house(tmp_path, catalog, "vault")
    vault = vault_of(installation)
    made = planned(installation)
    assert made.thaw is not None
    base = next(one.key for one in made.thaw.objects if one.part == FULL)
    vault.thaw(base, Tier.STANDARD, 7)
    installation.clock.move(hours=6)
    gate = thaw_wait_of(installation.wiring, planned(installation, thaw="standard"), RestoreOptions(thaw="standard"))
    assert not gate.is_open(FULL)
    installation.clock.move(hours=7)
    assert gate.is_open(FULL)
    assert not gate.is_open(INCREMENT)
    told: list[Progress] = []

    def pass_time(progress: Progress) -> None:
        told.append(progress)
        installation.clock.move(hours=1)

    gate.wait(FULL, pass_time, lambda: False)
    assert told == []
    gate.wait(INCREMENT, pass_time, lambda: False)
    assert told
    assert INCREMENT in told[0].note
    assert gate.is_open(INCREMENT)


def test_a_restore_that_waits_for_an_archive_for_long_does_not_hang(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thawing, "STEP", 0.02)
    monkeypatch.setattr(pulse, "BEAT", 0.02)
    monkeypatch.setattr(dispatch, "_patience", lambda _policy, _job: timedelta(seconds=1))
    installation = house(tmp_path, catalog, "vault")
    gate = JobThawWait(installation.wiring, planned(installation, thaw="bulk"), "bulk")
    begun_at = time.monotonic()
    installation.clock.move(hours=40)

    def pass_time(_progress: Progress) -> None:
        if time.monotonic() - begun_at > 1.5:
            installation.clock.move(hours=10)

    def work(run: JobRun) -> Result:
        gate.wait(FULL, run.report, run.cancel.is_set)
        return Result(outcome=gate.is_open(FULL))

    assert run_here(installation.wiring, JobKind.RESTORE, SERVER, work, report=pass_time).outcome
    assert catalog.events.list(kind="job-hanging") == ()


def test_a_thaw_that_is_late_is_told_once_for_each_time_that_was_promised(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    vault = vault_of(installation)
    job_id = begun(installation)
    vault.late = timedelta(hours=20)
    installation.clock.move(hours=12.5)
    for hours in (0, 1, 5):
        installation.clock.move(hours=hours)
        assert advance(installation.wiring, job_id).state is JobState.WAITING
    (told,) = catalog.events.list(kind="thaw-late")
    assert (told.severity, told.job_id) == (Severity.WARNING, job_id)
    assert "0 of 2 objects can be read" in told.message
    vault.late = timedelta(0)
    assert advance(installation.wiring, job_id).state is JobState.SUCCEEDED


def test_waiting_can_be_given_up_and_the_thaw_goes_on(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    gate = JobThawWait(installation.wiring, planned(installation), "standard")
    with pytest.raises(CancelledError, match="waited for an archive"):
        gate.wait(FULL, silent, lambda: True)
    job = catalog.jobs.list(kind="thaw")[0]
    assert job.state is JobState.WAITING
    cancel(installation.wiring, job.id, "anna")
    with pytest.raises(CancelledError, match="was cancelled"):
        gate.wait(FULL, silent, lambda: False)


def test_a_copy_that_went_away_while_it_was_read_is_asked_for_again(tmp_path: Path, catalog: Catalog) -> None:
    installation = house(tmp_path, catalog, "vault")
    gate = JobThawWait(installation.wiring, planned(installation), "standard")
    installation.clock.move(hours=13)
    assert gate.is_open(FULL)
    assert gate.is_open(INCREMENT)
    vault_of(installation).expire()
    assert gate.reopen(FULL)
    assert not gate.is_open(FULL)
    installation.clock.move(hours=13)
    assert gate.is_open(FULL)
    assert not gate.reopen(FULL)  # it is there


def test_cold_binary_logs_are_part_of_the_plan_unless_another_place_gives_them(tmp_path: Path, keys: Keys) -> None:
    logs = real_logs()[:1]
    with wired(tmp_path, keys) as wiring:
        vault = ColdPlace("offsite", wiring.clock, "GLACIER")
        wiring._opened["offsite"] = vault
        store(wiring, keys, logs, destinations=("offsite",))
        key = key_of(logs[0])
        stop = Stop(BRANCH.id, BRANCH.file(key.number), key.end, "")
        leg = ReplayLeg((key,), Position(stop.file, 4, ""), stop)
        replay = ReplaySpec((leg,), ReplayMethod.APPLIER, "", key.end, 1, (1,))
        chosen = Plan(SERVER, "latest", (FULL,), ("local",), leg.start, "", 1, 1, (), replay=replay)
        made = with_thaw(wiring, chosen, ())
        assert made.thaw is not None
        assert [(one.part, one.storage_class, one.destination) for one in made.thaw.objects] == [
            (LOGS, "GLACIER", "offsite")
        ]
        assert layout.cold_kind(made.thaw.objects[0].key) == "log"
        folder = tmp_path / "fetched"
        with pytest.raises(ArchivedError, match="cannot be read from any destination"):
            fetch_logs(SERVER, replay, Sources((), wiring.unsealer(), [vault]), folder, RunContext())
        assert cold_of_part(wiring, chosen, LOGS) == made.thaw.objects
        wiring.catalog.binlogs.add_segment(
            log_segments.load_header(vault, SERVER, key).segment, "local", 1, wiring.clock()
        )
        assert with_thaw(wiring, chosen, ()).thaw is None
