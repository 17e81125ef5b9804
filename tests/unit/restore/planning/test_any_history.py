"""Plans and timelines over random lives of servers, held against every single transaction."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from backupd.model.errors import NotFoundError, RefusedError
from backupd.recovery.timeline import Timeline, timeline
from restore.planning.plan import Plan
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import parse_target
from tests.support.catalog.world import DESTINATIONS, Tx, World
from tests.support.dice import rounds, thrown
from tests.support.restores.archive import history_of, replayed

FLAVOURS = ("mariadb", "mysql", "plain")


def worlds(
    name: str, few: int, *, clocks: bool = False, forks: bool = True, lossy: float = 0.08, nodes: bool = False
) -> list[World]:
    dice = thrown(name)
    return [
        World(
            dice,
            nodes=nodes,
            flavour="mariadb" if nodes else dice.choice(FLAVOURS),
            clocks=clocks,
            forks=forks,
            lossy=dice.choice((0.0, lossy)),
            steps=dice.randint(5, 45),
        )
        for _ in range(rounds(few))
    ]


def planned(world: World, target: str) -> Plan | None:
    try:
        return make_plan(
            "shop",
            [b for b, _life, _count in world.backups],
            parse_target(target),
            Preferences(accept_older=True),
            now=world.now,
            history=history_of(world),
        )
    except (RefusedError, NotFoundError):
        return None


def line_of(world: World) -> Timeline:
    return timeline(
        "shop",
        [b for b, _life, _count in world.backups],
        [life.branch for life in world.lives],
        world.runs(),
        world.gaps,
        now=world.now,
    )


def by_the_clock(world: World, plan: Plan, moment: datetime) -> list[int]:
    """Everything, in the order of the log from the backup on, before the first that committed later."""
    _base, life, count = next(entry for entry in world.backups if entry[0].id == plan.backup_id)
    branch = plan.until.branch if plan.until else world.lives[life].branch.id
    log: list[Tx] = world.life_of(branch).log
    until = next((number for number in range(count, len(log)) if log[number].at > moment), len(log))
    return [tx.uid for tx in log[: max(until, count)]]


def truth(world: World, plan: Plan) -> list[int]:
    assert plan.until is not None
    number = int(plan.until.file.rpartition(".")[2])
    return [tx.uid for tx in world.log_at(plan.until.branch, number, plan.until.pos)]


def targets(world: World) -> list[str]:
    """Of every kind, on every branch, with and without its name."""
    found = ["latest"]
    for life in world.lives:
        found.append(f"latest@{life.branch.id}")
        for file in life.files:
            for start, _end, tx in file.txs:
                place = f"{life.branch.file(file.number)}:{start}"
                found += [place, f"{place}@{life.branch.id}"]
                if tx.gtid:
                    found += [f"gtid:{tx.gtid}", f"before-gtid:{tx.gtid}@{life.branch.id}"]
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("clocks", [False, True])
def test_a_plan_restores_exactly_the_state_that_it_names(clocks: bool) -> None:
    reached = 0
    for world in worlds(f"plans-{clocks}", 60, clocks=clocks):
        if not world.backups:
            continue
        wanted = targets(world)
        for target in world.dice.sample(wanted, min(12, len(wanted))):
            plan = planned(world, target)
            if plan is not None and plan.until is not None:
                assert replayed(world, plan) == truth(world, plan), (target, plan)
                reached += 1
    assert reached > 50


@pytest.mark.campaign
def test_a_plan_for_a_time_holds_everything_up_to_it_and_nothing_later() -> None:
    reached = 0
    for world in worlds("times", 60):
        for _ in range(12 if world.backups else 0):
            moment = world.backups[0][0].finished_at + timedelta(
                seconds=world.dice.randint(0, int((world.now - world.backups[0][0].finished_at).total_seconds()))
            )
            plan = planned(world, moment.isoformat())
            if plan is not None:
                assert replayed(world, plan) == by_the_clock(world, plan, moment), (moment, plan)
                reached += 1
    assert reached > 50


@pytest.mark.campaign
@pytest.mark.parametrize("seed", ["", "79925603", "2201252238"])
def test_every_moment_of_a_window_can_be_planned_and_no_other_after_its_end(
    seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds are of lives in which a server lost a whole file: the one before it ends at the fork, though no segment
    says that it ends there; and on a server that had taken over, what was lost has the names of what came instead."""
    if seed:
        monkeypatch.setenv("BACKUPD_SEED", seed)
    tried = 0
    for world in worlds("windows", 60):
        for window in line_of(world).windows:
            span = int((window.end - window.begin) / timedelta(microseconds=1))
            moments = [window.begin, window.end, window.begin + timedelta(microseconds=world.dice.randint(0, span))]
            suffix = f"@{window.branch}" if window.branch and window.run else ""
            for moment in moments:
                plan = planned(world, f"{moment.isoformat()}{suffix}")
                assert plan is not None, (window, moment)
                assert replayed(world, plan) == by_the_clock(world, plan, moment), (window, moment, plan)
                tried += 1
    assert tried > 100


