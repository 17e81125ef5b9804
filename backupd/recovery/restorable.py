"""Can a backup be restored, and from which destinations? Pure, and linear in what it is given.

A backup is restored with everything that it builds on, so there is one walk up the parents (``climb``) and one decision
(``Restorability``): the destinations that hold the whole chain, and where there is none, the obstacle. Whoever asks
says which copies count: unmarked ones, undamaged ones, verified ones, those that one destination has or can get, those
that were read where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from backupd.model.backup_record import BackupKind


class Member(Protocol):
    """A backup as a part of chains."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def parent(self) -> str | None: ...


M = TypeVar("M", bound=Member)
Key = TypeVar("Key", bound=Hashable)


class Why(StrEnum):
    """What keeps a backup from being restored."""

    UNFIT = "unfit"
    """No copy of it counts."""
    NO_PARENT = "no-parent"
    """It is an increment that names no parent."""
    PARENT_MISSING = "parent-missing"
    CIRCLE = "circle"
    """It builds on itself."""
    SCATTERED = "scattered"
    """Each member of the chain has copies that count, but no destination has all of them."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """``backup``: the member of the chain of which ``why`` is true; ``parent``: what that one builds on."""

    why: Why
    backup: str
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Restorable:
    """``destinations`` that hold the backup and everything that it builds on; ``obstacle``: why there is none."""

    destinations: frozenset[str]
    obstacle: Obstacle | None = None


def here_if(counts: object) -> frozenset[str]:
    """The answer of ``where`` for whoever asks about one destination, or about all as one."""
    return frozenset({"here"} if counts else ())


def climb(start: Key, parent_of: Callable[[Key], Key | None]) -> Iterator[Key]:
    """``start``, its parent and so on, each once: parents that lead round in a circle end it."""
    seen: set[Key] = set()
    one: Key | None = start
    while one is not None and one not in seen:
        seen.add(one)
        yield one
        one = parent_of(one)


def members_of(backup: M, by_id: Mapping[str, M]) -> tuple[M, ...]:
    """What ``backup`` builds on as far as it is among ``by_id``, the first one first, and ``backup`` itself."""
    ids = climb(backup.id, lambda one: above if (above := by_id.get(one, backup).parent) in by_id else None)
    return tuple(reversed([by_id.get(one, backup) for one in ids]))


class Restorability(Generic[M]):
    """``find`` gives a backup by its id, ``where`` the destinations at which a backup, without what it builds on, has a
    copy that counts. Both are asked once of each backup."""

    def __init__(self, find: Callable[[str], M | None], where: Callable[[M], frozenset[str]]) -> None:
        self._find, self._where = find, where
        self._found: dict[str, M | None] = {}
        self._decided: dict[str, Restorable] = {}

    def of(self, backup: M) -> Restorable:
        """Raises what ``find`` and ``where`` raise."""
        self._found[backup.id] = backup
        line = takewhile(lambda one: one not in self._decided, climb(backup.id, self._parent_of))
        for one in reversed(list(line)):
            if (member := self._member(one)) is not None:
                self._decided[one] = self._decide(member)
        return self._decided[backup.id]

    def _member(self, backup_id: str) -> M | None:
        if backup_id not in self._found:
            self._found[backup_id] = self._find(backup_id)
        return self._found[backup_id]

    def _parent_of(self, backup_id: str) -> str | None:
        member = self._member(backup_id)
        return member.parent if member is not None else None

    def _decide(self, backup: M) -> Restorable:
        here = self._where(backup)
        if not here:
            return _not(Why.UNFIT, backup)
        if backup.parent is None:
            return _not(Why.NO_PARENT, backup) if backup.kind == BackupKind.PHYSICAL_INCREMENTAL else Restorable(here)
        above = self._decided.get(backup.parent)
        if above is None:
            return _not(Why.PARENT_MISSING if self._member(backup.parent) is None else Why.CIRCLE, backup)
        if above.obstacle is not None:
            return above
        both = here & above.destinations
        return Restorable(both) if both else _not(Why.SCATTERED, backup)


def _not(why: Why, backup: Member) -> Restorable:
    return Restorable(frozenset(), Obstacle(why, backup.id, backup.parent or ""))
