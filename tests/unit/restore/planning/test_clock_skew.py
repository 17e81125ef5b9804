"""Targets that are times, where the server's clock was set back before a backup was taken."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from backupd.model.errors import NotFoundError, RefusedError
from restore.planning.plan import Plan
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import parse_target
from tests.support.catalog.world import World
from tests.support.dice import rounds, thrown
from tests.support.restores.archive import history_of, replayed


def planned(world: World, moment: datetime, base: str | None = None) -> Plan | None:
    try:
        return make_plan(
            "shop",
            [one for one, _life, _count in world.backups],
            parse_target(moment.isoformat()),
            Preferences(base=base),
            now=world.now,
            history=history_of(world),
        )
    except (NotFoundError, RefusedError):
        return None


def is_doubtful(plan: Plan) -> bool:
    return any(text.startswith("not certain: before backup") for text in plan.warnings)


@pytest.mark.campaign
def test_a_time_means_the_same_from_whatever_backup_it_is_reached_or_the_plan_says_so() -> None:
    dice = thrown("overtaken")
    before = warned = 0
    for _ in range(rounds(80)):
        world = World(dice, flavour="mariadb", clocks=True, forks=False, lossy=0.0, steps=dice.randint(10, 45))
        log = world.lives[0].log
        for record, _life, _count in world.backups:
            moment = record.finished_at + timedelta(seconds=dice.randint(1, 60))
            first = next((number for number, tx in enumerate(log) if tx.at > moment), len(log))
            held = {count: one.id for one, _life, count in world.backups if one.finished_at <= moment}
            plan = planned(world, moment)
            if plan is None or plan.until is None or first >= max(held):
                continue
            if any("stops before them" in text for text in plan.warnings):
                assert replayed(world, plan) == [tx.uid for tx in log[:first]], plan
                before += 1
            else:
                assert is_doubtful(plan), plan
                assert min(held) > first, plan
            alone = planned(world, moment, held[max(held)])
            if alone is not None and alone.until is not None:
                assert is_doubtful(alone), alone
                warned += 1
    assert before
    assert warned
