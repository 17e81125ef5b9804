"""Will a restored node of a Galera cluster come back by IST, or must a donor copy all its data to it (SST)?

A donor sends the transactions behind the node's seqno S out of its gcache: it must still hold S + 1 when the node
joins, so its oldest seqno decides: ``downto <= S + 1``. The cache is a ring: what passes through it, by its size and by
how many bytes are written a second, says for how long it will. Pure; the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from backupd.model.document import Document, computed, json_key
from backupd.model.server_facts import PRIMARY, SYNCED, UNKNOWN_SEQNO, ClusterPosition, WsrepState
from backupd.model.text import format_duration, format_size, format_time

NEAR = 0.8
"""The part of the time that is left that a restore may take: the rest is for what an estimate does not know."""
_LONGEST = timedelta(days=3650)
"""A time that is further away is none."""


@dataclass(frozen=True, slots=True)
class NodeSample(Document):
    """A node at a moment, as far as a forecast needs it. ``server``: its name in the configuration. ``last``: the seqno
    that was committed last; ``downto``, ``written_bytes``, ``gcache_bytes``: as of ``WsrepState``."""

    server: str
    at: datetime
    uuid: str
    name: str
    node: str
    status: str
    state: str
    size: int
    last: int
    downto: int | None
    written_bytes: int
    gcache_bytes: int

    @classmethod
    def of(cls, server: str, at: datetime, state: WsrepState) -> NodeSample:
        """What ``state`` was at that moment."""
        return cls(
            server=server,
            at=at,
            uuid=state.position.uuid,
            name=state.name,
            node=state.node,
            status=state.status,
            state=state.state,
            size=state.size,
            last=state.position.seqno,
            downto=state.cached_downto,
            written_bytes=state.written_bytes,
            gcache_bytes=state.gcache_bytes,
        )


@dataclass(frozen=True, slots=True)
class Donor(Document):
    """A node as a source of IST. ``seqnos``, ``bytes``: what is written a second, measured over ``over``; None where
    nothing was measured. ``room``: bytes that its gcache holds."""

    sample: NodeSample = field(metadata=json_key(inline=True))
    seqnos: float | None = field(default=None, metadata=json_key("seqnos_per_second", digits=3))
    bytes: float | None = field(default=None, metadata=json_key("bytes_per_second", digits=1))
    over: timedelta | None = field(default=None, metadata=json_key("measured_seconds"))
    room: int = 0

    @property
    @computed("window_seconds")
    def window(self) -> timedelta | None:
        """For how long it holds what is written now, at this rate. None: not known, or as good as for ever."""
        if not self.bytes or not self.room:
            return None
        return _span(self.room / self.bytes)

    def holds(self, position: ClusterPosition) -> bool:
        """Would it give IST to a node at ``position`` now?"""
        one = self.sample
        if one.status != PRIMARY or one.uuid != position.uuid or one.last < position.seqno:
            return False
        return position.seqno == one.last or (one.downto is not None and one.downto <= position.seqno + 1)

    def until(self, position: ClusterPosition) -> datetime | None:
        """Until when, where it does now. None: not known, or as good as for ever."""
        if not self.bytes or not self.seqnos or not self.room:
            return None
        behind = (self.sample.last - position.seqno) * self.bytes / self.seqnos
        left = _span(max(0.0, self.room - behind) / self.bytes)
        return None if left is None else self.sample.at + left


def _span(seconds: float) -> timedelta | None:
    return timedelta(seconds=seconds) if seconds < _LONGEST.total_seconds() else None


def donor_of(samples: Sequence[NodeSample]) -> Donor:
    """The node of which these are samples, the oldest first. Only those since its last start count, and of its present
    cluster. Where the cache has begun to drop what is old, it is full, and what it holds now is its room."""
    newest = samples[-1]
    run = [newest]
    for one in reversed(samples[:-1]):
        later = run[-1]
        if one.uuid != newest.uuid or one.written_bytes > later.written_bytes or one.last > later.last:
            break
        run.append(one)
    oldest = run[-1]
    span = (newest.at - oldest.at).total_seconds()
    if span <= 0:
        return Donor(newest, room=newest.gcache_bytes)
    seqnos = (newest.last - oldest.last) / span
    written = (newest.written_bytes - oldest.written_bytes) / span
    room = newest.gcache_bytes
    if newest.downto is not None and oldest.downto is not None and newest.downto > oldest.downto and seqnos:
        held = (newest.last - newest.downto + 1) * written / seqnos
        room = min(room, round(held)) if room else round(held)
    return Donor(newest, seqnos, written, newest.at - oldest.at, room)


class Outcome(StrEnum):
    """``ist``: incremental state transfer; ``late``: it is possible now, and will not be any more when the restore has
    ended; ``sst``: a donor copies all its data; ``foreign``: the node must not join, its history is another one."""

    IST = "ist"
    LATE = "late"
    SST = "sst"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Forecast(Document):
    """How a node that is restored to ``position`` will come back. ``donor``: the server that holds what it needs for
    the longest time; ``until``: for how long, None where that is not known or as good as for ever. ``seconds``: the
    predicted time of the restore, None where nothing is known. ``reason``: in words."""

    outcome: Outcome
    position: ClusterPosition | None
    donor: str
    until: datetime | None
    seconds: float | None = field(metadata=json_key(digits=1))
    reason: str

    @property
    def is_ist(self) -> bool:
        """Does it come back without a copy of all data?"""
        return self.outcome is Outcome.IST

    @property
    def words(self) -> str:
        """``IST from shop-db2 until 2026-11-28T23:10:00Z: ...``"""
        if self.outcome in (Outcome.IST, Outcome.LATE):
            until = f" until {format_time(self.until.replace(microsecond=0))}" if self.until else ""
            word = "IST" if self.is_ist else "IST will be missed"
            return f"{word} from {self.donor}{until}: {self.reason}" if self.is_ist else f"{word}: {self.reason}"
        return f"{'SST' if self.outcome is Outcome.SST else 'refused'}: {self.reason}"


def forecast(
    position: ClusterPosition | None,
    donors: Iterable[Donor],
    *,
    now: datetime,
    predicted: timedelta | None = None,
) -> Forecast:
    """The verdict for a restore to ``position`` that begins ``now`` and takes ``predicted``, with the numbers. None as
    ``position``: nobody knows which seqno the restored copy has."""
    seconds = predicted.total_seconds() if predicted is not None else None
    known = sorted(donors, key=lambda one: one.sample.server)

    def verdict(outcome: Outcome, reason: str, donor: str = "", until: datetime | None = None) -> Forecast:
        return Forecast(outcome, position, donor, until, seconds, reason)

    if position is None or position.seqno == UNKNOWN_SEQNO:
        return verdict(Outcome.SST, "the backup records no position in its cluster")
    ours = [one for one in known if one.sample.status == PRIMARY and one.sample.uuid == position.uuid]
    last = max((one.sample.last for one in ours), default=UNKNOWN_SEQNO)
    if position.seqno > last:
        return verdict(*_apart(position, known, last))
    holding = [one for one in ours if one.holds(position)]
    wanted = position.seqno + 1
    if not holding:
        oldest = ", ".join(
            f"{one.sample.server} {'nothing' if one.sample.downto is None else one.sample.downto}" for one in ours
        )
        return verdict(Outcome.SST, f"seqno {wanted} is in no gcache; the oldest there: {oldest}")
    # One that is away with a transfer or a backup of its own gives nothing before it is back.
    best = max(
        holding,
        key=lambda one: (one.sample.state == SYNCED, one.until(position) or datetime.max.replace(tzinfo=now.tzinfo)),
    )
    until, sample = best.until(position), best.sample
    numbers = f"{last - position.seqno} transactions behind, {_cache(best)}"
    if predicted is not None and until is not None and now + predicted > until:
        return verdict(
            Outcome.LATE,
            f"the restore is predicted to take {format_duration(predicted.total_seconds())}, and {sample.server} drops "
            f"seqno {wanted} in {format_duration(max(0.0, (until - now).total_seconds()))} ({numbers})",
            sample.server,
            until,
        )
    return verdict(Outcome.IST, numbers, sample.server, until)


def _cache(donor: Donor) -> str:
    oldest = f"its gcache reaches back to {donor.sample.downto}"
    if donor.bytes is None or donor.seqnos is None:
        return f"{oldest}; how much is written was not measured yet"
    rate = f"{format_size(donor.bytes)}/s and {donor.seqnos:.1f} transactions/s are written"
    return f"{oldest}, {format_size(donor.room)} of it at {rate}"


def _apart(position: ClusterPosition, donors: Sequence[Donor], last: int) -> tuple[Outcome, str]:
    """Why no node can give anything to one at ``position``: ``last`` is where its cluster is, -1 where no node of it
    goes on."""
    if last != UNKNOWN_SEQNO:
        ahead = position.seqno - last
        return Outcome.FOREIGN, (
            f"the backup's seqno {position.seqno} is {ahead} ahead of the cluster's {last}: the cluster lacks {ahead} "
            "transactions, or was bootstrapped from an older state"
        )
    others = sorted({one.sample.uuid for one in donors if one.sample.status == PRIMARY})
    if others:
        return Outcome.FOREIGN, f"the backup is of cluster {position.uuid}, the nodes are of {', '.join(others)}"
    return Outcome.SST, "no node of the cluster answers from a part of it that goes on (Primary)"


@dataclass(frozen=True, slots=True)
class Advice(Document):
    """What has to be otherwise, so that a restore ends in time. ``interval``: how far backups may be apart at most,
    None where that alone does not help; ``gcache``: bytes that every node's gcache needs with backups as they are."""

    interval: timedelta | None = field(metadata=json_key("interval_seconds"))
    gcache: int

    @property
    def words(self) -> str:
        """``take increments every 20m 0s or more often, or set gcache.size to 2.1 GiB on each node``"""
        size = f"set gcache.size to {format_size(self.gcache)} on each node"
        if self.interval is None:
            return f"{size}: more frequent backups alone do not help"
        return f"take increments every {format_duration(self.interval.total_seconds())} or more often, or {size}"


