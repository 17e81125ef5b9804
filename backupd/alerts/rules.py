"""What each kind of event means to people: what it opens or closes, and how a mail about it is called.

Every kind that the program writes is listed here. One that is not is still reported when it is a warning or an error:
an unknown trouble is a trouble.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum

from backupd.alerts.conditions import Kind, Need
from backupd.model.document import made_of
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
    needs: Need = Need.NOTHING


_DAY = timedelta(days=1)
_TWICE_TOLD = 15 * _DAY
"""Longer than two weeks: what is reported once a week, and was not, is over."""
_SILENT = Rule(Act.SILENT)
_UNKNOWN = Rule(Act.OPENS, lasts=_DAY)
JOB = "job"
PAUSE = "paused"
HOLD = "held"
RETENTION_REFUSED = "retention-refused"
RECOVERED = "job-recovered"


# -- kinds of conditions

STREAM = Kind("stream-failed", "stream-recovered", "binary log is not streamed", needs=Need.STREAM)
SHARING = Kind("streams-apart", "streams-together", "quiet streams cannot share a process")
SPOOL = Kind("spool-full", "spool-has-room", "spool is full", needs=Need.STREAM)
ACKNOWLEDGE = Kind(
    "unacknowledged", "acknowledged", "commits do not wait for the copy of the binary log (RPO 0)", needs=Need.STREAM
)
PURGE = Kind("purge-alarm", "purge-over", "binary logs are about to be lost", needs=Need.STREAM)
RPO = Kind("rpo-broken", "rpo-kept", "recovery point objective (RPO) is not met")
RTO = Kind("rto-broken", "rto-kept", "recovery time objective (RTO) is not met")
IST_WINDOW = Kind("ist-window", "ist-window-kept", "a restored Galera node would need a full copy (SST)")
PLACE_RPO = Kind(
    "destination-rpo-broken",
    "destination-rpo-kept",
    "{subject} alone does not meet the recovery point objective (RPO)",
    needs=Need.DESTINATION,
)
PROTECTION = Kind("not-protected", "protected-again", "backups are not protected")
REACH = Kind(
    "destination-unreachable",
    "destination-reachable",
    "destination {subject} cannot be reached",
    needs=Need.DESTINATION,
)
FILLING = Kind("destination-filling", "destination-has-room", "destination {subject} fills up", needs=Need.DESTINATION)
DESTINATION = Kind(
    "destination-behind", "destination-caught-up", "destination {subject} lacks binary logs", needs=Need.COPIES
)
SLOW = Kind("destination-slow", "destination-keeps-up", "copies to {subject} are too slow", needs=Need.COPIES)
REPLICATION = Kind(
    "replication-failing", "replication-caught-up", "copies to {subject} fail", "replication", Need.COPIES
)
LOST = Kind("copy-lost", "replication-caught-up", "backups are gone from {subject}", "replication", Need.COPIES)
COPIES = Kind("copies-failed", "copies-stored", "the catalog cannot be copied to {subject}", needs=Need.DESTINATION)
DAMAGED = Kind(
    "copies-damaged", "copies-sound", "copies of the catalog at {subject} are damaged", needs=Need.DESTINATION
)
LOCKED = Kind("removal-locked", "removal-unlocked", "{subject} refuses to delete files", needs=Need.DESTINATION)
OVER_LIMIT = Kind(
    "removal-braked", "removal-released", "mass-deletion limit reached at {subject}", needs=Need.DESTINATION
)
MISSING = Kind("manifests-missing", "manifests-found", "backups are missing at {subject}", needs=Need.DESTINATION)
PARTIAL = Kind("backups-partial", "backups-whole", "stored backups lack tables")
FOREIGN = Kind("foreign-backups", "foreign-backups-gone", "backups of a different server exist under this server name")
"""Of a server that is none of ours."""
NOT_OURS = Kind("backups-foreign", "backups-native", "foreign backups found (not taken by this installation)")
"""Of whomever, and nothing shows that we took them."""
TAMPERED = Kind("tampered", "tampered-mended", "documents at {subject} were altered or forged", needs=Need.DESTINATION)
ROLLED_BACK = Kind("rolled-back", "rolled-back-over", "{subject} was possibly rolled back", needs=Need.DESTINATION)
CHANGED = Kind("server-changed", "server-known", "another server answers under its name")
INCONSISTENT_REPLICA = Kind("replica-inconsistent", "replica-consistent", "{subject} differs from its source")
ERRANT_TRANSACTIONS = Kind(
    "errant-transactions", "errant-transactions-gone", "{subject} has transactions that its source has not"
)
EXPIRING = Kind("key-expiring", "key-renewed", "a key expires")
OVERDUE = Kind("key-overdue", "key-proved", "a key was not proved in time")
REFUSED = Kind("config-refused", "config-reloaded", "the configuration was refused")
TLS = Kind("tls-unset", "tls-set", "the connection to {subject} is not protected by TLS")
POLICY = Kind("policy-broken", "policy-mended", "policy {subject} is broken: no backups")
API = Kind("api-failed", "api-recovered", "the web page and the REST interface are down")
HOOK = Kind("hook-failed", "hook-recovered", "the hook {subject} fails")
HEARTBEAT = Kind("heartbeat-failed", "heartbeat-sent", "heartbeat URL does not respond")
DELIVERY = Kind("alerts-undeliverable", "alerts-delivered", "messages by {subject} cannot be delivered")
"""A channel, or one recipient of mail, to which messages cannot be delivered."""

KINDS = tuple(value for value in list(globals().values()) if isinstance(value, Kind))


def _job(title: str) -> Rule:
    return Rule(Act.OPENS, JOB, title)


def _tells(title: str) -> Rule:
    return Rule(Act.TELLS, title=title, lasts=_DAY)


def _rules(kind: Kind) -> dict[str, Rule]:
    """What its three events do."""
    topic = kind.topic or kind.broken
    return {
        kind.broken: Rule(Act.OPENS, topic, kind.title, needs=kind.needs),
        kind.mended: Rule(Act.CLOSES, topic),
        kind.unwatched: Rule(Act.CLOSES, topic, well=False),
    }


RULES: Mapping[str, Rule] = {
    **{name: rule for kind in KINDS for name, rule in _rules(kind).items()},
    **{
        kind.broken: replace(_rules(kind)[kind.broken], lasts=_TWICE_TOLD, repeats=True) for kind in (EXPIRING, OVERDUE)
    },
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
    "binlog-gap": Rule(Act.OPENS, "binlog-gap", "binary logs are missing", covered=True),
    "binlog-gap-closed": Rule(Act.CLOSES, "binlog-gap"),
    "branch-begun": Rule(Act.OPENS, "branch-begun", "new binary log branch", covered=True),
    "binlog-missing": _tells("archived binary logs are gone from {subject}"),
    "replication-lost": _tells("backups were deleted before {subject} had them"),
    "signing-key-rotated": _tells("the signing key was replaced"),
    "server-failover": _tells("another server took over"),
    "ist-missed": _tells("a node that is being restored will need a full copy (SST)"),
    "stream-member": _tells("the binary log is streamed from another member"),
    "rot-found": Rule(Act.OPENS, "rot-found", "damaged files at {subject}", covered=True, needs=Need.DESTINATION),
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
    "daemon-started": _SILENT,
    "daemon-stopped": _SILENT,
    "clock-jump": _tells("the clock jumped"),
    "catalog-begun": _SILENT,
    "catalog-rebuilt": _tells("the catalog was rebuilt"),
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
    return rule_of(made_of(Event, incident, at=incident.last_at))


def topic_of(kind: str) -> str:
    """What an event of this kind is about; the kind itself where no rule names that."""
    return RULES.get(kind, _UNKNOWN).topic or kind


def kinds_of(incident: Incident) -> tuple[Kind, ...]:
    """The kinds of conditions that it is of; none where only events of jobs, and others that no watcher looks after,
    open and close it."""
    return tuple(kind for kind in KINDS if topic_of(kind.broken) == topic_of(incident.kind))


def is_reminded(incident: Incident) -> bool:
    """Is anybody to be notified again while it lasts? Not of what ends by itself."""
    rule = rule_of_incident(incident)
    return rule.act is Act.OPENS and (rule.lasts is None or rule.repeats)


def title_of(incident: Incident) -> str:
    """What happened and where, in one line: ``db1: physical.full failed``."""
    words = RULES.get(incident.kind, _UNKNOWN).title or incident.kind.replace("-", " ")
    text = words.format(subject=incident.subject or "it", server=incident.server)
    return f"{incident.server}: {text}" if incident.server else text
