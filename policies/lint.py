"""A policy in sentences, for `backupd policy explain`.

What the fields of a policy allow each and together do not (schedules that can never keep their own rules), and what
is valid and still deserves a word: what is missing, what cannot be kept, what this version does not do yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

from backupd.model.text import format_duration, format_size
from policies.configuration import Configuration
from policies.fields import DAY_MINUTES, WindowTimes, every, gaps, parse_cron, parse_window, times_of_day
from policies.policy import Keep, Limits, Logical, Policy, Verify


def explain(policy: Policy) -> list[str]:
    """One sentence per decision, in the order of the file. Says what is written, not what this version acts on."""
    lines = []
    if policy.physical is not None:
        lines.append(f"A full copy of the data files is taken {when(policy.physical.full)}.")
        if policy.physical.incremental:
            lines.append(
                f"A copy of what changed since the one before is taken {when(policy.physical.incremental)}; "
                f"after {policy.physical.max_chain} of them a full one is taken instead."
            )
    if policy.logical is not None:
        lines += _logical(policy.logical)
    if policy.binlog is not None and policy.binlog.stream:
        lines.append(
            f"The binary log is followed as it is written and stored every {_span(policy.binlog.checkpoint)}; at most "
            f"{format_size(policy.binlog.max_spool)} wait in the spool."
        )
    if policy.config_files:
        lines.append(f"{', '.join(map(str, policy.config_files))} are kept with each backup.")
    lines.append(f"A backup succeeds only when it is at {' and at '.join(policy.destinations.required)}.")
    if policy.destinations.others:
        lines.append(f"Afterwards it is copied to {' and to '.join(policy.destinations.others)}.")
    for name in (*policy.destinations.required, *policy.destinations.others):
        rule = policy.retention.get(name)
        lines.append(f"{name} keeps {_kept(rule)}." if rule else f"{name} keeps everything.")
    if policy.objectives.rpo:
        lines.append(f"Recovery point objective (RPO): at most {_span(policy.objectives.rpo)} of data may be lost.")
    if policy.objectives.rto:
        lines.append(f"Recovery time objective (RTO): a restore may take at most {_span(policy.objectives.rto)}.")
    if policy.test_restore is not None:
        test = policy.test_restore
        start = when(test.schedule) if test.schedule else "when somebody asks for it"
        lines.append(
            f"A test restore to {test.target} is made {start}, with {len(test.checks)} "
            f"SQL check{'' if len(test.checks) == 1 else 's'}."
        )
    if policy.verify is not None:
        lines.append(f"{_share(policy.verify)} is read again and compared {when(policy.verify.schedule)}.")
    if policy.witness.enabled:
        moments = (
            f"With each full backup, and {when(policy.witness.schedule)},"
            if policy.witness.schedule
            else "With each full backup"
        )
        lines.append(
            f"{moments} the source's tables are summed up for comparison, for at most "
            f"{_span(policy.witness.max_duration)}."
        )
    return [*lines, *_timing(policy), *_limits(policy.limits)]


def _logical(logical: Logical) -> Iterator[str]:
    for name, (cadence, tables) in logical.selections.items():
        limits = f" except {', '.join(tables.exclude)}" if tables.exclude else ""
        limits += f", none above {format_size(tables.max_size)}" if tables.max_size else ""
        which = f"Of the set {name}, the tables" if name else "The tables"
        yield f"{which} {', '.join(tables.include)}{limits} are dumped {when(cadence)}."
    single = "counts as failed and is tried again" if logical.partial == "failed" else "is accepted, with a warning"
    yield (
        f"Commits wait for a dump for at most {_span(logical.max_lock)}; a dump in which single tables could "
        f"not be read is kept and {single}."
    )
    if logical.repair:
        yield "Damaged MyISAM and Aria tables are repaired before they are dumped."


def _timing(policy: Policy) -> Iterator[str]:
    timing, retry = policy.timing, policy.retry
    if timing.timezone:
        yield f"Times are those of {timing.timezone}."
    if timing.jitter:
        yield f"Each run starts up to {_span(timing.jitter)} later, always the same for one server."
    if timing.blackout:
        yield f"Nothing starts in {' nor in '.join(timing.blackout)}; what is due then starts at its end."
    if not timing.catch_up:
        yield "A run that was missed is not made up for."
    if retry.attempts == 1:
        yield "A run that fails is not repeated."
    else:
        yield (
            f"A run that fails for a reason that may pass is tried {retry.attempts} times in all, the second "
            f"time after {_span(retry.pause)}, then twice as long each time."
        )


def _limits(limits: Limits) -> Iterator[str]:
    if limits.read:
        yield f"At most {format_size(limits.read)} a second are read from the server's disks."
    if limits.send:
        yield f"At most {format_size(limits.send)} a second are written to each destination."
    if limits.nice is not None:
        yield f"The work runs at processor priority {limits.nice}."
    reasons = []
    if limits.replica_lag:
        reasons.append(f"a replica is more than {_span(limits.replica_lag)} behind")
    if limits.disk_latency:
        reasons.append(f"the disk takes more than {limits.disk_latency.total_seconds() * 1000:.0f} ms for a request")
    if limits.long_queries:
        reasons.append(f"a statement of somebody else has been running for more than {_span(limits.long_queries)}")
    if limits.recv_queue:
        reasons.append(f"more than {limits.recv_queue} write sets wait on the node of its Galera cluster")
    if limits.flow_control:
        reasons.append(f"flow control stops its Galera cluster for more than {limits.flow_control:.0%} of the time")
    if reasons:
        yield (
            f"It pauses while {', or while '.join(reasons)}, and gives up after {_span(limits.max_pause)} of pauses."
        )
    yield f"A run without any progress for {_span(limits.hang)} is stopped and counts as failed."


def _span(span: timedelta) -> str:
    return format_duration(span.total_seconds())


def _share(verify: Verify) -> str:
    share = f"{verify.subset * 100:g} % of all that is stored" if verify.subset else "All that is stored"
    if verify.period is None:
        return share
    within = f"as much as it takes to read all within {_span(verify.period)}"
    return f"{share}, and at least {within}," if verify.subset else f"Of what is stored, {within},"


def when(cadence: str) -> str:
    """``at 02:00 on mon-sat``, ``every 6h``; expressions that are not one time a day are shown as they are written."""
    interval = every(cadence)
    if interval is not None:
        return f"every {_span(interval)}"
    minutes, hours, *_days = parse_cron(cadence)
    _minute, _hour, day, month, weekday = cadence.split()
    if len(minutes) != 1 or len(hours) != 1 or month != "*" or (day != "*" and weekday != "*"):
        return f"on the schedule `{cadence}`"
    clock = f"at {min(hours):02}:{min(minutes):02}"
    if day != "*":
        return f"{clock} on day {day} of each month"
    return f"{clock} every day" if weekday == "*" else f"{clock} on {weekday}"


_DAY = timedelta(days=1)
_UNITS = {
    "hourly": ("hours", timedelta(hours=1)),
    "daily": ("days", _DAY),
    "weekly": ("weeks", 7 * _DAY),
    "monthly": ("months", 30 * _DAY),
    "yearly": ("years", 365 * _DAY),
}
"""Rules that keep the last backup of each of a number of spans of time."""


def _kept(rule: Keep) -> str:
    parts = []
    if rule.recovery_window:
        parts.append(f"every moment of the last {_span(rule.recovery_window)}")
    if rule.keep_fulls:
        parts.append("the newest full backup" if rule.keep_fulls == 1 else f"the newest {rule.keep_fulls} full backups")
    for name, (units, _one) in _UNITS.items():
        if number := getattr(rule, name):
            parts.append(f"the last backup of each of {number} {units}")
    return ", and ".join(parts)


Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """``location``: the steps to the field to blame."""

    location: Location
    message: str


def schedules(policy: Policy) -> Iterator[tuple[Location, str]]:
    """Every schedule of a policy: its field and its cadence."""
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
    if policy.consistency.checksum.schedule is not None:
        yield ("consistency", "checksum", "schedule"), policy.consistency.checksum.schedule


def distances(cadence: str) -> tuple[timedelta, timedelta]:
    """The shortest and the longest time between two runs of a cadence."""
    interval = every(cadence)
    return (interval, interval) if interval is not None else gaps(cadence)


def contradictions(policy: Policy) -> list[Contradiction]:
    """All of them; none in a policy that can be followed."""
    return [
        *_chains(policy),
        *_witnesses(policy),
        *_blackouts(policy),
        *_jitter(policy),
        *_verification(policy),
        *_comparisons(policy),
    ]


def _chains(policy: Policy) -> Iterator[Contradiction]:
    physical = policy.physical
    if physical is not None and physical.incremental is not None and physical.max_chain == 0:
        yield Contradiction(
            ("physical", "max_chain"),
            "physical.max_chain is 0, but physical.incremental is set: remove one of them",
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
    # An interval drifts through the day where zones shift, so any time may come.
    minutes = range(DAY_MINUTES) if every(cadence) is not None else times_of_day(cadence)
    return product(_weekdays(cadence), minutes)


def _weekdays(cadence: str) -> Sequence[int]:
    """Those on which a cadence may come; 0 is Sunday."""
    anyone = every(cadence) is not None or cadence.split()[2] != "*"
    return range(7) if anyone else sorted(parse_cron(cadence)[4])


def _jitter(policy: Policy) -> Iterator[Contradiction]:
    jitter = policy.timing.jitter
    if jitter is None:
        return
    for location, cadence in schedules(policy):
        shortest, _longest = distances(cadence)
        if jitter > shortest:
            yield Contradiction(
                ("timing", "jitter"),
                f"{_span(jitter)} is longer than the time between two runs of "
                f"{'.'.join(map(str, location))} (`{cadence}`: {_span(shortest)}): "
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
            f"{_span(verify.period)} is shorter than the time between two runs of "
            f"verify.schedule (`{verify.schedule}`: {_span(longest)}): nothing can be read "
            "again that soon",
        )


def _comparisons(policy: Policy) -> Iterator[Contradiction]:
    checksum = policy.consistency.checksum
    if checksum.schedule is None:
        return
    _shortest, longest = distances(checksum.schedule)
    if longest > checksum.max_age:
        yield Contradiction(
            ("consistency", "checksum", "max_age"),
            f"{_span(checksum.max_age)} is shorter than the time between two runs of consistency.checksum.schedule "
            f"(`{checksum.schedule}`: {_span(longest)}): the replica would be unchecked in between",
        )


CROWD = 5
"""Number of servers that start in the same minute from which a warning is due."""

_OF_BACKUPS = ("latest", "random")
"""Targets of test restores that mean something without a binary log, too."""


def advice(policy: Policy, configuration: Configuration | None = None) -> list[str]:
    """Sentences about what a careful operator would change. Each names its field.

    ``configuration``: where the policy's destinations are described; without it nothing is said about them.
    """
    return [
        *_missing(policy),
        *_off_site(policy, configuration),
        *_binlog(policy),
        *_window(policy),
        *_chain(policy),
        *_promises(policy),
        *_repetitions(policy),
    ]


def _missing(policy: Policy) -> Iterator[str]:
    if policy.physical is None:
        yield "physical: missing; a whole server comes back much faster from its data files than from dumps"
    if policy.logical is None:
        yield "logical: missing; single tables and other versions are easiest to restore from dumps"
    if policy.binlog is None:
        yield "binlog: missing; without it only the moments of backups are recoverable, none between them"
    if not policy.config_files:
        yield "config_files: missing; a bare host needs its configuration back too"
    wanted = policy.protection
    if len(_destinations(policy)) < 2 and (wanted.copies > 1 or wanted.off_site):
        yield "destinations: only one; a second one, away from the first, survives its loss"
    if policy.test_restore is None:
        if policy.physical is not None or policy.logical is None:  # dumps are not restored for a test
            yield "test_restore: missing; backupd does not prove that these backups can be restored"
    elif policy.test_restore.schedule is None:
        yield "test_restore.schedule: missing; nobody restores by hand for long"
    if policy.verify is None:
        yield "verify: missing; disks lose bytes silently, and only reading finds it before a restore does"


def _destinations(policy: Policy) -> tuple[str, ...]:
    return (*policy.destinations.required, *policy.destinations.others)


def _off_site(policy: Policy, configuration: Configuration | None) -> Iterator[str]:
    if configuration is None:
        return
    found = [one for name in _destinations(policy) if (one := configuration.destinations.get(name)) is not None]
    if len(found) < 2:
        return  # said already
    wanted, away = policy.protection, sum(one.is_off_site for one in found)
    if not away and wanted.off_site:
        yield (
            "destinations: all are folders of this host's file systems; fire, theft or an intruder can destroy them "
            "together with the server. Add a remote destination, or set `off_site: true` on a folder at another site"
        )
    elif away < wanted.off_site:
        yield (
            f"protection.off_site: {wanted.off_site} copies away from the site are asked for, and only {away} of "
            "the destinations are there: no backup is ever protected"
        )
    if len(found) < wanted.copies:
        yield (
            f"protection.copies: {wanted.copies} copies are asked for, at {len(found)} destinations: no backup is "
            "ever protected"
        )


def _binlog(policy: Policy) -> Iterator[str]:
    if not streams(policy):
        if (
            policy.test_restore is not None
            and policy.test_restore.target not in _OF_BACKUPS
            and not policy.test_restore.target.startswith("backup:")
        ):
            yield (
                f"test_restore.target: {policy.test_restore.target} needs the binary log (binlog); without it only "
                "the moments of backups can be restored"
            )
        if policy.witness.schedule is not None:
            yield (
                "witness.schedule: only moments of backups are restored without binlog, so nothing is ever compared "
                "with what is read in between"
            )
    elif policy.physical is None and policy.logical is None:
        yield "binlog: no full backup is taken that it could be replayed on: nothing can be recovered from it alone"


def streams(policy: Policy) -> bool:
    """Does the policy ask for the binary log?"""
    return policy.binlog is not None and policy.binlog.stream


def _window(policy: Policy) -> Iterator[str]:
    windows = {name: rule.recovery_window for name, rule in policy.retention.items() if rule.recovery_window}
    if not windows:
        return
    name, longest = max(windows.items(), key=lambda item: item[1])
    field = f"retention.{name}.recovery_window"
    if not streams(policy):
        yield (
            f"{field}: promises every moment of the last {_span(longest)}, but without binlog only the moments of "
            "backups come back"
        )
    full = _full(policy)
    for other in _destinations(policy):
        rule = policy.retention.get(other)
        if other != name and rule is not None and _reach(rule, full) < longest:
            yield (
                f"retention.{other}: reaches back {_span(_reach(rule, full))}, the recovery window of {name} "
                f"{_span(longest)}; should {name} be lost, the rest of that time is lost with it"
            )
    if full > longest:
        yield (
            f"{field}: {_span(longest)} is less than the time between two full backups ({_span(full)}); one damaged "
            "full backup would take the whole window with it"
        )


def _full(policy: Policy) -> timedelta:
    """The longest time between two full backups of any sort."""
    cadences = [policy.physical.full] if policy.physical else []
    cadences += [cadence for cadence, _tables in policy.logical.selections.values()] if policy.logical else []
    return min((distances(cadence)[1] for cadence in cadences), default=timedelta(0))


def _reach(rule: Keep, full: timedelta) -> timedelta:
    """How far back a destination's rules reach when every schedule runs."""
    spans = [(getattr(rule, name) or 0) * one for name, (_units, one) in _UNITS.items()]
    return max(rule.recovery_window or timedelta(0), (rule.keep_fulls or 0) * full, *spans)


