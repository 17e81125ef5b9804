"""What a restore will do, computed before a byte moves: shown by ``backupd plan``, kept with the job, then
executed.

Its steps name what each works on, and how long it will take by the rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from backupd.model.binlog import ReplayMethod, ReplaySpec, Stop
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.proof import Phase
from backupd.model.server_facts import Position
from backupd.model.text import format_duration, format_size
from restore.planning.target import Older

if TYPE_CHECKING:
    from backupd.model.thaw import ThawPlan

STEP_NAMES = ("thawed", "fetched", "prepared", "restored", "started", "rolled_forward", "verified", "replicated")
"""The phases of a restore in their order; a plan has those it needs."""
TABLE_STEP_NAMES = (*STEP_NAMES[:-2], "extracted", "carried", "loaded", "compared", "handed_over")
"""The same of a restore of tables."""


def in_order(phases: Sequence[Phase], names: Sequence[str]) -> tuple[Phase, ...]:
    """As the steps of a plan (``names``) follow each other: a copy is rolled forward before it is put in place, and
    logs are fetched first, but that counts as part of the replay."""
    known = {name: index for index, name in enumerate(names)}
    return tuple(sorted(phases, key=lambda phase: known.get(phase.name, len(known))))


_AT_ONCE = 1e11
"""Bytes a second that no phase handles: it only renamed something, in less than can be measured."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a phase goes: ``seconds + bytes / bytes_per_second``. ``samples``: measured runs behind it, 0
    = none. ``speed_assumed``: they measured ``seconds`` only."""

    bytes_per_second: float
    seconds: float = 0.0
    samples: int = 0
    speed_assumed: bool = False

    def estimate(self, size: int) -> float:
        """Seconds for ``size`` bytes."""
        return self.seconds + size / self.bytes_per_second

    @property
    def basis(self) -> str:
        """How an estimate with this rate came about, in words."""
        speed = "nearly no time" if self.bytes_per_second > _AT_ONCE else f"{self.bytes_per_second / 1e6:.0f} MB/s"
        if self.seconds >= 1:
            speed += f" + {self.seconds:.0f} s"
        if not self.samples:
            return f"assumed, nothing measured yet: {speed}"
        runs = f"{self.samples} run{'s' if self.samples != 1 else ''}"
        if self.speed_assumed:
            assumed = f"assumed: {self.bytes_per_second / 1e6:.0f} MB/s"
            return f"measured here: {self.seconds:.1f} s to begin over {runs}; {assumed}"
        return f"measured here: {speed} over {runs}"


def bytes_of(phase: str, sizes: Sequence[int]) -> int:
    """What a phase works on, when the backups of a chain have ``sizes`` bytes, the full one first. Once increments are
    applied, what is there is about as large as the full one."""
    return sum(sizes) if phase in ("fetched", "prepared") else sizes[0]


DEFAULT_RATES: Mapping[str, Rate] = {
    "fetched": Rate(100e6, 1.0),
    "prepared": Rate(300e6, 2.0),
    "restored": Rate(5e9, 1.0),
    "started": Rate(1e9, 3.0),
    "rolled_forward": Rate(10e6, 5.0),
    "verified": Rate(300e6, 1.0),
}
"""Used until a phase was measured once. Bytes are always those of the source's plaintext."""

PIPE_RATE = Rate(2e6, 1.0)
"""Of a replay through a client, which is one session."""


@dataclass(frozen=True, slots=True)
class Step(Document):
    """``name`` is the phase that will be reported; ``bytes`` what it works on; ``seconds`` estimated, and
    how; ``measured``: by what runs here took."""

    name: str
    title: str
    bytes: int
    seconds: float = field(metadata=json_key(digits=1))
    estimate: str
    commands: tuple[str, ...] = ()
    measured: bool = field(default=False, metadata=HIDDEN)


class ComparedBy(StrEnum):
    """What of a new replica is compared with its source before it is handed over."""

    GTIDS = "gtids"
    RECEIVED = "received-gtids"
    CHECKSUMS = "checksums"
    NOTHING = "nothing"

    @property
    def words(self) -> str:
        """For people."""
        return _COMPARED_BY[self]


_COMPARED_BY = {
    ComparedBy.GTIDS: "the GTIDs that replica and source have executed",
    ComparedBy.RECEIVED: "the GTIDs that the replica received; it writes no binary log, so what is written on the "
    "replica itself has none",
    ComparedBy.CHECKSUMS: "checksums of its tables at one position, as there are no GTIDs",
    ComparedBy.NOTHING: "nothing",
}


