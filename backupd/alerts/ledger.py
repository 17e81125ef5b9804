"""From events to incidents: which one each opens, adds to or closes, when somebody has to be notified, and which news
go into one message: many about one destination, one server or one sort of trouble at once are reported together. No
I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from backupd.alerts.rules import (
    JOB,
    PAUSE,
    RECOVERED,
    RETENTION_REFUSED,
    Act,
    Rule,
    is_reminded,
    rule_of,
    rule_of_incident,
    topic_of,
)
from backupd.model.document import made_of
from backupd.model.event import Event, Incident, MessageKind, Severity
from backupd.model.job import JobKind
from backupd.model.text import format_duration, format_time, new_id

_GRAVITY = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
_SKIPPED = "job-skipped"
_DAY = timedelta(days=1)
QUIET = timedelta(minutes=30)
LONGEST_QUIET = timedelta(hours=4)
AT_ONCE = 2
"""What came and went so often within a day is said to be over only after it has stayed well for ``QUIET``; each
further time for twice as long, up to the longest. If it comes back before, it goes on as the same incident."""
_AHEAD = timedelta(minutes=1)


def quiet_after(often: int) -> timedelta:
    """How long what was over ``often`` within a day has to stay well until that is reported again."""
    return min(QUIET * (1 << min(often - AT_ONCE, 8)), LONGEST_QUIET) if often >= AT_ONCE else timedelta(0)


@dataclass(frozen=True, slots=True)
class Turn:
    """Something to report: the incident as it is now, and why. ``news``: of a recovery, what makes it well again;
    ``begins``: nothing was reported of it before; ``well`` False, of a recovery: nobody looks after it any more;
    ``often``: it comes and goes, and was reported to be over that many times within a day."""

    kind: MessageKind
    incident: Incident
    news: str = ""
    begins: bool = False
    well: bool = True
    often: int = 0


class Ledger:
    """What is open. ``incidents``: those that the catalog has, with those that ended within a day; ``reminders``: the
    pauses before each; ``name`` gives ids."""

    def __init__(
        self, incidents: Iterable[Incident], reminders: Sequence[timedelta], name: Callable[[datetime], str] = new_id
    ) -> None:
        known = tuple(incidents)
        self._open = {incident.id: incident for incident in known if incident.is_open}
        self._over = {incident.id: incident for incident in known if not incident.is_open}
        self._reminders, self._name = tuple(reminders), name
        self._changed: dict[str, Incident] = {}

    @property
    def changed(self) -> tuple[Incident, ...]:
        """Those that are not as the catalog has them."""
        return tuple(self._changed.values())

    @property
    def open(self) -> tuple[Incident, ...]:
        """Incidents that are open."""
        return tuple(self._open.values())

    def take(self, event: Event) -> list[Turn]:
        """What there is to report because of ``event``."""
        rule = rule_of(event)
        if rule.act is Act.CLOSES:
            turns = [
                turn
                for incident in self._meant(event, topic_of(event.kind))
                for turn in self._end(incident, event, rule)
            ]
            return turns + self._end_of_refusals(event)
        if rule.act is Act.SILENT or self._is_paused(event):
            return []
        return self._more(event)

    def pass_time(self, now: datetime, *, muted: bool = False) -> list[Turn]:
        """Reminders that are due, incidents of which nothing was heard for long enough, and, unless ``muted``, those
        that came and went and have stayed well for long enough."""
        turns = [
            Turn(
                MessageKind.RECOVERY,
                self._note(replace(incident, next_reminder=None)),
                f"no further failure since {format_time(incident.closed_at)}",
            )
            for incident in self._settling()
            if incident.closed_at is not None
            and incident.next_reminder is not None
            and incident.next_reminder <= now
            and not muted
        ]
        for incident in self.open:
            rule = rule_of_incident(incident)
            if rule.lasts is not None and now - incident.last_at >= rule.lasts:
                silence = f"closed automatically: no further event for {format_duration(rule.lasts.total_seconds())}"
                turns += self._close(incident, now, silence, mailed=is_reminded(incident))
            elif incident.next_reminder is not None and incident.next_reminder <= now:
                again = replace(incident, reminders=incident.reminders + 1)
                turns.append(
                    Turn(
                        MessageKind.REMINDER, self._note(replace(again, next_reminder=self._next_reminder(again, now)))
                    )
                )
        return turns

    def set_right(self, now: datetime) -> None:
        """Times that a clock wrote which was ahead: as if it had happened now."""
        ahead = now + _AHEAD
        longest = max(self._reminders, default=timedelta(0))
        for incident in self.open:
            late = incident.next_reminder is not None and incident.next_reminder > ahead + longest
            if late or max(incident.opened_at, incident.last_at) > ahead:
                self._note(
                    replace(
                        incident,
                        opened_at=min(incident.opened_at, now),
                        last_at=min(incident.last_at, now),
                        next_reminder=self._next_reminder(incident, now),
                    )
                )
        for incident in self._settling():
            if incident.next_reminder is not None and incident.next_reminder > ahead + LONGEST_QUIET:
                self._note(
                    replace(
                        incident,
                        opened_at=min(incident.opened_at, now),
                        closed_at=now,
                        last_at=min(incident.last_at, now),
                        next_reminder=now + QUIET,
                    )
                )

    def cover(self, incident: Incident, now: datetime, news: str, *, well: bool = True) -> list[Turn]:
        """``incident`` is over for a reason that no event records; ``well`` False: nobody looks after it any more."""
        rule = rule_of_incident(incident)
        return self._close(incident, now, news, mailed=rule.act is Act.OPENS, well=well)

    def keeps_coming(self, incident: Incident, now: datetime) -> bool:
        """Was it over so often within a day that somebody has to be looking after it?"""
        return self._often(incident, now) >= AT_ONCE

    def due(self) -> datetime | None:
        """When ``pass_time`` has something to do next."""
        moments = [
            incident.next_reminder for incident in (*self.open, *self._settling()) if incident.next_reminder is not None
        ]
        for incident in self.open:
            lasts = rule_of_incident(incident).lasts
            if lasts is not None:
                moments.append(incident.last_at + lasts)
        return min(moments, default=None)

    # -- one event

    def _more(self, event: Event) -> list[Turn]:
        known = (
            next(iter(self._meant(event, topic_of(event.kind))), None)
            or self._same_job(event)
            or self._come_back(event)
        )
        if known is not None:
            worse = _GRAVITY[event.severity] > _GRAVITY[known.severity]
            told = replace(
                known, count=known.count + 1, last_at=max(event.at, known.last_at), job_id=event.job_id or known.job_id
            )
            if event.kind != RETENTION_REFUSED and known.kind == RETENTION_REFUSED:
                self._note(told)  # that its job failed is no news
            elif worse:
                kind = event.kind if topic_of(event.kind) == topic_of(known.kind) else known.kind
                self._note(
                    replace(
                        told,
                        kind=kind,
                        severity=event.severity,
                        message=event.message,
                        detail=event.detail,
                        hint=event.hint,
                    )
                )
                return [Turn(MessageKind.ALERT, self._open[known.id])]
            else:
                self._note(replace(told, message=event.message, detail=event.detail, hint=event.hint))
            return []
        new = made_of(Incident, event, id=self._name(event.at), opened_at=event.at, last_at=event.at)
        new = self._note(replace(new, next_reminder=self._next_reminder(new, event.at)))
        often = self._often(new, event.at)
        return [Turn(MessageKind.ALERT, new, begins=True, often=often if often >= AT_ONCE else 0)]

    def _meant(self, event: Event, topic: str) -> list[Incident]:
        return [incident for incident in self.open if _key(incident) == (topic, event.server, event.subject)]

    def _come_back(self, event: Event) -> Incident | None:
        """What came and went before, and of whose end nobody was notified."""
        key = (topic_of(event.kind), event.server, event.subject)
        for incident in self._settling():
            if _key(incident) == key:
                again = replace(incident, closed_at=None, next_reminder=None)
                due = self._next_reminder(again, incident.opened_at)
                for sent in range(incident.reminders if due is not None else 0):
                    due = self._next_reminder(replace(again, reminders=sent), due or event.at)
                return replace(again, next_reminder=max(due, event.at) if due is not None else None)
        return None

    def _same_job(self, event: Event) -> Incident | None:
        """Of a job whose failure says once more what another incident has said about it."""
        if topic_of(event.kind) != JOB or not event.job_id:
            return None
        return next(
            (
                incident
                for incident in self.open
                if incident.job_id == event.job_id
                and incident.server == event.server
                and (topic_of(incident.kind) == JOB or incident.kind == RETENTION_REFUSED)
            ),
            None,
        )

    def _end_of_refusals(self, event: Event) -> list[Turn]:
        """A run of retention that went well ends what an earlier one was refused."""
        if event.kind != RECOVERED or event.subject != JobKind.RETENTION:
            return []
        return [
            turn
            for incident in self.open
            if incident.kind == RETENTION_REFUSED
            and incident.server == event.server
            and incident.job_id != event.job_id
            for turn in self._close(incident, event.at, event.message, mailed=True)
        ]

    def _is_paused(self, event: Event) -> bool:
        """Does a run only not start because somebody paused everything? The pause is reported, and reminded of."""
        return event.kind == _SKIPPED and any(
            incident.kind == PAUSE and incident.server in ("", event.server) for incident in self.open
        )

    # -- one incident

    def _end(self, incident: Incident, event: Event, rule: Rule) -> list[Turn]:
        """Because ``event`` says so: reported at once, or later where it comes and goes."""
        if rule_of_incident(incident).act is Act.TELLS:
            return self._close(incident, event.at, event.message, mailed=False)
        quiet = quiet_after(self._often(incident, event.at))
        if not (quiet and rule.well):
            return self._close(incident, event.at, event.message, mailed=True, well=rule.well)
        closed = max(event.at, incident.opened_at)
        self._note(replace(incident, closed_at=closed, next_reminder=closed + quiet))
        return []

    def _close(self, incident: Incident, now: datetime, news: str, *, mailed: bool, well: bool = True) -> list[Turn]:
        over = self._note(replace(incident, closed_at=max(now, incident.opened_at), next_reminder=None))
        return [Turn(MessageKind.RECOVERY, over, news, well=well)] if mailed else []

    def _settling(self) -> list[Incident]:
        return [incident for incident in self._over.values() if incident.settles]

    def _often(self, incident: Incident, now: datetime) -> int:
        """How many like it were over within a day before."""
        return sum(
            one.closed_at is not None
            and not one.settles
            and _key(one) == _key(incident)
            and timedelta(0) <= now - one.closed_at < _DAY
            for one in self._over.values()
        )

    def _note(self, incident: Incident) -> Incident:
        self._changed[incident.id] = incident
        if incident.is_open:
            self._open[incident.id] = incident
            self._over.pop(incident.id, None)
        else:
            self._over[incident.id] = incident
            self._open.pop(incident.id, None)
        return incident

    def _next_reminder(self, incident: Incident, now: datetime) -> datetime | None:
        if not self._reminders or incident.acknowledged_at is not None or not is_reminded(incident):
            return None
        return now + self._reminders[min(incident.reminders, len(self._reminders) - 1)]


def _key(incident: Incident) -> tuple[str, str, str]:
    return topic_of(incident.kind), incident.server, incident.subject


MANY = 5
"""So many that have something in common go into one letter. Fewer are reported each by itself: a backup that failed and
a proof that never started are two things to do."""
LETTERS = 5
"""With more letters than this at once, all go into one."""


def grouped(turns: Sequence[Turn], destinations: Collection[str]) -> list[list[Turn]]:
    """Each group is one letter; in the order in which they came."""
    groups: list[list[Turn]] = []
    left = list(turns)
    for common in (partial(_shared_destination, destinations), _server, _trouble):
        for what in dict.fromkeys(map(common, left)):
            about = [turn for turn in left if common(turn) == what]
            if what is not None and len(about) >= MANY:
                groups.append(about)
                left = [turn for turn in left if common(turn) != what]
    groups += [[turn] for turn in left]
    groups.sort(key=lambda group: turns.index(group[0]))
    return [list(turns)] if len(groups) > LETTERS else groups


def _shared_destination(destinations: Collection[str], turn: Turn) -> str | None:
    return turn.incident.subject if turn.incident.subject in destinations else None


def _server(turn: Turn) -> str | None:
    return turn.incident.server or None


def _trouble(turn: Turn) -> str:
    return f"{turn.kind} {topic_of(turn.incident.kind)}"