def _chain(policy: Policy) -> Iterator[str]:
    physical = policy.physical
    if physical is None or physical.incremental is None or physical.max_chain == 0:
        return
    step, full = distances(physical.incremental)[0], distances(physical.full)[1]
    needed = full // step - (1 if full % step == timedelta(0) else 0)
    if needed > physical.max_chain and step < full:
        yield (
            f"physical.max_chain: at most {physical.max_chain} increments, but up to {needed} are due between two "
            "full backups: full ones will be taken instead"
        )


def _promises(policy: Policy) -> Iterator[str]:
    rpo = policy.objectives.rpo
    if rpo is None:
        return
    if policy.binlog is not None and streams(policy):
        if rpo < policy.binlog.checkpoint:
            yield (
                f"objectives.rpo: {_span(rpo)} cannot be kept: the binary log is stored every "
                f"{_span(policy.binlog.checkpoint)} (binlog.checkpoint)"
            )
        return
    steps = [distances(cadence)[1] for location, cadence in schedules(policy) if location[0] in ("physical", "logical")]
    if steps and rpo < min(steps):
        yield (
            f"objectives.rpo: {_span(rpo)} cannot be kept: without binlog all data since the last backup is lost, "
            f"up to {_span(min(steps))}"
        )


def _repetitions(policy: Policy) -> Iterator[str]:
    longest = policy.retry.longest
    for location, cadence in schedules(policy):
        shortest, _longest = distances(cadence)
        if longest > shortest:
            yield (
                f"retry: waits up to {_span(longest)} before the last attempt, longer than the time between two "
                f"runs of {'.'.join(map(str, location))} (`{cadence}`: {_span(shortest)}): the next run "
                "replaces a repetition that still waits"
            )