@dataclass(frozen=True, slots=True)
class ReplicaPlan(Document):
    """What the restored copy becomes: a replica of ``source`` that begins behind the GTIDs of ``position``, or at its
    file and byte (``by_gtid``), and why there. ``delay``: seconds that it stays behind. ``compared_by``: what will be
    compared with the source before it is handed over; ``not_compared``: why nothing will be."""

    source: str
    server_id: int
    position: Position
    by_gtid: bool
    reason: str
    delay: int
    compared_by: ComparedBy = ComparedBy.NOTHING
    not_compared: str = ""


@dataclass(frozen=True, slots=True)
class Plan(Document):
    """``chain``: backup ids in the order they are applied, the last one decides ``position``.
    ``destinations``: where to read, best first. ``reason``: why this backup. ``bytes_stored`` is what has to
    be read from a destination. ``replay``: what is replayed on it, None for nothing; ``until``: the position where the
    restored copy is in the end, None where only the backup itself is asked for. ``rto``: seconds that the policy
    allows, None without an objective. ``thaw``: what has to be thawed before it can be read, None for nothing.
    ``older``: of the newest moment that was accepted though something later is known to exist, None otherwise.
    ``inexact``: why the replay may give other rows than the source had, where that was accepted. ``replica``: of a copy
    that becomes a replica."""

    server: str
    target: str
    chain: tuple[str, ...]
    destinations: tuple[str, ...]
    position: Position
    reason: str
    bytes_stored: int
    bytes_source: int
    steps: tuple[Step, ...]
    warnings: tuple[str, ...] = field(default=())
    replay: ReplaySpec | None = None
    until: Stop | None = None
    rto: float | None = field(default=None, metadata=HIDDEN)
    thaw: ThawPlan | None = None
    older: Older | None = None
    inexact: str = ""
    replica: ReplicaPlan | None = None

    @property
    @computed("backup", after="target")
    def backup_id(self) -> str:
        """The backup whose state is restored."""
        return self.chain[-1]

    @property
    @computed("bytes", after="reason")
    def bytes_fetched(self) -> int:
        """``bytes_stored`` under its older name."""
        return self.bytes_stored

    @property
    @computed("rto")
    def promise(self) -> dict[str, Any]:
        """What the policy allows, in seconds, and whether the plan keeps to it."""
        return {"objective": self.rto, "kept": None if self.rto is None else self.seconds <= self.rto}

    @property
    @computed(after="bytes_source", digits=1)
    def seconds(self) -> float:
        """Estimated restore time: the sum of the steps."""
        return sum(step.seconds for step in self.steps)


def estimated(
    work: Mapping[str, tuple[str, int]], rates: Mapping[str, Rate], replay: ReplaySpec | None
) -> Iterator[Step]:
    """A step for each phase of ``work``, of its title and bytes; the replay only where there is one."""
    for name, (title, size) in work.items():
        if name != "rolled_forward":
            yield _step(name, title, size, rates[name])
        elif replay is not None:
            rate = PIPE_RATE if replay.method is ReplayMethod.PIPE else rates[name]
            yield _step(name, title, replay.size, rate)


def _step(name: str, title: str, size: int, rate: Rate) -> Step:
    return Step(name, title, size, rate.estimate(size), rate.basis, measured=rate.samples > 0)


def over_objective(steps: Iterable[Step], rto: float | None) -> tuple[str, ...]:
    """What to say of a plan that takes longer than the policy allows; empty for one that does not."""
    taken = tuple(steps)
    seconds = sum(step.seconds for step in taken)
    if rto is None or seconds <= rto:
        return ()
    measured = sum(step.measured for step in taken)
    rates = "measured" if measured == len(taken) else "measured and assumed" if measured else "assumed"
    return (f"this takes {format_duration(seconds)} by {rates} rates; objectives.rto is {format_duration(rto)}",)


def replay_text(replay: ReplaySpec) -> str:
    """What is replayed, how, and up to where, in words."""
    stop = replay.stop
    across = f" in {len(replay.legs)} parts, across a fork" if len(replay.legs) > 1 else ""
    how = "by the server's applier" if replay.method is ReplayMethod.APPLIER else "through a client"
    without = f", without {', '.join(replay.exclude)}" if replay.exclude else ""
    what = f"{format_size(replay.size)} of binary logs, {replay.transactions} transactions"
    return f"replay {what}{across}, {how}, up to {stop.file}:{stop.pos}{without}"


def thaw_step(thaw: ThawPlan) -> Step:
    """Waiting for an archive. What is there first is fetched meanwhile, so this is an upper bound. Raises RefusedError
    for a tier that there is not."""
    offer = thaw.offer
    count = len(thaw.objects)
    return Step(
        "thawed",
        f"wait until {count} archived object{'s' if count != 1 else ''} at {thaw.destinations} can be read "
        f"({offer.tier})",
        thaw.bytes,
        offer.hours * 3600,
        f"at most {offer.hours:g} h by the table of {thaw.prices.dated.isoformat()}",
    )
