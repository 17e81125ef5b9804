"""A resolver over a thrown world, and what a replay of a plan would do there: transaction by transaction."""

from __future__ import annotations

from datetime import datetime

from backupd.model.binlog import FilePosition, ReplayLeg, SegmentKey, Stop, covers
from backupd.model.errors import RefusedError
from backupd.recovery.windows import RouteLeg
from restore.planning.plan import Plan
from restore.planning.target_resolution import History, Material
from tests.support.catalog.world import HEADER, File, Life, Tx, World


class WorldResolver:
    """Answers from the truth. A leg that leads over a byte that is archived nowhere is an error of the test."""

    def __init__(self, world: World) -> None:
        self._world = world

    def stop_for_time(
        self, branch: str, start: FilePosition, end: FilePosition, moment: datetime, _since: datetime
    ) -> Stop | None:
        life = self._world.life_of(branch)
        for file in life.files:
            for begin, _end, tx in file.txs:
                if start <= (file.number, begin) < end and tx.at > moment:
                    return self._stop(life, file, begin)
        return None

    def later_before(self, branch: str, place: FilePosition, moment: datetime, since: datetime) -> Stop | None:
        life = self._world.life_of(branch)
        found: Stop | None = None
        for file in life.files:
            for begin, _end, tx in file.txs:
                if (file.number, begin) < place and self._is_archived(branch, file, begin):
                    if tx.at <= since:
                        found = None
                    elif tx.at > moment:
                        found = found or self._stop(life, file, begin)
        return found

    def stop_for_gtid(self, branch: str, gtid: str, *, before: bool) -> Stop | None:
        life = self._world.life_of(branch)
        mariadb = self._world.flavour == "mariadb"
        for file in life.files:
            if not before and file.before and covers(file.before, gtid, mariadb=mariadb):
                return self._stop(life, file, 4)
            for begin, end, tx in file.txs:
                if before and tx.gtid == gtid:
                    return self._stop(life, file, begin) if self._is_archived(branch, file, end) else None
                state = self._world.state_in(life, file.number, end)
                if not before and state and covers(state, gtid, mariadb=mariadb):
                    return self._stop(life, file, end) if self._is_archived(branch, file, end) else None
        return None

    def stop_for_position(self, branch: str, number: int, pos: int) -> Stop | None:
        life = self._world.life_of(branch)
        file = next((file for file in life.files if file.number == number), None)
        if file is None or not self._is_archived(branch, file, pos):
            return None
        if pos > 4 and pos not in {HEADER, *(place for start, end, _tx in file.txs for place in (start, end))}:
            raise RefusedError(f"{pos} is inside a transaction")
        return self._stop(life, file, pos)

    def doubts(
        self, branch: str, start: FilePosition, stop: FilePosition, end: FilePosition, moment: datetime
    ) -> tuple[str, ...]:
        return ()

    def repeats(self, leg: RouteLeg) -> bool:
        stop = Stop(leg.branch, leg.until.file, leg.until.pos, leg.until.gtid)
        return bool(leg.until.file) and self.material(leg, stop).repeated > 0

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        chosen: list[SegmentKey] = []
        end = _place(stop)
        held = sorted((s for s in self._world.segments), key=lambda s: (s.number, s.start, s.end))
        unended = 0
        for span in leg.spans:
            at = (span.first[0], 0) if span is leg.spans[0] else span.first
            last = min(span.last, end)
            while at < last:
                here = [s for s in held if s.branch == span.branch and (s.number, s.start) == at and s.end > s.start]
                if not here:
                    raise AssertionError(f"{leg} leads over a hole at {at} of {span.branch}")
                best = max(here, key=lambda s: (s.is_final, s.end))
                chosen.append(best.key)
                at = (best.number + 1, 0) if best.is_final else (best.number, best.end)
                forked = span is not leg.spans[-1] and at == span.last
                unended += (
                    best.number < end[0]
                    and not best.is_final
                    and not forked
                    and not any(s.branch == span.branch and (s.number, s.start) == at for s in held)
                )
        txs = [tx for key in chosen for _start, _end, tx in self._world.txs(key)]
        state = leg.start.gtid
        repeated = sum(
            1
            for tx in txs
            if leg.start.pos == 4
            and tx.gtid
            and state
            and covers(state, tx.gtid, mariadb=self._world.flavour == "mariadb")
        )
        return Material(tuple(chosen), sum(key.end - key.start for key in chosen), len(txs), (1,), repeated, unended)

    def _is_archived(self, branch: str, file: File, end: int) -> bool:
        return any(
            s.branch == branch and s.number == file.number and s.start <= end <= s.end for s in self._world.segments
        )

    def _stop(self, life: Life, file: File, pos: int) -> Stop:
        done = [tx for _start, end, tx in file.txs if end <= pos]
        rest = [tx for begin, _end, tx in file.txs if begin >= pos]
        return Stop(
            life.branch.id,
            life.branch.file(file.number),
            pos,
            self._world.state_in(life, file.number, pos) if pos > 4 else file.before,
            done[-1].at if done else None,
            rest[0].gtid if rest else "",
            rest[0].at if rest else None,
        )


def history_of(world: World) -> History:
    return History([life.branch for life in world.lives], world.runs(), world.gaps, WorldResolver(world))


def replayed(world: World, plan: Plan) -> list[int]:
    """The transactions that the restored copy holds in the end, by what replicas do: in log order, from a place, or
    from the first byte with what is executed skipped."""
    base, life, count = next(entry for entry in world.backups if entry[0].id == plan.backup_id)
    data = list(world.lives[life].log[:count])
    if plan.replay is None:
        return [tx.uid for tx in data]
    for number, leg in enumerate(plan.replay.legs):
        data += _leg(world, leg, by_gtid=number > 0 or leg.start != base.position)
    return [tx.uid for tx in data]


def _leg(world: World, leg: ReplayLeg, *, by_gtid: bool) -> list[Tx]:
    found: list[Tx] = []
    start = (int(leg.start.file.rpartition(".")[2]), leg.start.pos)
    for key in leg.segments:
        for begin, _end, tx in world.txs(key):
            if not start <= (key.number, begin) < _place(leg.stop):
                continue
            if by_gtid and covers(leg.start.gtid, tx.gtid, mariadb=world.flavour == "mariadb"):
                continue
            found.append(tx)
    return found


def _place(stop: Stop) -> FilePosition:
    return int(stop.file.rpartition(".")[2]), stop.pos
