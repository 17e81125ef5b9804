"""A server's timeline as a drawing: what is where, in percent of its width. Pure: values in, values out.

Texts keep their size however wide the drawing is shown, so everything is placed by percent and nothing is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from api.web.words import kind_word, moment_text, span_text
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.proof import Proof
from backupd.recovery.timeline import Timeline
from backupd.recovery.windows import Window

EVERYTHING = "all"
_NAMED = (
    ("1h", "1 hour", timedelta(hours=1)),
    ("6h", "6 hours", timedelta(hours=6)),
    ("1d", "1 day", timedelta(days=1)),
    ("7d", "7 days", timedelta(days=7)),
    ("30d", "30 days", timedelta(days=30)),
    ("90d", "90 days", timedelta(days=90)),
    ("1y", "1 year", timedelta(days=365)),
)
SPANS = {name: span for name, _words, span in _NAMED}
SPAN_NAMES = {**{name: words for name, words, _span in _NAMED}, EVERYTHING: "everything"}
_USUAL = ("1d", "7d")
"""The narrowest that holds everything is shown at first, of these; what is older is a step away."""
_MARGIN = 0.02
_LEAST = timedelta(minutes=10)
_SLICES = 120
_CLOSE = 1.6
"""Percent: marks nearer to each other than this are drawn as one."""
_LANES = 3
_STEPS = (
    *(timedelta(minutes=number) for number in (1, 5, 15, 30)),
    *(timedelta(hours=number) for number in (1, 3, 6, 12)),
    *(timedelta(days=number) for number in (1, 2, 7, 14, 30, 91, 182, 365)),
)
_MOST_TICKS = 8
_EPOCH = datetime(2001, 1, 1, tzinfo=UTC)
"""A Monday: ticks a week apart fall on Mondays."""


@dataclass(frozen=True, slots=True)
class View:
    """The part of time that is shown; ``name``: of its length, a key of SPANS or EVERYTHING, "" of any other."""

    name: str
    begin: datetime
    end: datetime

    @property
    def length(self) -> timedelta:
        return self.end - self.begin

    def percent(self, moment: datetime) -> float:
        """Where a moment is, 0 to 100; what is outside is at the edge."""
        return min(max((moment - self.begin) / self.length * 100, 0.0), 100.0)

    def at(self, percent: float) -> datetime:
        return self.begin + self.length * (percent / 100)

    def shows(self, begin: datetime, end: datetime) -> bool:
        return begin <= self.end and end >= self.begin


@dataclass(frozen=True, slots=True)
class Bar:
    """``kind``: recoverable, doubtful, point, lost, gap or gap-place; ``lane`` from 0, the top."""

    x: float
    width: float
    kind: str
    title: str
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """``kind``: full, increment, logical or proof; ``ids``: what it represents; ``begin``, ``end``: the time between
    them, where they are several."""

    x: float
    kind: str
    tone: str
    title: str
    ids: tuple[str, ...]
    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    text: str
    is_spare: bool
    """Left out where there is little room."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of the drawing that leads to ``moment``; ``exact``: to that one alone, no other is in it."""

    x: float
    width: float
    moment: datetime
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    view: View
    lanes: int
    bars: tuple[Bar, ...]
    backups: tuple[Mark, ...]
    proofs: tuple[Mark, ...]
    ticks: tuple[Tick, ...]
    slices: tuple[Slice, ...]
    now: float
    chosen: float | None = None


def view_of(
    timeline: Timeline,
    backups: Iterable[BackupRecord],
    *,
    span: str = "",
    between: tuple[datetime, datetime] | None = None,
    around: datetime | None = None,
) -> View:
    """What to show: what is ``between`` two moments, else ``span`` of it (unknown words count as none) with
    ``around`` in the middle, else up to now."""
    now = timeline.now
    if between is not None:
        begin, end = between
        room = max((end - begin) * _MARGIN, _LEAST / 2)
        return View("", begin - room, min(end + room, max(now + room, begin + room)))
    first = min([window.begin for window in timeline.windows] + [backup.started_at for backup in backups], default=now)
    whole = max(now - first, _LEAST)
    name = span if span in SPANS or span == EVERYTHING else _usual(whole)
    length = (whole if name == EVERYTHING else SPANS[name]) * (1 + _MARGIN)
    latest = now + length * (_MARGIN / 2)
    end = latest if around is None else min(max(around + length / 2, first + length / 2), latest)
    return View(name, end - length, end)


