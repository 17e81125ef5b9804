"""Which news go into one letter: many about one destination, one server or one sort of trouble at once are told
together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from backupd.alerts.ledger import Turn
from backupd.alerts.rules import topic_of

MANY = 5
"""So many that have something in common go into one letter. Fewer are told each by itself: a backup that failed and a
proof that never started are two things to do."""
LETTERS = 5
"""With more letters than this at once, all go into one."""


def grouped(turns: Sequence[Turn], destinations: Collection[str]) -> list[list[Turn]]:
    """Each group is one letter; in the order in which they came."""
    groups: list[list[Turn]] = []
    left = list(turns)
    for common in (partial(_place, destinations), _server, _trouble):
        for what in dict.fromkeys(map(common, left)):
            about = [turn for turn in left if common(turn) == what]
            if what is not None and len(about) >= MANY:
                groups.append(about)
                left = [turn for turn in left if common(turn) != what]
    groups += [[turn] for turn in left]
    groups.sort(key=lambda group: turns.index(group[0]))
    return [list(turns)] if len(groups) > LETTERS else groups


def _place(destinations: Collection[str], turn: Turn) -> str | None:
    return turn.incident.subject if turn.incident.subject in destinations else None


def _server(turn: Turn) -> str | None:
    return turn.incident.server or None


def _trouble(turn: Turn) -> str:
    return f"{turn.kind} {topic_of(turn.incident.kind)}"