def crowds(configuration: Configuration, policies: Mapping[str, Policy]) -> list[str]:
    """Schedules that start on many servers in the very same minute. Each names the policies and the fields."""
    servers = Counter(server.policy for server in configuration.servers.values())
    # What two cadences share when they come in the same minute: how the time of day is written, and the weekday.
    due: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for name in sorted(servers):
        policy = policies.get(name)
        if policy is None or policy.timing.jitter is not None:
            continue
        for location, cadence in schedules(policy):
            clock = " ".join(cadence.split()[:2])
            for weekday in _weekdays(cadence):
                due.setdefault((clock, weekday), []).append((name, ".".join(map(str, location))))
    found: dict[str, None] = {}
    for where in due.values():
        number = sum(servers[name] for name in {name for name, _field in where})
        if number >= CROWD:
            fields = ", ".join(f"{name}: {field}" for name, field in where)
            found[f"timing.jitter: {number} servers start in the same minute ({fields}); a jitter spreads them"] = None
    return list(found)


def not_yet_active(policy: Policy) -> list[str]:
    """Fields of a policy that are accepted and checked, but that this version does not act on. Each names its field."""
    if policy.physical is None and policy.test_restore is not None:
        return [
            (
                "test_restore: no test restore runs: only physical backups are restored for a test, and physical is "
                "missing; take test_restore out of this policy, and restore tables by hand now and then"
            )
        ]
    return []
