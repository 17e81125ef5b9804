"""Objects in archive classes: what it takes to read them, and how far asking for them has come. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Any

from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import RefusedError
from backupd.model.text import format_time

GIB = 2**30
MONTH_DAYS = 30
LOGS = "binlogs"
"""The part of a restore that is its binary logs; every other part is called by the id of its backup."""
TIERS = ("bulk", "standard", "expedited")
"""From the slowest and cheapest to the fastest."""


class ThawState(StrEnum):
    """``wanted``: not asked for yet; ``raised``: asked for, and to be asked for again at a faster tier; ``failed``: it
    cannot be asked for."""

    WANTED = "wanted"
    RAISED = "raised"
    THAWING = "thawing"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ThawItem:
    """One object of a thaw. ``part``: the backup that it is of, or ``LOGS``; ``ready_until``: when the thawed copy goes
    away again, None where it stays."""

    thaw_id: str
    destination: str
    key: str
    part: str
    size: int
    storage_class: str
    tier: str
    state: ThawState = ThawState.WANTED
    requested_at: datetime | None = None
    expected_at: datetime | None = None
    ready_until: datetime | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class ThawCount:
    """How many objects of one part of a thaw are in one state. ``expected_at``: the latest of them; ``ready_until``:
    the earliest."""

    part: str
    destination: str
    state: ThawState
    objects: int
    bytes: int
    expected_at: datetime | None
    ready_until: datetime | None


@dataclass(frozen=True, slots=True)
class Price:
    """What reading out of one storage class takes at one tier. ``hours``: the longest that the destination names."""

    hours: float
    per_gib: float
    per_1000_requests: float


@dataclass(frozen=True, slots=True)
class Prices:
    """``retrieval``: by storage class and tier; ``minimum_days``: for how long an object of a class is paid for at
    least; ``per_gib_month``: of storing in a class; ``copy_per_gib_month``: of a thawed copy while it is there."""

    currency: str
    dated: date
    retrieval: Mapping[str, Mapping[str, Price]] = field(default_factory=dict)
    minimum_days: Mapping[str, int] = field(default_factory=dict)
    per_gib_month: Mapping[str, float] = field(default_factory=dict)
    copy_per_gib_month: float = 0.0

    def cost(self, storage_class: str, tier: str, objects: int, size: int, days: int) -> float | None:
        """Of thawing these objects with these bytes for this time; None where the table does not say."""
        price = self.retrieval.get(storage_class, {}).get(tier)
        if price is None:
            return None
        return (
            size / GIB * (price.per_gib + self.copy_per_gib_month * days / MONTH_DAYS)
            + objects / 1000 * price.per_1000_requests
        )

    def minimum(self, storage_class: str) -> timedelta:
        return timedelta(days=self.minimum_days.get(storage_class, 0))


@dataclass(frozen=True, slots=True)
class ColdObject(Document):
    """An object that cannot be read now at ``destination``, where it is to be thawed. ``thawing``: somebody has asked
    for it, so asking costs nothing again."""

    destination: str
    key: str
    size: int = field(metadata=json_key("bytes"))
    storage_class: str = field(metadata=json_key("class"))
    part: str = field(metadata=json_key("of"))
    thawing: bool = field(default=False, metadata=HIDDEN)

    @property
    @computed()
    def state(self) -> str:
        """``thawing`` or ``archived``."""
        return "thawing" if self.thawing else "archived"


@dataclass(frozen=True, slots=True)
class Offer(Document):
    """What one tier takes for all objects of a plan; ``cost`` None where the table of prices lacks a class."""

    tier: str
    hours: float
    cost: float | None = field(metadata=json_key(digits=4))


@dataclass(frozen=True, slots=True)
class ThawPlan:
    """What has to be thawed, for ``days`` days, before a restore can read everything. ``offers``: the tiers that all
    storage classes of it have, the slowest first; ``tier``: the one that counts."""

    objects: tuple[ColdObject, ...]
    days: int
    tier: str
    prices: Prices

    @property
    def bytes(self) -> int:
        return sum(one.size for one in self.objects)

    @property
    def destinations(self) -> str:
        """The destinations, for people."""
        return ", ".join(sorted({one.destination for one in self.objects}))

    @property
    def offers(self) -> tuple[Offer, ...]:
        return tuple(offer for tier in TIERS if (offer := self._offer(tier)) is not None)

    @property
    def offer(self) -> Offer:
        """Of the chosen tier. Raises RefusedError where a storage class does not have it."""
        found = self._offer(self.tier)
        if found is None:
            classes = sorted({one.storage_class for one in self.objects})
            raise RefusedError(
                f"{' and '.join(classes)} at destination {self.destinations} cannot be thawed at the tier {self.tier}",
                hint=f"choose another with --tier: {', '.join(offer.tier for offer in self.offers) or 'none is known'}"
                "; tiers are those of archive.prices in the configuration",
            )
        return found

    def at_any_tier(self) -> ThawPlan:
        """The same, where nobody asked for this tier and a storage class does not have it: at the fastest that there
        is."""
        offers = self.offers
        return (
            self if not offers or self.tier in {offer.tier for offer in offers} else replace(self, tier=offers[-1].tier)
        )

    def _offer(self, tier: str) -> Offer | None:
        hours, total = 0.0, 0.0
        known = True
        for storage_class, objects in self.classes().items():
            price = self.prices.retrieval.get(storage_class, {}).get(tier)
            if price is None:
                return None
            hours = max(hours, price.hours)
            asked = [one for one in objects if not one.thawing]
            cost = self.prices.cost(storage_class, tier, len(asked), sum(one.size for one in asked), self.days)
            known, total = known and cost is not None, total + (cost or 0.0)
        return Offer(tier, hours, total if known else None)

    def classes(self) -> dict[str, list[ColdObject]]:
        found: dict[str, list[ColdObject]] = {}
        for one in self.objects:
            found.setdefault(one.storage_class, []).append(one)
        return dict(sorted(found.items()))

    def as_json(self) -> dict[str, Any]:
        offers = self.offers
        chosen = next((offer for offer in offers if offer.tier == self.tier), None)
        return {
            "destinations": sorted({one.destination for one in self.objects}),
            "count": len(self.objects),
            "bytes": self.bytes,
            "days": self.days,
            "tier": self.tier,
            "hours": chosen.hours if chosen else None,
            "cost": chosen.as_json()["cost"] if chosen else None,
            "currency": self.prices.currency,
            "prices_of": self.prices.dated.isoformat(),
            "offers": [offer.as_json() for offer in offers],
            "classes": [
                {
                    "class": name,
                    "count": len(objects),
                    "bytes": sum(one.size for one in objects),
                    "thawing": sum(one.thawing for one in objects),
                }
                for name, objects in self.classes().items()
            ],
            "objects": [one.as_json() for one in self.objects],
        }


@dataclass(frozen=True, slots=True)
class Thawing:
    """How far a thaw is. ``counts`` by part, destination and state."""

    thaw_id: str
    counts: tuple[ThawCount, ...]

    def total(self, *states: ThawState, part: str | None = None) -> tuple[int, int]:
        """(objects, bytes) in these states; in all of them without any."""
        found = [one for one in self.counts if (not states or one.state in states) and part in (None, one.part)]
        return sum(one.objects for one in found), sum(one.bytes for one in found)

    @property
    def open(self) -> int:
        """Objects that are not there yet, and may come."""
        return self.total(ThawState.WANTED, ThawState.RAISED, ThawState.THAWING)[0]

    @property
    def expected_at(self) -> datetime | None:
        return max(
            (
                one.expected_at
                for one in self.counts
                if one.expected_at and one.state in (ThawState.THAWING, ThawState.RAISED)
            ),
            default=None,
        )

    @property
    def ready_until(self) -> datetime | None:
        return min(
            (one.ready_until for one in self.counts if one.ready_until and one.state is ThawState.READY), default=None
        )

    def waits_for(self, part: str) -> bool:
        return self.total(ThawState.WANTED, ThawState.RAISED, ThawState.THAWING, part=part)[0] > 0

    def as_json(self) -> dict[str, Any]:
        objects, size = self.total()
        ready, ready_bytes = self.total(ThawState.READY)
        expected, until = self.expected_at, self.ready_until
        return {
            "objects": objects,
            "bytes": size,
            "ready": ready,
            "bytes_ready": ready_bytes,
            "failed": self.total(ThawState.FAILED)[0],
            "not_asked_yet": self.total(ThawState.WANTED, ThawState.RAISED)[0],
            "expected_at": format_time(expected) if expected else None,
            "ready_until": format_time(until) if until else None,
            "destinations": sorted({one.destination for one in self.counts}),
        }


def next_look(now: datetime, expected_at: datetime | None, *, least: timedelta, most: timedelta) -> datetime:
    """When to look again: an eighth of the time that is left, or of the time that it is late."""
    away = abs(expected_at - now) / 8 if expected_at is not None else least
    return now + min(max(away, least), most)


def faster(tier: str, other: str) -> bool:
    """Is ``tier`` faster than ``other``?"""
    return TIERS.index(tier) > TIERS.index(other)


def in_order(objects: Sequence[ColdObject], parts: Sequence[str]) -> list[ColdObject]:
    """As they should be asked for: what a restore reads first comes first."""
    rank = {part: number for number, part in enumerate(parts)}
    return sorted(objects, key=lambda one: rank.get(one.part, len(rank)))
