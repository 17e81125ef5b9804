"""A policy in sentences, for `backupd policy explain`."""

from __future__ import annotations

from datetime import timedelta

from backupd.model.text import format_duration, format_size
from policies.cron import parse_cron
from policies.fields import every
from policies.schema import Keep, Limits, Logical, Policy, Verify


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
        seconds = format_duration(policy.binlog.checkpoint.total_seconds())
        lines.append(
            f"The binary log is followed as it is written and stored every {seconds}; at most "
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
        lines.append(f"At most {format_duration(policy.objectives.rpo.total_seconds())} of work may be lost.")
    if policy.objectives.rto:
        lines.append(f"A restore may take {format_duration(policy.objectives.rto.total_seconds())}.")
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
        seconds = format_duration(policy.witness.max_duration.total_seconds())
        moments = (
            f"With each full backup, and {when(policy.witness.schedule)},"
            if policy.witness.schedule
            else "With each full backup"
        )
        lines.append(f"{moments} the source's tables are summed up for comparison, for at most {seconds}.")
    return [*lines, *_timing(policy), *_limits(policy.limits)]


def _logical(logical: Logical) -> list[str]:
    lines = []
    for name, (cadence, tables) in logical.selections.items():
        limits = f" except {', '.join(tables.exclude)}" if tables.exclude else ""
        limits += f", none above {format_size(tables.max_size)}" if tables.max_size else ""
        which = f"Of the set {name}, the tables" if name else "The tables"
        lines.append(f"{which} {', '.join(tables.include)}{limits} are dumped {when(cadence)}.")
    single = "counts as failed and is tried again" if logical.partial == "failed" else "is accepted, with a warning"
    lines.append(
        f"Commits wait for a dump for at most {_span(logical.max_lock)}; a dump in which single tables could "
        f"not be read is kept and {single}."
    )
    if logical.repair:
        lines.append("Damaged MyISAM and Aria tables are repaired before they are dumped.")
    return lines


def _timing(policy: Policy) -> list[str]:
    timing, retry = policy.timing, policy.retry
    lines = []
    if timing.timezone:
        lines.append(f"Times are those of {timing.timezone}.")
    if timing.jitter:
        lines.append(f"Each run starts up to {_span(timing.jitter)} later, always the same for one server.")
    if timing.blackout:
        lines.append(f"Nothing starts in {' nor in '.join(timing.blackout)}; what is due then starts at its end.")
    if not timing.catch_up:
        lines.append("A run that was missed is not made up for.")
    if retry.attempts == 1:
        lines.append("A run that fails is not repeated.")
    else:
        lines.append(
            f"A run that fails for a reason that may pass is tried {retry.attempts} times in all, the second "
            f"time after {_span(retry.pause)}, then twice as long each time."
        )
    return lines


def _limits(limits: Limits) -> list[str]:
    lines = []
    if limits.read:
        lines.append(f"At most {format_size(limits.read)} a second are read from the server's disks.")
    if limits.send:
        lines.append(f"At most {format_size(limits.send)} a second are written to each destination.")
    if limits.nice is not None:
        lines.append(f"The work runs at processor priority {limits.nice}.")
    reasons = []
    if limits.replica_lag:
        reasons.append(f"a replica is more than {_span(limits.replica_lag)} behind")
    if limits.disk_latency:
        reasons.append(f"the disk takes more than {limits.disk_latency.total_seconds() * 1000:.0f} ms for a request")
    if limits.long_queries:
        reasons.append(f"a statement of somebody else has been running for more than {_span(limits.long_queries)}")
    if reasons:
        lines.append(
            f"It pauses while {', or while '.join(reasons)}, and gives up after {_span(limits.max_pause)} of pauses."
        )
    return [*lines, f"A run without any progress for {_span(limits.hang)} is stopped and counts as failed."]


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


def _kept(rule: Keep) -> str:
    parts = []
    if rule.recovery_window:
        parts.append(f"every moment of the last {format_duration(rule.recovery_window.total_seconds())}")
    if rule.keep_fulls:
        parts.append("the newest full backup" if rule.keep_fulls == 1 else f"the newest {rule.keep_fulls} full backups")
    parts += [
        f"the last backup of each of {number} {unit}"
        for number, unit in (
            (rule.hourly, "hours"),
            (rule.daily, "days"),
            (rule.weekly, "weeks"),
            (rule.monthly, "months"),
            (rule.yearly, "years"),
        )
        if number
    ]
    return ", and ".join(parts)