def _usual(whole: timedelta) -> str:
    return next((name for name in _USUAL if SPANS[name] >= whole), _USUAL[-1])


def draw(
    timeline: Timeline,
    backups: Sequence[BackupRecord],
    proofs: Iterable[Proof],
    view: View,
    chosen: datetime | None = None,
) -> Drawing:
    lanes = _lanes(timeline, view)
    marks = [_of_backup(backup, view) for backup in backups if backup.state is not BackupState.DELETED]
    proved = [_of_proof(proof, view) for proof in proofs]
    return Drawing(
        view=view,
        lanes=max(len(set(lanes.values())), 1),
        bars=(*_windows(timeline, view, lanes), *_gaps(timeline, view, lanes), *_lost(timeline, view, lanes)),
        backups=tuple(_gathered(marks, view, "backups")),
        proofs=tuple(_gathered(proved, view, "test restores")),
        ticks=tuple(_ticks(view)),
        slices=tuple(_slices(timeline, view)),
        now=view.percent(timeline.now),
        chosen=view.percent(chosen) if chosen is not None and view.shows(chosen, chosen) else None,
    )


def backup_moment(record: BackupRecord) -> datetime:
    """The moment whose state it holds, nearly: of its end, or of its snapshot where it is a dump."""
    return record.started_at if record.kind is BackupKind.LOGICAL else record.finished_at


def _lanes(timeline: Timeline, view: View) -> dict[str, int]:
    """The lane of each branch that is seen, the newest at the top; the oldest share the last one."""
    order = [branch.id for branch in timeline.branches]
    seen = {window.branch for window in timeline.windows if view.shows(window.begin, window.end)}
    newest = sorted(seen, key=lambda branch: order.index(branch) if branch in order else -1, reverse=True)
    return {branch: min(number, _LANES - 1) for number, branch in enumerate(newest)}


def _windows(timeline: Timeline, view: View, lanes: dict[str, int]) -> Iterator[Bar]:
    for window in timeline.windows:
        if not view.shows(window.begin, window.end):
            continue
        x = view.percent(window.begin)
        kind = "point" if window.run is None else "doubtful" if window.conditions else "recoverable"
        yield Bar(x, max(view.percent(window.end) - x, 0.0), kind, _window_title(window), lanes[window.branch])


def _window_title(window: Window) -> str:
    where = f", from {', '.join(window.destinations)}" if window.destinations else ""
    doubt = f"; doubtful: {'; '.join(window.conditions)}" if window.conditions else ""
    if window.run is None:
        return f"only this moment: {moment_text(window.begin)}{where}; {window.reason_end}{doubt}"
    return (
        f"any moment from {moment_text(window.begin)} to {moment_text(window.end)}{where}; it ends because "
        f"{window.reason_end}{doubt}"
    )


def _gaps(timeline: Timeline, view: View, lanes: dict[str, int]) -> Iterator[Bar]:
    for gap in timeline.gaps:
        begin = gap.from_at
        end = gap.to_at or (timeline.now if gap.before is None else begin)
        if begin is None or end is None or not view.shows(begin, end):
            continue
        x = view.percent(begin)
        where = f"at {gap.destination}" if gap.destination else "everywhere"
        yield Bar(
            x,
            max(view.percent(end) - x, 0.4),
            "gap-place" if gap.destination else "gap",
            f"gap {where}, {moment_text(begin)} to {moment_text(end)}: {gap.reason}",
            lanes.get(gap.branch, 0),
        )


def _lost(timeline: Timeline, view: View, lanes: dict[str, int]) -> Iterator[Bar]:
    """From the latest recoverable moment to now."""
    latest = timeline.latest
    if latest is None or latest >= timeline.now or not view.shows(latest, timeline.now):
        return
    x = view.percent(latest)
    span = span_text((timeline.now - latest).total_seconds())
    yield Bar(
        x,
        view.percent(timeline.now) - x,
        "lost",
        f"not recoverable yet: what was committed since {moment_text(latest)} ({span})",
        lanes.get(timeline.windows[-1].branch, 0),
    )


