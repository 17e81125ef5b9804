"""What a plan says of the binary logs that it replays."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from backupd.engine.binlogchanges import STATEMENTS, TEMPORARY
from backupd.model.binlog import Stop
from backupd.model.clock import format_time
from backupd.model.errors import RefusedError
from backupd.recovery.route import RouteLeg
from backupd.recovery.timeline import timeline
from restore.history import History, Material
from restore.planner import Preferences, make_plan
from restore.target import parse_target
from tests.recovery.world import World
from tests.restore.archive import WorldResolver, history_of
from tests.support.dice import thrown


class Written(WorldResolver):
    """All segments but one hold statements."""

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        found = super().material(leg, stop)
        return replace(found, remarks=(STATEMENTS, TEMPORARY), by_statements=len(found.segments) - 1)


def test_data_that_was_changed_by_statements_is_never_replayed_without_one_warning_of_it() -> None:
    dice = thrown("statements")
    while True:
        world = World(dice, flavour="mariadb", clocks=False, forks=False, lossy=0.0, steps=60)
        known = history_of(world)
        for record, _life, _count in world.backups[:1]:
            history = History(known.branches, known.runs, known.gaps, Written(world))
            plan = make_plan("shop", [record], parse_target("latest"), Preferences(), now=world.now, history=history)
            total = sum(len(leg.segments) for leg in plan.replay.legs) if plan.replay else 0
            if total > 1:
                (warning,) = [text for text in plan.warnings if "statements, not rows" in text]
                assert warning.startswith(f"{total - 1} of the {total} ")
                assert "UUID()" in warning
                assert TEMPORARY not in plan.warnings, "the statements themselves are looked at"
                return


def test_a_window_over_data_that_was_changed_by_statements_says_so() -> None:
    dice = thrown("conditions")
    world = World(dice, flavour="mariadb", clocks=False, forks=False, lossy=0.0, steps=60)
    runs = [replace(run, remarks=(STATEMENTS,)) for run in world.runs()]
    found = timeline("shop", [one for one, _life, _count in world.backups], [life.branch for life in world.lives], runs,
                     now=world.now)
    wide = [window for window in found.windows if window.run is not None]
    assert all(window.conditions == (STATEMENTS,) for window in wide)
    assert all(STATEMENTS in one["conditions"] for one in found.as_json()["windows"] if one["from"] != one["to"])


def test_a_server_that_no_log_is_replayed_onto_gets_the_newest_backup_and_every_other_moment_is_refused() -> None:
    world = World(thrown("unrolled"), flavour="mysql", clocks=False, forks=False, lossy=0.0, steps=60)
    backups = [replace(one, server_version="5.6.24") for one, _life, _count in world.backups]
    newest = max(backups, key=lambda one: one.finished_at)
    history = replace(history_of(world), resolver=WorldResolver(world))
    plan = make_plan("shop", backups, parse_target("latest"), Preferences(), now=world.now, history=history)
    assert (plan.backup_id, plan.replay) == (newest.id, None)
    assert any("5.7.6 and later only, and this server is 5.6.24" in text for text in plan.warnings)
    targets = [format_time(newest.finished_at + timedelta(microseconds=1)), f"{newest.position.file}:999999999"]
    for target in targets:
        with pytest.raises(RefusedError, match=r"not recoverable: binary logs are replayed onto mysql 5\.7\.6") as no:
            make_plan("shop", backups, parse_target(target), Preferences(), now=world.now, history=history)
        assert f"--to backup:{newest.id}" in no.value.hint
    exact = make_plan("shop", backups, parse_target(f"{newest.position.file}:{newest.position.pos}"), Preferences(),
                      now=world.now, history=history)
    assert (exact.backup_id, exact.replay) == (newest.id, None)
