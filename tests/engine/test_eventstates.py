"""What statements do to scheduled events."""

from __future__ import annotations

import pytest

from backupd.engine.eventstates import Event, EventState, after
from backupd.engine.logwalk import Statement

ON, OFF, ELSEWHERE = EventState.ENABLED, EventState.DISABLED, EventState.ELSEWHERE


@pytest.mark.parametrize(("statements", "left"), [
    (["CREATE EVENT e ON SCHEDULE EVERY 1 DAY DO SELECT 1"], {("d", "e"): ON}),
    (["CREATE DEFINER=`r``x`@`%` EVENT IF NOT EXISTS `x`.`e f` ON SCHEDULE AT NOW() DISABLE DO SELECT 'ENABLE'"],
     {("x", "e f"): OFF}),
    (["create /* ENABLE */ event e on schedule every 1 day disable on slave comment 'enable' do select 1"],
     {("d", "e"): ELSEWHERE}),
    (["ALTER EVENT old ENABLE"], {("d", "old"): ON}),
    (["ALTER EVENT old COMMENT 'ENABLE'"], {("d", "old"): OFF}),
    (["ALTER EVENT old RENAME TO x.New"], {("x", "new"): OFF}),
    (["CREATE EVENT IF NOT EXISTS old ON SCHEDULE EVERY 1 DAY DO SELECT 1"], {}),
    (["CREATE OR REPLACE EVENT old ON SCHEDULE EVERY 1 DAY DO SELECT 1"], {("d", "old"): ON}),
    (["ALTER EVENT old ENABLE", "DROP EVENT IF EXISTS d.old"], {}),
    (["CREATE EVENT x.e ON SCHEDULE EVERY 1 DAY DO SELECT 1", "DROP DATABASE IF EXISTS `x`"], {}),
    (["CREATE DEFINER=root@localhost TRIGGER t BEFORE INSERT ON event FOR EACH ROW SET @event = 1"], {}),
])
def test_the_state_of_an_event_is_what_its_statements_said(
    statements: list[str], left: dict[tuple[str, str], EventState]
) -> None:
    before = {("d", "old"): Event("d", "old", OFF, 1)}
    found = after(before, [Statement("d", text, 1, own=True) for text in statements])
    assert {key: event.state for key, event in found.items()} == left


def test_an_event_that_reached_the_source_through_replication_was_disabled_there_too() -> None:
    text = "CREATE EVENT e ON SCHEDULE EVERY 1 DAY DO SELECT 1"
    assert after({}, [Statement("d", text, 2, own=False)])["d", "e"].state is ELSEWHERE
