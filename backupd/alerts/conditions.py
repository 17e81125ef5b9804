"""Conditions: what is not as it should be now, and what a look at it changes. Pure.

A watcher says two things: the conditions that hold now, and the keys that it looked at, each with the words for the
case that nothing is wrong there. A watcher looks at many keys (the objectives of a server, its stream, every
destination); a job that knows of one thing only looks at exactly one key. ``settle`` compares that with what is open:

    open   holds   looked at   ->
    no     yes     (implied)       one event opens it
    yes    yes     (implied)       the open incident says from now on what the condition says; no event
    yes    no      yes             one event closes it
    yes    no      no              nothing: somebody else looks at it, or this look could not determine it
    yes    gone                    one event closes it, which does not call it well: nobody looks at it any more

What is open is in the catalog's events, so that a restart neither repeats nor forgets anything: the newest event of a
key is the one that opened it, or one that closed it (``app.context.incidents`` reads and writes them, and nothing else
does). ``gone`` are keys whose watcher went: their server or destination left the configuration, or the policy promises
nothing more of the sort (``Need`` says what a kind needs to have a watcher). When somebody is notified of an open or a
closed incident is decided from the events alone (``alerts.ledger``): reminders, pauses, what comes and goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from backupd.model.document import made_of
from backupd.model.event import Event, Severity


class Need(StrEnum):
    """What a kind needs to have a watcher, beside its server in the configuration: a configured destination as its
    subject; one that the server's policy names, too; a policy that streams the binary log."""

    NOTHING = "nothing"
    DESTINATION = "destination"
    COPIES = "copies"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Kind:
    """The kinds of the events that open and close an incident, and its ``title`` (see ``rules.Rule``). Kinds of one
    ``topic``, which is ``broken`` unless said otherwise, are one incident."""

    broken: str
    mended: str
    title: str
    topic: str = ""
    needs: Need = Need.NOTHING

    @property
    def unwatched(self) -> str:
        """The kind of the event that closes it because nobody looks at it any more."""
        return unwatched(self.broken)


def unwatched(broken: str) -> str:
    """The kind of event which says that nobody looks any more whether it is mended."""
    return f"{broken}-unwatched"


@dataclass(frozen=True, slots=True)
class Key:
    """What at most one incident is open for. ``server`` is empty when it concerns all."""

    kind: Kind
    server: str = ""
    subject: str = ""

    def closing(self, at: datetime, kind: str, message: str, job_id: str = "") -> Event:
        """The event of this ``kind`` that closes it."""
        return Event(at, kind, Severity.INFO, message, server=self.server, subject=self.subject, job_id=job_id)


@dataclass(frozen=True, slots=True)
class Condition:
    """It holds now. ``opens`` False: it keeps an incident open, but is no reason to open one."""

    key: Key
    severity: Severity
    message: str
    detail: str = ""
    hint: str = ""
    job_id: str = ""
    opens: bool = True

    def event(self, at: datetime) -> Event:
        """The event that opens its incident."""
        key = self.key
        return made_of(Event, self, at=at, kind=key.kind.broken, server=key.server, subject=key.subject)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a look changes: events that open and close incidents, and new words of those that stay open."""

    opened: tuple[Event, ...] = ()
    restated: tuple[Event, ...] = ()
    closed: tuple[Event, ...] = ()


NOTHING: Mapping[Key, str] = {}


def settle(
    at: datetime,
    is_open: Collection[Key],
    holds: Iterable[Condition] = (),
    looked: Mapping[Key, str] = NOTHING,
    gone: Mapping[Key, str] = NOTHING,
    job_id: str = "",
) -> Settled:
    """See the module's head. ``looked``: what to say of each key where nothing is wrong any more; ``gone``: why nobody
    looks at the key any more; ``job_id``: of the job that found that it is over. Of several conditions of one key the
    last one counts."""
    held = {one.key: one for one in holds}
    ends = {key: (key.kind.unwatched, why) for key, why in gone.items()}
    ends |= {key: (key.kind.mended, well) for key, well in looked.items()}
    over = [key.closing(at, *ends[key], job_id) for key in is_open if key in ends and key not in held]
    return Settled(
        opened=tuple(one.event(at) for key, one in held.items() if one.opens and key not in is_open),
        restated=tuple(one.event(at) for key, one in held.items() if key in is_open),
        closed=tuple({(end.kind, end.server, end.subject): end for end in over}.values()),
    )
