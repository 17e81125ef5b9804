"""`backupd policy explain`: a policy in sentences, what it will start, what will be kept, what a change of it costs.

Works from the policy file alone. With an installation it begins with the backups that are there, shows which of them
the rules of the file would expire today, and says when the destinations are full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any
from zoneinfo import ZoneInfo

from backupd.app.context.wiring import Wiring
from backupd.app.destinations.forecast import Forecast, forecast
from backupd.app.retention.holds import findings
from backupd.app.retention.retention import preview
from backupd.app.schedule.calendar import legs_of
from backupd.app.views.outlook import SPAN, PlannedRun, Typical, ahead, planned_runs, streamed, untold
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.errors import BackupdError, ConfigurationError, RefusedError
from backupd.model.text import format_duration, format_time
from backupd.retention.decisions import BinlogRun, Decisions, View
from policies.explain import explain
from policies.lint import advice, crowds, not_yet_active, streams
from policies.load import read_policy, unknown_destinations
from policies.schema import Policy

RECENT = 10
"""Backups of each kind that tell what the next ones will be like."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """``server`` is empty without one. ``ahead``: for each destination what it holds after two weeks. ``today``: what
    the rules make of the backups that are there now, only with an installation."""

    policy: str
    server: str
    zone: str
    at: datetime
    until: datetime
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    ahead: tuple[Decisions, ...]
    today: tuple[Decisions, ...] = ()
    forecasts: tuple[Forecast, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "server": self.server or None,
            "timezone": self.zone,
            "at": format_time(self.at),
            "until": format_time(self.until),
            "sentences": list(self.sentences),
            "warnings": list(self.warnings),
            "runs": [run.as_json() for run in self.runs],
            "ahead": [decisions.as_json() for decisions in self.ahead],
            "today": [decisions.as_json() for decisions in self.today],
            "forecasts": [one.as_json() for one in self.forecasts],
        }


def explain_file(path: Path, server: str, *, now: datetime) -> Explanation:
    """The policy file alone, for a server of any name. Raises ConfigurationError with every problem of the file."""
    policy = _policy(path)
    zone = policy.timing.timezone or "UTC"
    empty = {
        name: View(server, name, (), runs=streamed((), now) if streams(policy) else ()) for name in _places(policy)
    }
    texts = (*advice(policy), *not_yet_active(policy))
    return _explained(path.stem, policy, server, zone, now, empty, texts, Typical())


def explain_here(wiring: Wiring, path: Path, server: str | None) -> Explanation:
    """The policy file as it would be for a configured server: the one named, else the only one that follows a policy
    of the file's name. Raises ConfigurationError, NotFoundError, RefusedError."""
    settings = wiring.settings
    policy = _policy(path, known=settings.destinations)
    name = server or _follower(wiring, path.stem)
    config = settings.server(name).config
    changed = replace(wiring, settings=replace(settings, policies={**settings.policies, config.policy: policy}))
    now = wiring.clock()
    zone = policy.timing.timezone or settings.configuration.timezone
    today = {decisions.destination: decisions for decisions in preview(changed, name, now=now)}
    start = {
        place: View(
            name,
            place,
            tuple(one.backup for one in today[place].backups),
            hold=today[place].hold,
            runs=_logs(policy, today[place], now),
        )
        for place in _places(policy)
    }
    texts = [
        *advice(policy, settings.configuration),
        *not_yet_active(policy),
        *crowds(settings.configuration, changed.settings.policies),
    ]
    texts += _slow(wiring, name, policy)
    texts += [f"{finding.subject}: {finding.message}" for finding in findings(wiring, [name])]
    forecasts: list[Forecast] = []
    for place, view in start.items():
        try:
            one = forecast(changed, place) if view.backups else None
        except BackupdError as error:
            texts.append(f"destinations: nothing can be said about the room at {place}: {error.message}")
        else:
            forecasts += [one] if one is not None else []
    typical = _typical(wiring.catalog.backups.list(name))
    found = _explained(path.stem, policy, name, zone, now, start, tuple(texts), typical)
    return replace(found, today=tuple(one for one in today.values() if one.backups), forecasts=tuple(forecasts))


def _logs(policy: Policy, today: Decisions, now: datetime) -> tuple[BinlogRun, ...]:
    """The binary logs that stay, and go on where the policy streams them."""
    kept = [one.run for one in today.runs if one.keep]
    return streamed(kept, now) if streams(policy) else untold(kept)


def _policy(path: Path, known: Mapping[str, object] | None = None) -> Policy:
    found = read_policy(path)
    problems = [*found.problems, *(unknown_destinations(found, list(known)) if known is not None else ())]
    if problems or found.policy is None:
        raise ConfigurationError(problems, hint="`backupd policy example` shows a complete policy")
    return found.policy


def _places(policy: Policy) -> tuple[str, ...]:
    return (*policy.destinations.required, *policy.destinations.others)


def _follower(wiring: Wiring, name: str) -> str:
    followers = [server for server, config in wiring.settings.servers.items() if config.policy == name]
    if len(followers) == 1:
        return followers[0]
    raise RefusedError(
        f"{len(followers) or 'no'} servers follow a policy called {name}: which one is meant?",
        hint=f"name one with --server: {', '.join(followers or wiring.settings.servers)}",
    )


def _explained(
    name: str,
    policy: Policy,
    server: str,
    zone: str,
    now: datetime,
    start: Mapping[str, View],
    texts: tuple[str, ...],
    typical: Typical,
) -> Explanation:
    until = now + SPAN
    runs = planned_runs(legs_of(policy, server, zone), now, until)
    max_chain = policy.physical.max_chain if policy.physical else 0
    held = tuple(
        ahead(
            view,
            policy.retention.get(place),
            runs,
            until=until,
            zone=ZoneInfo(zone),
            max_chain=max_chain,
            typical=typical,
        )
        for place, view in start.items()
    )
    return Explanation(name, server, zone, now, until, tuple(explain(policy)), texts, runs, held)


def _typical(records: tuple[BackupRecord, ...]) -> Typical:
    """Medians of the newest backups of each kind."""
    fulls = [record for record in records if record.kind is BackupKind.PHYSICAL_FULL][:RECENT]
    increments = [record for record in records if record.kind is BackupKind.PHYSICAL_INCREMENTAL][:RECENT]
    dumps: dict[str, list[int]] = defaultdict(list)
    for record in records:
        if record.kind is BackupKind.LOGICAL:
            dumps[record.table_set].append(record.stats.bytes_stored)
    seconds = [(record.finished_at - record.started_at).total_seconds() for record in fulls]
    return Typical(
        full_bytes=round(median(record.stats.bytes_stored for record in fulls)) if fulls else 0,
        increment_bytes=round(median(record.stats.bytes_stored for record in increments)) if increments else 0,
        dump_bytes={name: round(median(sizes[:RECENT])) for name, sizes in dumps.items()},
        duration=timedelta(seconds=median(seconds)) if seconds else timedelta(0),
    )


def _slow(wiring: Wiring, server: str, policy: Policy) -> list[str]:
    """Is the promised restore time one that a restore was ever seen to keep?"""
    rto = policy.objectives.rto
    proof = wiring.catalog.proofs.latest(server) if rto else None
    if rto is None or proof is None or proof.seconds <= rto.total_seconds():
        return []
    promised, took = format_duration(rto.total_seconds()), format_duration(proof.seconds)
    return [f"objectives.rto: {promised} cannot be kept: the last test restore took {took}"]
