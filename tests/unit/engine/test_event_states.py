"""What statements do to scheduled events."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from backupd.engine.binlog.walk import Statement
from backupd.engine.event_states import Event, EventState, after, read_events, settle
from backupd.engine.sql.client import Connection
from tests.support.restores.rolling import Kind, both
from tests.support.servers.mariadb import PrivateServer

ON, OFF, ELSEWHERE = EventState.ENABLED, EventState.DISABLED, EventState.ELSEWHERE


@pytest.mark.parametrize(
    ("statements", "left"),
    [
        (["CREATE EVENT e ON SCHEDULE EVERY 1 DAY DO SELECT 1"], {("d", "e"): ON}),
        (
            ["CREATE DEFINER=`r``x`@`%` EVENT IF NOT EXISTS `x`.`e f` ON SCHEDULE AT NOW() DISABLE DO SELECT 'ENABLE'"],
            {("x", "e f"): OFF},
        ),
        (
            ["create /* ENABLE */ event e on schedule every 1 day disable on slave comment 'enable' do select 1"],
            {("d", "e"): ELSEWHERE},
        ),
        (["ALTER EVENT old ENABLE"], {("d", "old"): ON}),
        (["ALTER EVENT old COMMENT 'ENABLE'"], {("d", "old"): OFF}),
        (["ALTER EVENT old RENAME TO x.New"], {("x", "new"): OFF}),
        (["CREATE EVENT IF NOT EXISTS old ON SCHEDULE EVERY 1 DAY DO SELECT 1"], {}),
        (["CREATE OR REPLACE EVENT old ON SCHEDULE EVERY 1 DAY DO SELECT 1"], {("d", "old"): ON}),
        (["ALTER EVENT old ENABLE", "DROP EVENT IF EXISTS d.old"], {}),
        (["CREATE EVENT x.e ON SCHEDULE EVERY 1 DAY DO SELECT 1", "DROP DATABASE IF EXISTS `x`"], {}),
        (["-- off\nALTER EVENT old ENABLE"], {("d", "old"): ON}),
        (["--\n# x\nALTER EVENT old ENABLE"], {("d", "old"): ON}),
        (["/*!50100 ALTER EVENT old ENABLE */"], {("d", "old"): ON}),
        (["/*M!100100 ALTER EVENT old ENABLE */"], {("d", "old"): ON}),
        (["SET STATEMENT sql_mode='FOR' FOR ALTER EVENT old ENABLE"], {("d", "old"): ON}),
        (["CREATE DEFINER=root@localhost TRIGGER t BEFORE INSERT ON event FOR EACH ROW SET @event = 1"], {}),
    ],
)
def test_the_state_of_an_event_is_what_its_statements_said(
    statements: list[str], left: dict[tuple[str, str], EventState]
) -> None:
    before = {("d", "old"): Event("d", "old", OFF, 1)}
    found = after(before, [Statement("d", text, 1, own=True) for text in statements], folds=False)
    assert {key: event.state for key, event in found.items()} == left


def test_an_event_that_reached_the_source_through_replication_was_disabled_there_too() -> None:
    text = "CREATE EVENT e ON SCHEDULE EVERY 1 DAY DO SELECT 1"
    assert after({}, [Statement("d", text, 2, own=False)], folds=False)["d", "e"].state is ELSEWHERE


@pytest.mark.parametrize(
    ("folds", "left"), [(False, {("Case", "e"): OFF, ("case", "e"): ON}), (True, {("case", "e"): ON})]
)
def test_schemas_that_differ_by_case_alone_are_two_where_the_server_has_two(
    folds: bool, left: dict[tuple[str, str], EventState]
) -> None:
    texts = [
        "CREATE EVENT Case.E ON SCHEDULE EVERY 1 DAY DISABLE DO SELECT 1",
        "CREATE OR REPLACE EVENT case.e ON SCHEDULE EVERY 1 DAY DO SELECT 1",
        "DROP DATABASE CASE",
    ]
    found = after({}, [Statement("d", text, 1, own=True) for text in texts[: 2 + (not folds)]], folds=folds)
    assert {key: event.state for key, event in found.items()} == left


def test_each_of_two_events_whose_schemas_differ_by_case_gets_its_own_state() -> None:
    with PrivateServer() as server:
        server.execute(
            "CREATE DATABASE Shop",
            "CREATE DATABASE shop",
            *(
                f"CREATE EVENT {schema}.e ON SCHEDULE EVERY 1 DAY DISABLE ON SLAVE DO SELECT 1"
                for schema in ("Shop", "shop")
            ),
        )
        with Connection(socket=str(server.socket), user="root").connect() as session:
            wanted = {(schema, "e"): Event(schema, "e", state, 7) for schema, state in (("Shop", ON), ("shop", OFF))}
            assert settle(session, {}, wanted, ran_until=None).warnings == ()
            assert {key: event.state for key, event in read_events(session).items()} == {
                ("Shop", "e"): ON,
                ("shop", "e"): OFF,
            }


@both()
def test_no_event_stays_disabled_by_the_applier_and_none_runs_a_second_time_without_a_word(kind: Kind) -> None:
    with kind.make() as server:
        server.execute(
            "CREATE DATABASE d",
            *(
                f"CREATE EVENT d.{name} ON SCHEDULE EVERY 1 DAY DISABLE ON SLAVE DO SELECT 1"
                for name in ("was_on", "was_elsewhere", "is_new", "is_told")
            ),
            "SET SESSION time_zone = '+05:00'",
            "SET SESSION timestamp = UNIX_TIMESTAMP() - 90",
            *(
                f"CREATE EVENT d.{name} ON SCHEDULE AT CURRENT_TIMESTAMP + INTERVAL {seconds} SECOND "
                "ON COMPLETION PRESERVE DO SELECT 1"
                for name, seconds in (("has_run", 20), ("comes", 9000))
            ),
        )
        now = datetime.now(UTC)
        before = {
            ("d", name): Event("d", name, state, 7) for name, state in (("was_on", ON), ("was_elsewhere", ELSEWHERE))
        }
        with Connection(socket=str(server.socket), user="root").connect() as session:
            settled = settle(session, before, {("d", "is_told"): Event("d", "is_told", ON, 7)}, ran_until=now)
            states = {name: event.state for (_schema, name), event in read_events(session).items()}
    assert states == {
        "was_on": ON,
        "was_elsewhere": ELSEWHERE,
        "is_new": ELSEWHERE,
        "is_told": ON,
        "has_run": OFF,
        "comes": ON,
    }
    assert set(settled.changed) == {"d.was_on: enabled", "d.is_told: enabled", "d.has_run: disabled"}
    unsure, lost, ran = settled.warnings
    assert ("d.was_on: enabled" in unsure, "d.is_new" in lost, "d.has_run" in ran) == (True, True, True)
    assert "comes" not in ran
