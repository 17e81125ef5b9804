"""Targets that are times, where the server's clock was set back before a backup was taken."""

from __future__ import annotations

from datetime import timedelta

import pytest

from backupd.model.errors import NotFoundError, RefusedError
from restore.planner import Preferences, make_plan
from restore.target import parse_target
from tests.recovery.world import World
from tests.restore.archive import history_of, replayed
from tests.support.dice import rounds, thrown


@pytest.mark.campaign
def test_a_time_means_the_same_from_whatever_backup_it_is_reached_or_the_plan_says_so() -> None:
    dice = thrown("overtaken")
    before = 0
    for _ in range(rounds(80)):
        world = World(dice, flavour="mariadb", clocks=True, forks=False, lossy=0.0, steps=dice.randint(10, 45))
        backups = [one for one, _life, _count in world.backups]
        for record, _life, _count in world.backups:
            moment = record.finished_at + timedelta(seconds=dice.randint(0, 60))
            try:
                plan = make_plan("shop", backups, parse_target(moment.isoformat()), Preferences(), now=world.now,
                                 history=history_of(world))
            except (NotFoundError, RefusedError):
                continue
            log = world.lives[0].log
            first = next((number for number, tx in enumerate(log) if tx.at > moment), len(log))
            held = [count for one, _life, count in world.backups if one.finished_at <= moment]
            if plan.until is None or first == len(log) or first >= max(held):
                continue
            if any("stops before them" in text for text in plan.warnings):
                assert replayed(world, plan) == [tx.uid for tx in log[:first]], plan
                before += 1
                behind = max((entry for entry in world.backups if entry[0].finished_at <= moment),
                             key=lambda entry: entry[2])[0]
                alone = make_plan("shop", backups, parse_target(moment.isoformat()), Preferences(base=behind.id),
                                  now=world.now, history=history_of(world))
                assert any(text.startswith("not certain: before backup") for text in alone.warnings), alone
            else:
                assert any(text.startswith("not certain: before backup") for text in plan.warnings), plan
                assert min(held) > first, plan
    assert before
