"""The outlook of a policy: from its file alone, and for an installation with backups of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from backupd.app.context.wiring import Wiring
from backupd.app.retention.rules import Stored, View
from backupd.app.schedule.calendar import legs_of
from backupd.app.service.check import check
from backupd.app.views.capacity import forecast, room
from backupd.app.views.policies import Typical, ahead, explain_file, explain_here, planned_runs
from backupd.catalog.session import open_catalog, upgrade
from backupd.model.backup_record import BackupKind, BackupRecord, Copy, Stats
from backupd.model.errors import ConfigurationError, RefusedError
from backupd.model.job import JobKind
from policies.policy import Keep, Policy
from policies.reference import example
from storage.destination import Space
from tests.support.catalog.samples import backup, proof
from tests.support.service.house import Clock, Office
from tests.support.stores.memory import MemoryDestination

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)  # a Saturday
GB = 10**9
WEEK = {"physical": {"full": "0 2 * * sun", "incremental": "0 2 * * mon-sat"}, "destinations": {"required": ["local"]}}


def keep(**rules: object) -> Keep:
    return Keep.model_validate(rules)


def two_weeks(
    policy: dict[str, object], rules: Keep | None, *backups: Stored, zone: str = "UTC", typical: Typical | None = None
) -> list[tuple[str, str | None]]:
    """What is kept after them, oldest first: (id, parent)."""
    value = Policy.model_validate(policy)
    until = NOW + timedelta(days=14)
    runs = planned_runs(legs_of(value, "db1", zone), NOW, until)
    assert value.physical is not None
    decisions = ahead(
        View("db1", "local", backups),
        rules,
        runs,
        until=until,
        zone=ZoneInfo(zone),
        max_chain=value.physical.max_chain,
        typical=typical,
    )
    return [(one.backup.id, one.backup.parent) for one in reversed(decisions.kept)]


def full(day: str) -> str:
    return f"202611{day}T020000Z-full"


def step(day: str, month: str = "11") -> str:
    return f"2026{month}{day}T020000Z-increment"


# -- runs and what they leave


def test_a_full_on_sundays_and_increments_on_the_other_days_make_two_chains() -> None:
    days = ["23", "24", "25", "26", "27", "28"]
    first = [(full("22"), None)] + [
        (step(day), step(before) if before else full("22")) for before, day in zip(["", *days], days, strict=False)
    ]
    later = [("30", "11"), ("01", "12"), ("02", "12"), ("03", "12"), ("04", "12"), ("05", "12")]
    second: list[tuple[str, str | None]] = [(full("29"), None)]
    for day, month in later:
        second.append((step(day, month), second[-1][0]))
    assert two_weeks(WEEK, None) == first + second


@pytest.mark.parametrize("rules", [{"keep_fulls": 1}, {"recovery_window": "2d"}, {"daily": 3}])
def test_retention_on_the_way_takes_whole_chains_and_leaves_the_newest(rules: dict[str, object]) -> None:
    assert [name for name, _parent in two_weeks(WEEK, keep(**rules))] == [
        full("29"),
        *(
            step(day, month)
            for day, month in (("30", "11"), ("01", "12"), ("02", "12"), ("03", "12"), ("04", "12"), ("05", "12"))
        ),
    ]


def test_an_increment_that_has_nothing_to_build_on_is_planned_as_a_full_one() -> None:
    assert two_weeks({**WEEK, "physical": {"full": "0 2 1 1 *", "incremental": "0 2 * * mon"}}, None) == [
        (full("23"), None),
        (step("30"), full("23")),
    ]


def test_a_chain_that_is_there_is_gone_on_with_until_it_is_long_enough() -> None:
    base = Stored("base", BackupKind.PHYSICAL_FULL, None, NOW, NOW)
    last = Stored("last", BackupKind.PHYSICAL_INCREMENTAL, "base", NOW, NOW + timedelta(minutes=1))
    broken = Stored("broken", BackupKind.PHYSICAL_INCREMENTAL, "gone", NOW, NOW + timedelta(minutes=2))
    policy = {**WEEK, "physical": {"full": "0 2 1 1 *", "incremental": "0 2 * * mon", "max_chain": 2}}
    assert two_weeks(policy, None, base, last, broken)[-2:] == [(step("23"), "last"), ("20261130T020000Z-full", None)]


def test_planned_backups_are_as_large_and_as_long_as_lately() -> None:
    policy = Policy.model_validate(WEEK)
    until = NOW + timedelta(days=3)
    runs = planned_runs(legs_of(policy, "db1", "UTC"), NOW, until)
    decisions = ahead(
        View("db1", "local", ()),
        None,
        runs,
        until=until,
        zone=ZoneInfo("UTC"),
        max_chain=7,
        typical=Typical(1000, 10, timedelta(hours=1)),
    )
    assert [one.backup.bytes for one in decisions.backups] == [10, 10, 1000]
    assert {one.backup.finished_at.hour for one in decisions.backups} == {3}


def test_each_set_of_tables_is_planned_by_itself() -> None:
    sets = {
        name: {"schedule": cadence, "tables": {"include": [f"shop.{name}"]}}
        for name, cadence in (("small", "every 12h"), ("large", "0 2 * * sun"))
    }
    policy = Policy.model_validate({"logical": {"sets": sets}, "destinations": {"required": ["local"]}})
    until = NOW + timedelta(days=14)
    runs = planned_runs(legs_of(policy, "db1", "UTC"), NOW, until)
    decisions = ahead(
        View("db1", "local", ()),
        keep(keep_fulls=2),
        runs,
        until=until,
        zone=ZoneInfo("UTC"),
        max_chain=0,
        typical=Typical(dump_bytes={"small": 5, "large": 70}),
    )
    assert sorted((one.backup.table_set, one.backup.bytes) for one in decisions.kept) == [
        ("large", 70),
        ("large", 70),
        ("small", 5),
        ("small", 5),
    ]


def test_runs_of_every_minute_are_not_solved_for_ever() -> None:
    policy = {**WEEK, "physical": {"full": "0 2 * * sun", "incremental": "every 10m", "max_chain": 1000}}
    kept = two_weeks(policy, keep(keep_fulls=1, hourly=3))
    assert [name for name, parent in kept if parent is None] == [full("29")]


# -- the file alone


def test_a_file_alone_is_explained_with_its_runs_and_what_they_leave(tmp_path: Path) -> None:
    (tmp_path / "gold.yaml").write_text(example("gold"))
    found = explain_file(tmp_path / "gold.yaml", "", now=NOW)
    assert (found.policy, found.server, found.zone) == ("gold", "", "Europe/Berlin")
    assert found.until == NOW + timedelta(days=14)
    assert [decisions.destination for decisions in found.ahead] == ["local", "offsite", "vault"]
    # Physical ones at local: all of 14 days. offsite: the last of 7 days, and that of the week before (Sunday's full
    # one). vault: the last of November and the newest, with what they build on. Dumps build on nothing.
    physical = [
        [one for one in decisions.kept if one.backup.kind is not BackupKind.LOGICAL] for decisions in found.ahead
    ]
    assert [len(kept) for kept in physical] == [14, 8, 7]
    assert [len(decisions.kept) - len(kept) for decisions, kept in zip(found.ahead, physical, strict=True)] == [8, 8, 2]
    assert {run.kind for run in found.runs} == {
        JobKind.FULL,
        JobKind.INCREMENTAL,
        JobKind.LOGICAL,
        JobKind.TEST_RESTORE,
        JobKind.VERIFY,
        JobKind.RETENTION,
    }
    assert all(run.at > NOW for run in found.runs)
    assert all(timedelta(0) <= run.at - run.due <= timedelta(minutes=20) for run in found.runs)
    assert list(found.runs) == sorted(found.runs, key=lambda run: run.at)
    document = found.as_json()
    assert document["server"] is None
    assert document["ahead"][0]["keep"] == 22
    assert document["today"] == document["forecasts"] == []


def test_everything_wrong_in_the_file_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("physical: {full: never}\nphysicall: 1\n")
    with pytest.raises(ConfigurationError) as caught:
        explain_file(tmp_path / "bad.yaml", "", now=NOW)
    assert len(caught.value.problems) == 3


# -- an installation


@dataclass
class SizedDestination(MemoryDestination):
    """A destination that knows its room."""

    free: int = 0

    def __init__(self, free: int) -> None:
        super().__init__("local")
        self.free = free

    def space(self) -> Space | None:
        return Space(self.free * 2, self.free)


@pytest.fixture
def wiring(tmp_path: Path) -> Iterator[Wiring]:
    settings = Office(tmp_path, {"shop-db1": "gold", "db2": "other"}).write(
        gold='physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\nretention: {local: {keep_fulls: 20}}\n',
        other='physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n',
    )
    upgrade(settings.catalog)
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, Clock(NOW))


def taken(
    wiring: Wiring,
    number: int,
    size: float,
    *,
    new: float | None = None,
    server: str = "shop-db1",
) -> BackupRecord:
    """A full backup of ``number`` days ago."""
    start = NOW - timedelta(days=number)
    record = replace(
        backup(number, server=server),
        started_at=start,
        finished_at=start + timedelta(minutes=30),
        id=f"20261121T120000Z-{number:07x}{len(server) % 10}",
        stats=Stats(round(size), round(size / 2), round(size / 2 if new is None else new), 10, 0),
        copies=(Copy("local", "complete", start),),
    )
    wiring.catalog.backups.add(record)
    return record


def written(folder: Path, text: str) -> Path:
    path = folder / "new.yaml"
    path.write_text(text)
    return path


def test_a_change_shows_which_backups_that_are_there_it_would_expire(tmp_path: Path, wiring: Wiring) -> None:
    records = {number: taken(wiring, number, GB) for number in (1, 2, 3, 4, 5)}
    new = written(
        tmp_path,
        'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\nretention: {local: {keep_fulls: 2}}\n',
    )
    found = explain_here(wiring, new, "shop-db1")
    assert [decisions.destination for decisions in found.today] == ["local"]
    assert {one.backup.id for one in found.today[0].expired} == {records[number].id for number in (3, 4, 5)}
    assert found.today[0].expired[0].reasons == ("keep_fulls 2: there are 2 newer full ones",)
    old = explain_here(wiring, wiring.settings.configuration.policies / "gold.yaml", None)
    assert old.server == "shop-db1"
    assert old.today[0].expired == ()
    assert len(old.ahead[0].kept) == 5 + 14
    assert [one.backup.bytes for one in old.ahead[0].kept][:2] == [GB // 2] * 2
    assert {record.id for record in wiring.catalog.backups.every()} == {record.id for record in records.values()}


def test_whose_policy_it_is_must_be_clear(tmp_path: Path, wiring: Wiring) -> None:
    new = written(tmp_path, example("gold"))
    with pytest.raises(ConfigurationError, match="no destination `offsite`"):
        explain_here(wiring, new, "shop-db1")
    new = written(tmp_path, 'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n')
    with pytest.raises(RefusedError, match="no servers follow a policy called new") as caught:
        explain_here(wiring, new, None)
    assert "--server: shop-db1, db2" in caught.value.hint


def test_a_restore_time_that_was_never_kept_is_said(tmp_path: Path, wiring: Wiring) -> None:
    text = 'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\nobjectives: {rto: 30s}\n'
    assert not any("rto" in one for one in explain_here(wiring, written(tmp_path, text), "shop-db1").warnings)
    wiring.catalog.proofs.add(proof())
    found = explain_here(wiring, written(tmp_path, text), "shop-db1")
    assert [one for one in found.warnings if "rto" in one] == [
        "objectives.rto: 30.0s cannot be met: the last test restore took 1m"
    ]


# -- growth


def with_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(Wiring, "destination", lambda _self, _name: SizedDestination(free))


def test_a_repository_that_grows_by_a_quarter_each_day_is_full_on_a_day_that_check_names(
    tmp_path: Path, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(14):
        taken(wiring, number + 1, 8 * GB * 1.25**-number, new=0.5 * GB)
    with_free_space(monkeypatch, 49 * GB)  # 7 GB are stored: 56 / 7 = 8 = 1.25^9.3
    found = forecast(wiring, "local")
    assert found is not None
    assert (found.filling.day, found.filling.earliest) == (10, 10)
    assert found.text == (
        "the repository is full on day 10 (2026-12-01): 45.6 GiB are free (shop-db1 x1.25 a day, "
        "seen in 14 full backups over 13 days)"
    )
    growth = found.as_json()["servers"][0]["bytes_source_after"]
    assert [round(growth[day] / GB) for day in ("7", "14")] == [38, 182]
    assert growth["30"] / GB == pytest.approx(6462, rel=0.001)
    assert [one.message for one in room(wiring, "local")] == [f"by its growth {found.text}"]
    assert any(one.message == f"by its growth {found.text}" for one in check(wiring, "shop-db1"))
    told = explain_here(wiring, wiring.settings.configuration.policies / "gold.yaml", None).forecasts
    assert [one.text for one in told] == [found.text]


def test_one_that_keeps_everything_fills_up_without_growing(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        taken(wiring, number + 1, 10 * GB, new=GB, server="db2")
    with_free_space(monkeypatch, 100 * GB)  # 13 of 20 were added in the last 14 days
    found = forecast(wiring, "local")
    assert found is not None
    assert found.servers[0].added == pytest.approx(13 * GB / 14)
    assert found.filling.day == 108
    assert room(wiring, "local") == []


def test_an_empty_place_has_no_forecast_and_a_boundless_one_only_grows(
    wiring: Wiring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert forecast(wiring, "local") is None
    for number in range(5):
        taken(wiring, number + 1, 8 * GB * 1.25**-number, new=GB)
    monkeypatch.setattr(Wiring, "destination", lambda _self, name: MemoryDestination(name))
    found = forecast(wiring, "local")
    assert found is not None
    assert (found.free, found.filling.day, found.is_soon) == (None, None, False)
    after = {day: stored / GB for day, stored in found.as_json()["bytes_stored_after"].items()}
    assert after == pytest.approx({day: 5 * 1.25 ** int(day) for day in ("7", "14", "30")}, rel=0.001)
    assert found.text.startswith("4.7 GiB are stored, by its growth 22.2 GiB after 7 days, ")
    assert "no limit is known (shop-db1 x1.25 a day" in found.text
    assert room(wiring, "local") == []


def test_enough_room_is_said_as_such(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        taken(wiring, number + 1, GB)
    with_free_space(monkeypatch, 100 * GB)
    found = forecast(wiring, "local")
    assert found is not None
    assert found.text.startswith("93.1 GiB are free, enough for a year of growth at the recent rate")