_MARK_KINDS = {
    BackupKind.PHYSICAL_FULL: "full",
    BackupKind.PHYSICAL_INCREMENTAL: "increment",
    BackupKind.LOGICAL: "logical",
}


def _of_backup(backup: BackupRecord, view: View) -> Mark:
    at = backup_moment(backup)
    lacking = max(backup.tables_missing, backup.not_dumped)
    tone = "bad" if backup.state is BackupState.DAMAGED else "warning" if backup.doubtful or lacking else "good"
    trouble = {"bad": ", damaged", "warning": f", {lacking} tables missing" if lacking else ", doubtful", "good": ""}[
        tone
    ]
    title = f"{kind_word(backup.kind)} of {moment_text(at)}{trouble}"
    return Mark(view.percent(at), _MARK_KINDS[backup.kind], tone, title, (backup.id,), at, at)


def _of_proof(proof: Proof, view: View) -> Mark:
    at = proof.finished_at
    tone = "good" if proof.is_current else "bad" if proof.outcome == "failed" else "warning"
    title = f"test restore {moment_text(at)}: {proof.outcome}, {proof.target}"
    return Mark(view.percent(at), "proof", tone, title, (proof.id,), at, at)


_WORST: Callable[[Mark], int] = lambda mark: ("good", "warning", "bad").index(mark.tone)  # noqa: E731  a sort key


def _gathered(marks: Iterable[Mark], view: View, what: str) -> Iterator[Mark]:
    """Those in ``view``; marks that would cover each other as one, which looks like the worst of them."""
    group: list[Mark] = []
    for mark in sorted((one for one in marks if view.shows(one.begin, one.end)), key=lambda mark: mark.begin):
        if group and mark.x - group[0].x >= _CLOSE:
            yield _one(group, what)
            group = []
        group.append(mark)
    if group:
        yield _one(group, what)


def _one(group: Sequence[Mark], what: str) -> Mark:
    if len(group) == 1:
        return group[0]
    worst = max(group, key=_WORST)
    kinds = {mark.kind for mark in group}
    kind = "full" if "full" in kinds else group[0].kind
    bad = [mark for mark in group if mark.tone != "good"]
    title = f"{len(group)} {what}, {moment_text(group[0].begin)} to {moment_text(group[-1].end)}"
    if bad:
        title += f"; {len(bad)} of them not good, as {bad[-1].title}"
    return Mark(
        (group[0].x + group[-1].x) / 2,
        kind,
        worst.tone,
        title,
        tuple(mark.ids[0] for mark in group),
        group[0].begin,
        group[-1].end,
    )


def _ticks(view: View) -> Iterator[Tick]:
    step = next((step for step in _STEPS if view.length / step <= _MOST_TICKS), _STEPS[-1])
    moment = _EPOCH + ((view.begin - _EPOCH) // step + 1) * step
    number = 0
    while moment <= view.end:
        yield Tick(view.percent(moment), _tick_text(moment, step), is_spare=number % 2 == 1)
        moment += step
        number += 1


def _tick_text(moment: datetime, step: timedelta) -> str:
    if step < timedelta(days=1) and (moment.hour or moment.minute):
        return f"{moment:%H:%M}"
    return f"{moment:%b} {moment.day}" if step < timedelta(days=180) else f"{moment:%b %Y}"


def _slices(timeline: Timeline, view: View) -> Iterator[Slice]:
    """Pieces of equal width wherever something is recoverable; each leads to the middle of what is so in it."""
    width = 100 / _SLICES
    for number in range(_SLICES):
        begin, end = view.at(number * width), view.at((number + 1) * width)
        inside = [
            (max(window.begin, begin), min(window.end, end))
            for window in timeline.windows
            if window.begin < end and window.end >= begin
        ]
        if inside:
            one, other = max(inside, key=lambda span: span[1] - span[0])
            yield Slice(number * width, width, one + (other - one) / 2, exact=one == other)
