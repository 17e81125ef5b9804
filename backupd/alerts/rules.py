"""What each kind of event means to people: what it opens or closes, and how a mail about it is called.

Every kind that the program writes stands here. One that does not is still told when it is a warning or an error: an
unknown trouble is a trouble.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from backupd.model.event import Event, Incident, Severity
from backupd.model.job import JobKind


class Act(StrEnum):
    """``opens`` an incident, or is one more of it; ``closes`` it; ``tells``: of something that nothing makes undone, or
    that somebody waits for: one message, and no other when it is over; ``silent``: in the list of events only."""

    OPENS = "opens"
    CLOSES = "closes"
    TELLS = "tells"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Rule:
    """Incidents of one ``topic``, server and subject are one. ``title``: what happened, in words that may name
    ``{subject}`` and ``{server}``. ``lasts``: with nothing heard for so long it is over. ``repeats``: the
    event comes again while it lasts, so that silence means something. ``covered``: a backup that began after it ends
    it. ``well`` False, of one that closes: nobody looks any more."""

    act: Act
    topic: str = ""
    title: str = ""
    lasts: timedelta | None = None
    repeats: bool = False
    covered: bool = False
    well: bool = True


_DAY = timedelta(days=1)
_TWICE_TOLD = 15 * _DAY
"""Longer than two weeks: what is told once a week, and was not, is over."""
_SILENT = Rule(Act.SILENT)
_UNKNOWN = Rule(Act.OPENS, lasts=_DAY)
JOB = "job"
PAUSE = "paused"
HOLD = "held"
RETENTION_REFUSED = "retention-refused"
RECOVERED = "job-recovered"
UNDELIVERABLE = "alerts-undeliverable"


def _job(title: str) -> Rule:
    return Rule(Act.OPENS, JOB, title)


def _tells(title: str) -> Rule:
    return Rule(Act.TELLS, title=title, lasts=_DAY)


def unwatched(broken: str) -> str:
    """The kind of event that tells that nobody looks any more whether it is mended."""
    return f"{broken}-unwatched"


def _pair(broken: str, mended: str, title: str, *, topic: str = "") -> dict[str, Rule]:
    return {
        broken: Rule(Act.OPENS, topic or broken, title),
        mended: Rule(Act.CLOSES, topic or broken),
        unwatched(broken): Rule(Act.CLOSES, topic or broken, well=False),
    }


RULES: Mapping[str, Rule] = {
    "job-failed": _job("{subject} failed"),
    "job-partial": _job("{subject} is incomplete"),
    "job-abandoned": _job("{subject} was killed"),
    "job-missed": _job("{subject} did not run"),
    "job-skipped": _job("{subject} did not start"),
    "job-hanging": _job("{subject} hung"),
    "job-waiting": _job("{subject} waits to start"),
    "job-not-followed": _job("no follow-up job of {subject} was queued"),
    "schedule-broken": _job("{subject} cannot be scheduled"),
    RECOVERED: Rule(Act.CLOSES, JOB),
    "schedule-ended": Rule(Act.CLOSES, JOB),
    "job-cancelled": _SILENT,
    "limits-paused": _SILENT,
    **_pair("stream-failed", "stream-recovered", "binary log is not streamed"),
    **_pair("spool-full", "spool-has-room", "spool is full"),
    **_pair("purge-alarm", "purge-over", "binary logs are about to be lost"),
    "binlog-gap": Rule(Act.OPENS, "binlog-gap", "binary logs are missing", covered=True),
    "binlog-gap-closed": Rule(Act.CLOSES, "binlog-gap"),
    "branch-begun": Rule(Act.OPENS, "branch-begun", "new binary log branch", covered=True),
    "binlog-missing": _tells("archived binary logs are gone from {subject}"),
    **_pair("rpo-broken", "rpo-kept", "recovery point objective is broken"),
    **_pair("rto-broken", "rto-kept", "recovery time objective is broken"),
    **_pair("destination-rpo-broken", "destination-rpo-kept", "{subject} alone breaks the recovery point objective"),
    **_pair("not-protected", "protected-again", "backups are not protected"),
    **_pair("destination-unreachable", "destination-reachable", "destination {subject} cannot be reached"),
    **_pair("destination-filling", "destination-has-room", "destination {subject} fills up"),
    **_pair("destination-behind", "destination-caught-up", "destination {subject} lacks binary logs"),
    **_pair("destination-slow", "destination-keeps-up", "copies to {subject} are too slow"),
    **_pair("replication-failing", "replication-caught-up", "copies to {subject} fail", topic="replication"),
    "copy-lost": Rule(Act.OPENS, "replication", "backups are gone from {subject}"),
    unwatched("copy-lost"): Rule(Act.CLOSES, "replication", well=False),
    "replication-lost": _tells("backups were deleted before {subject} had them"),
    **_pair("copies-failed", "copies-stored", "the catalog cannot be copied to {subject}"),
    **_pair("copies-damaged", "copies-sound", "copies of the catalog at {subject} are damaged"),
    **_pair("removal-locked", "removal-unlocked", "{subject} refuses to delete files"),
    **_pair("removal-braked", "removal-released", "mass-deletion limit reached at {subject}"),
    **_pair("manifests-missing", "manifests-found", "backups are missing at {subject}"),
    **_pair("backups-partial", "backups-whole", "stored backups lack tables"),
    **_pair("foreign-backups", "foreign-backups-gone", "backups of a different server exist under this server name"),
    **_pair("backups-foreign", "backups-native", "foreign backups found (not taken by this installation)"),
    **_pair("tampered", "tampered-mended", "documents at {subject} were altered or forged"),
    **_pair("rolled-back", "rolled-back-over", "{subject} was possibly rolled back"),
    "signing-key-rotated": _tells("another key signs what is stored"),
    **_pair("server-changed", "server-known", "another server answers under its name"),
    "server-failover": _tells("another server took over"),
    "rot-found": Rule(Act.OPENS, "rot-found", "damaged files at {subject}", covered=True),
    "rot-repaired": _tells("damaged files at {subject} were replaced"),
    "cold-sample-thawing": _SILENT,
    "cold-sample-read": _SILENT,
    "thaw-not-raised": _tells("the thaw of {subject} could not be made faster"),
    "thaw-late": _tells("the thaw of {subject} is late"),
    "thaw-ready": _tells("{subject} is thawed"),
    RETENTION_REFUSED: Rule(
        Act.OPENS, RETENTION_REFUSED, "retention was refused at {subject}", lasts=2 * _DAY, repeats=True
    ),
    "grace-waived": _tells("{subject} was full: expired backups were removed before their grace period ended"),
    "held": Rule(Act.TELLS, HOLD, "retention is held", lasts=_DAY),
    "released": Rule(Act.CLOSES, HOLD),
    "paused": Rule(Act.OPENS, PAUSE, "jobs are paused"),
    "resumed": Rule(Act.CLOSES, PAUSE),
    "key-expiring": Rule(Act.OPENS, "key-expiring", "a key expires", lasts=_TWICE_TOLD, repeats=True),
    "key-renewed": Rule(Act.CLOSES, "key-expiring"),
    "key-overdue": Rule(Act.OPENS, "key-overdue", "a key was not proved in time", lasts=_TWICE_TOLD, repeats=True),
    "key-proved": Rule(Act.CLOSES, "key-overdue"),
    "daemon-started": _SILENT,
    "daemon-stopped": _SILENT,
    **_pair("config-refused", "config-reloaded", "the configuration was refused"),
    **_pair("tls-unset", "tls-set", "the connection to {subject} is not protected by TLS"),
    **_pair("policy-broken", "policy-mended", "policy {subject} is broken: no backups"),
    "clock-jump": _tells("the clock jumped"),
    "catalog-begun": _SILENT,
    "catalog-rebuilt": _tells("the catalog was rebuilt"),
    **_pair("api-failed", "api-recovered", "the web page and the REST interface are down"),
    **_pair("hook-failed", "hook-recovered", "the hook {subject} fails"),
    **_pair("heartbeat-failed", "heartbeat-sent", "heartbeat URL does not respond"),
    **_pair(UNDELIVERABLE, "alerts-delivered", "messages by {subject} cannot be delivered"),
}

_BY_HAND = frozenset(
    {
        JobKind.FULL,
        JobKind.INCREMENTAL,
        JobKind.TEST_RESTORE,
        JobKind.REPLICATE,
        JobKind.THAW,
        JobKind.RESTORE,
        JobKind.REMOVAL,
    }
)
"""Subjects of jobs that no schedule starts: whoever asked for one sees how it ended, and need not ask for it again."""


def rule_of(event: Event) -> Rule:
    """What ``event`` means. One that would open something and is no warning is silent."""
    rule = RULES.get(event.kind, _UNKNOWN)
    if rule.act is Act.OPENS and event.severity is Severity.INFO:
        return _SILENT
    if rule.topic == JOB and rule.act is Act.OPENS and event.subject in _BY_HAND:
        return Rule(rule.act, rule.topic, rule.title, lasts=_DAY)
    return rule


def rule_of_incident(incident: Incident) -> Rule:
    """The rule by which it was opened."""
    return rule_of(
        Event(
            incident.last_at,
            incident.kind,
            incident.severity,
            incident.message,
            server=incident.server,
            subject=incident.subject,
        )
    )


def topic_of(kind: str) -> str:
    """What an event of this kind is about; the kind itself where no rule names that."""
    return RULES.get(kind, _UNKNOWN).topic or kind


def endings_of(incident: Incident) -> tuple[str, ...]:
    """Kinds of events that tell that nobody looks after it any more; none where no event ever does."""
    return tuple(kind for kind, rule in RULES.items() if not rule.well and rule.topic == topic_of(incident.kind))


def is_reminded(incident: Incident) -> bool:
    """Is anybody to be told again while it lasts? Not of what ends by itself."""
    rule = rule_of_incident(incident)
    return rule.act is Act.OPENS and (rule.lasts is None or rule.repeats)


def title_of(incident: Incident) -> str:
    """What happened and where, in one line: ``db1: physical.full failed``."""
    words = RULES.get(incident.kind, _UNKNOWN).title or incident.kind.replace("-", " ")
    text = words.format(subject=incident.subject or "it", server=incident.server)
    return f"{incident.server}: {text}" if incident.server else text
