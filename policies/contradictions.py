"""What each field allows by itself and the fields together do not: schedules that can never keep their own rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from backupd.model.units import format_duration
from policies.cron import gaps, parse_cron, times_of_day
from policies.fields import every
from policies.schema import Policy
from policies.window import DAY_MINUTES, WindowTimes, parse_window

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """``location``: the steps to the field to blame."""

    location: Location
    message: str


def schedules(policy: Policy) -> Iterator[tuple[Location, str]]:
    """Every schedule of a policy: where it stands and its cadence."""
    if policy.physical is not None:
        yield ("physical", "full"), policy.physical.full
        if policy.physical.incremental is not None:
            yield ("physical", "incremental"), policy.physical.incremental
    if policy.logical is not None:
        if policy.logical.schedule is not None:
            yield ("logical", "schedule"), policy.logical.schedule
        for name, one in policy.logical.sets.items():
            yield ("logical", "sets", name, "schedule"), one.schedule
    if policy.test_restore is not None and policy.test_restore.schedule is not None:
        yield ("test_restore", "schedule"), policy.test_restore.schedule
    if policy.verify is not None:
        yield ("verify", "schedule"), policy.verify.schedule
    if policy.witness.schedule is not None:
        yield ("witness", "schedule"), policy.witness.schedule


def distances(cadence: str) -> tuple[timedelta, timedelta]:
    """The shortest and the longest time between two runs of a cadence."""
    interval = every(cadence)
    return (interval, interval) if interval is not None else gaps(cadence)


def contradictions(policy: Policy) -> list[Contradiction]:
    """All of them; none in a policy that can be followed."""
    return [*_chains(policy), *_witnesses(policy), *_blackouts(policy), *_jitter(policy), *_verification(policy)]


def _chains(policy: Policy) -> Iterator[Contradiction]:
    physical = policy.physical
    if physical is not None and physical.incremental is not None and physical.max_chain == 0:
        yield Contradiction(
            ("physical", "max_chain"),
            "0 increments may build on a full backup, and physical.incremental asks for some: leave out one of the two",
        )


def _witnesses(policy: Policy) -> Iterator[Contradiction]:
    if policy.witness.schedule is not None and not policy.witness.enabled:
        yield Contradiction(
            ("witness", "schedule"),
            "says when checksums are read, and witness.enabled says that none are: leave out one of the two",
        )


def _blackouts(policy: Policy) -> Iterator[Contradiction]:
    windows = [parse_window(text) for text in policy.timing.blackout]
    if not windows:
        return
    for location, cadence in schedules(policy):
        if all(any(window.holds(weekday, minute) for window in windows) for weekday, minute in _moments(cadence)):
            yield Contradiction(
                ("timing", "blackout"),
                f"covers every time of {'.'.join(map(str, location))} (`{cadence}`): it would never start when it is "
                f"due; {_way_out(windows)}",
            )


def _way_out(windows: list[WindowTimes]) -> str:
    whole = all(
        any(window.holds(weekday, minute) for window in windows)
        for weekday in range(7)
        for minute in range(DAY_MINUTES)
    )
    return "leave some time of the week free" if whole else "move the schedule, or cut the window"


def _moments(cadence: str) -> Iterator[tuple[int, int]]:
    """The weekdays (0 is Sunday) and minutes of the day at which a cadence may come."""
    if every(cadence) is not None:  # drifts through the day where zones shift, so any time may come
        yield from ((weekday, minute) for weekday in range(7) for minute in range(DAY_MINUTES))
        return
    days_free = cadence.split()[2] != "*"
    weekdays = range(7) if days_free else sorted(parse_cron(cadence)[4])
    yield from ((weekday, minute) for weekday in weekdays for minute in times_of_day(cadence))


def _jitter(policy: Policy) -> Iterator[Contradiction]:
    jitter = policy.timing.jitter
    if jitter is None:
        return
    for location, cadence in schedules(policy):
        shortest, _longest = distances(cadence)
        if jitter > shortest:
            yield Contradiction(
                ("timing", "jitter"),
                f"{format_duration(jitter.total_seconds())} is longer than the time between two runs of "
                f"{'.'.join(map(str, location))} (`{cadence}`: {format_duration(shortest.total_seconds())}): "
                "one run would start after the next is due",
            )


def _verification(policy: Policy) -> Iterator[Contradiction]:
    verify = policy.verify
    if verify is None or verify.period is None:
        return
    _shortest, longest = distances(verify.schedule)
    if longest > verify.period:
        yield Contradiction(
            ("verify", "period"),
            f"{format_duration(verify.period.total_seconds())} is shorter than the time between two runs of "
            f"verify.schedule (`{verify.schedule}`: {format_duration(longest.total_seconds())}): nothing can be read "
            "again that soon",
        )