def is_short(found: Forecast, now: datetime) -> bool:
    """Does the restore take too large a part of the time that is left for it?"""
    if found.outcome in (Outcome.SST, Outcome.LATE):
        return True
    if found.until is None or found.seconds is None or found.outcome is Outcome.FOREIGN:
        return False
    return found.seconds > NEAR * (found.until - now).total_seconds()


def advice(donor: Donor, predicted: timedelta, apart: timedelta) -> Advice | None:
    """For restores that take ``predicted``, of backups that are ``apart`` now. None where nothing was measured."""
    window = donor.window
    if window is None or donor.bytes is None:
        return None
    left = window * NEAR - predicted
    needed = (predicted + apart).total_seconds() / NEAR * donor.bytes
    return Advice(left if left > timedelta(0) else None, round(needed))


@dataclass(frozen=True, slots=True)
class Rejoin(Document):
    """What was predicted of a node that joins its cluster again, and what came. ``id``: of the restore; ``server``: the
    cluster as the restore named it, ``node``: the server that joins. ``forecast``: as it was when that began; ``came``:
    ``ist``, ``sst``, ``failed`` or ``hung``, "" while nobody knows; ``predicted_seconds``: of the restore."""

    id: str
    server: str
    node: str
    uuid: str
    seqno: int
    forecast: str
    donor: str
    until: datetime | None
    predicted_seconds: float | None
    began_at: datetime
    came: str = ""
    ended_at: datetime | None = None

    @classmethod
    def of(cls, restore_id: str, server: str, node: str, found: Forecast, now: datetime) -> Rejoin:
        """One that begins ``now``."""
        position = found.position or ClusterPosition("", UNKNOWN_SEQNO)
        return cls(
            id=restore_id,
            server=server,
            node=node,
            uuid=position.uuid,
            seqno=position.seqno,
            forecast=str(found.outcome),
            donor=found.donor,
            until=found.until,
            predicted_seconds=found.seconds,
            began_at=now,
        )

    @property
    @computed("error_seconds", digits=1)
    def error(self) -> float | None:
        """How much longer it took than was predicted, in seconds. None while that is not known."""
        if self.predicted_seconds is None or self.ended_at is None:
            return None
        return (self.ended_at - self.began_at).total_seconds() - self.predicted_seconds

    @property
    @computed("as_predicted")
    def is_as_predicted(self) -> bool | None:
        """Did the forecast say right how it would join?"""
        return None if not self.came else (self.came == Outcome.IST) == (self.forecast == Outcome.IST)