@pytest.mark.campaign
def test_without_losses_and_forks_every_confirmed_moment_after_the_first_backup_is_in_a_window() -> None:
    for world in worlds("complete", 30, forks=False, lossy=0.0):
        known = [run.confirmed_at for run in world.runs() if run.confirmed_at is not None]
        usable = [b for b, _life, _count in world.backups if b.started_at >= world.lives[0].branch.noticed_at]
        if not known or not usable:
            continue
        found = line_of(world)
        first, last = usable[0].finished_at, max(known)
        for moment in (first, last, first + (last - first) / 2):
            if first <= moment <= last:
                assert any(window.holds(moment) for window in found.windows), (moment, found)


@pytest.mark.campaign
def test_the_timeline_of_all_destinations_reaches_as_far_as_that_of_each_alone() -> None:
    for world in worlds("destinations", 30):
        found = line_of(world)
        for reach in found.destinations:
            assert reach.name in DESTINATIONS
            if reach.latest is not None:
                assert found.latest is not None
                assert reach.behind is not None
                assert any(window.begin <= reach.latest <= window.end for window in found.windows), reach


def test_a_transaction_that_is_archived_on_another_branch_is_never_said_to_be_nowhere() -> None:
    for world in worlds("nowhere", 60):
        if not world.backups or not world.lives:
            continue
        history = history_of(world)
        for life in world.lives[:-1]:
            for tx in (tx for file in life.files for _start, _end, tx in file.txs if tx.gtid):
                if history.resolver.stop_for_gtid(life.branch.id, tx.gtid, before=False) is None:
                    continue
                try:
                    make_plan(
                        "shop",
                        [b for b, _life, _count in world.backups],
                        parse_target(f"gtid:{tx.gtid}"),
                        Preferences(),
                        now=world.now,
                        history=history,
                    )
                except RefusedError:
                    continue
                except NotFoundError as error:
                    raise AssertionError(f"{tx.gtid} is on branch {life.branch.id}: {error}") from error


@pytest.mark.campaign
def test_a_replay_crosses_to_another_node_at_the_transaction_that_both_have() -> None:
    """With wsrep_gtid_mode=OFF the GTIDs of one node mean other transactions on another."""
    crossed = 0
    for world in worlds("nodes", 60, nodes=True):
        if not world.backups:
            continue
        wanted = targets(world)
        for target in world.dice.sample(wanted, min(12, len(wanted))):
            plan = planned(world, target)
            if plan is not None and plan.until is not None:
                assert replayed(world, plan) == truth(world, plan), (target, plan)
                crossed += plan.replay is not None and len(plan.replay.legs) > 1
        for _ in range(6):
            span = int((world.now - world.backups[0][0].finished_at).total_seconds())
            moment = world.backups[0][0].finished_at + timedelta(seconds=world.dice.randint(0, span))
            plan = planned(world, moment.isoformat())
            if plan is not None:
                assert replayed(world, plan) == by_the_clock(world, plan, moment), (moment, plan)
        for window in line_of(world).windows:
            suffix = f"@{window.branch}" if window.branch and window.run else ""
            for moment in (window.begin, window.end):
                plan = planned(world, f"{moment.isoformat()}{suffix}")
                assert plan is not None, (window, moment)
                assert replayed(world, plan) == by_the_clock(world, plan, moment), (window, moment, plan)
    assert crossed > 5
