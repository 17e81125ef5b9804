"""Four hundred days of the gold policy, day by day, against what a plain reading of its rules says.

The reading works on the whole history at once, as if nothing had ever been deleted; the solver only ever sees what it
left the day before. Both must hold the same on every day.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from importlib import resources
from zoneinfo import ZoneInfo

from backupd.app.retention.decisions import solve
from backupd.app.retention.rules import Stored, View
from backupd.model.backup_record import BackupKind
from policies.policy import Keep
from tests.support.catalog.histories import stored
from tests.support.policies import load_policy

ZONE = ZoneInfo("Europe/Berlin")
FIRST = date(2027, 1, 15)
DAYS = 400  # through both changes of the clocks and the leap day of 2028


def gold() -> dict[str, Keep]:
    with resources.as_file(resources.files("policies.examples").joinpath("gold.yaml")) as file:
        return load_policy(file).retention


def taken_on(day: date, week: list[str]) -> list[Stored]:
    """A full one on Sundays, an increment on the other days at two; a dump at four."""
    at = datetime.combine(day, time(2, 0), ZONE).astimezone(UTC)
    if day.weekday() == 6 or not week:
        week.clear()
    name = f"{day}-physical"
    physical = stored(name, at + timedelta(minutes=30), parent=week[-1] if week else None)
    week.append(name)
    return [physical, stored(f"{day}-dump", at + timedelta(hours=2, minutes=5), kind=BackupKind.LOGICAL)]


def expected(history: list[Stored], keep: Keep, now: datetime) -> set[str]:
    """Grouped into dictionaries, last one wins, newest keys taken: nothing of this is how the solver goes about it."""
    by_id = {backup.id: backup for backup in history}
    wanted: set[str] = set()
    ways: dict[str, Callable[[datetime], object]] = {
        "hourly": lambda at: at.strftime("%Y %j %H"),
        "daily": datetime.date,
        "weekly": lambda at: at.strftime("%G %V"),
        "monthly": lambda at: (at.year, at.month),
        "yearly": lambda at: at.year,
    }
    for leg in ("physical", "dump"):
        ours = [backup for backup in history if backup.id.endswith(leg)]
        if not ours:
            continue
        wanted.add(ours[-1].id)
        for rule, way in ways.items():
            groups = {way(backup.finished_at.astimezone(ZONE)): backup.id for backup in ours}
            wanted.update(list(groups.values())[-(getattr(keep, rule) or 0) :] if getattr(keep, rule) else ())
        if keep.keep_fulls:
            wanted.update([backup.id for backup in ours if backup.parent is None][-keep.keep_fulls :])
        if keep.recovery_window:
            older = [backup for backup in ours if backup.finished_at <= now - keep.recovery_window]
            wanted.update(backup.id for backup in ours if backup not in older)
            wanted.update(backup.id for backup in older[-1:])
    return wanted | {parent for name in wanted for parent in ancestors(by_id, name)}


def ancestors(by_id: dict[str, Stored], name: str) -> list[str]:
    parent = by_id[name].parent
    return [] if parent is None else [parent, *ancestors(by_id, parent)]


def test_four_hundred_days_of_the_gold_policy_hold_what_a_plain_reading_of_it_says() -> None:
    policies = gold()
    assert set(policies) == {"local", "offsite", "vault"}
    history: list[Stored] = []
    held: dict[str, tuple[Stored, ...]] = dict.fromkeys(policies, ())
    week: list[str] = []
    for number in range(DAYS):
        day = FIRST + timedelta(days=number)
        new = taken_on(day, week)
        history += new
        now = new[-1].finished_at + timedelta(minutes=1)
        for name, keep in policies.items():
            decisions = solve(View("shop", name, (*held[name], *new)), keep, now=now, zone=ZONE)
            held[name] = tuple(decision.backup for decision in decisions.kept)
            found = {backup.id for backup in held[name]}
            assert found == expected(history, keep, now), f"{name} on {day}"
            assert all(backup.parent is None or backup.parent in found for backup in held[name])
    sizes = {name: len([b for b in backups if b.kind is not BackupKind.LOGICAL]) for name, backups in held.items()}
    print(sizes)
    assert sizes["local"] <= 7 + 1 + 7 + 2
    assert sum(1 for backup in held["vault"] if backup.kind is BackupKind.LOGICAL) == 14
