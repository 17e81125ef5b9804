from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop
from backupd.model.errors import BackupdError, NotFoundError, RefusedError
from backupd.model.server_facts import Position
from backupd.model.table import TableName
from restore.planning.plan import Plan, Rate
from restore.planning.table_plan import Candidate, Impossible, Source, TablePlan, choose, goals, no_table

ORDERS = TableName("shop", "orders")
MIB = 1 << 20
STOP = Stop("b1", "binlog.000002", 400, "0-1-9", datetime(2026, 11, 21, tzinfo=UTC))


def base(backup: str, *, replayed: int | None = None, until: Stop | None = STOP, rto: float | None = None) -> Plan:
    replay = None if replayed is None else ReplaySpec((), ReplayMethod.APPLIER, "", replayed, 100, (1,))
    if replay is not None:
        replay = replace(replay, legs=(_leg(replayed or 0),))
    return Plan(
        server="s",
        target="latest",
        chain=(backup,),
        destinations=("local",),
        position=Position(),
        reason="",
        bytes_stored=5 << 30,
        bytes_source=9 << 30,
        steps=(),
        replay=replay,
        until=until,
        rto=rto,
    )


def _leg(size: int) -> ReplayLeg:
    return ReplayLeg((), Position(), STOP, size, 100)


def candidate(way: Source, plan: Plan, *, stored: int, rows: int = 100 * MIB) -> Candidate:
    return Candidate(way, plan, (ORDERS,), stored, stored * 2, rows)


def chosen(
    *ways: Candidate, impossible: tuple[Impossible, ...] = (), rates: dict[str, Rate] | None = None
) -> TablePlan:
    return choose(ways, impossible, goals([ORDERS], None), rates or {})


def test_the_quicker_way_is_taken_and_the_other_is_told_with_bytes_and_time() -> None:
    logical = candidate(Source.LOGICAL, base("B1"), stored=40 * MIB)
    physical = candidate(Source.PHYSICAL, base("B2", replayed=MIB), stored=200 * MIB)
    plan = chosen(physical, logical)
    assert plan.chosen is logical
    assert [step.name for step in plan.steps] == ["fetched", "loaded", "handed_over"]
    (other,) = plan.others
    assert "B2 and the binary logs" in other
    assert "200" in other
    assert "longer than" in other


def test_a_long_replay_makes_the_physical_backup_the_quicker_one() -> None:
    logical = candidate(Source.LOGICAL, base("B1", replayed=20 << 30), stored=40 * MIB)
    physical = candidate(Source.PHYSICAL, base("B2", replayed=MIB), stored=200 * MIB)
    plan = chosen(physical, logical)
    assert plan.chosen is physical
    assert [step.name for step in plan.steps] == [
        "fetched",
        "prepared",
        "started",
        "rolled_forward",
        "extracted",
        "loaded",
        "handed_over",
    ]


def test_without_binary_logs_the_newer_backup_is_taken_however_long_it_takes() -> None:
    logical = candidate(Source.LOGICAL, base("B1", until=None), stored=1)
    physical = candidate(Source.PHYSICAL, base("B2", until=None), stored=900 * MIB)
    plan = chosen(logical, physical)
    assert plan.chosen is physical
    assert "ends before the target" in plan.others[0]


def test_a_way_that_is_closed_is_told_beside_the_one_that_is_taken() -> None:
    plan = chosen(
        candidate(Source.LOGICAL, base("B1"), stored=1),
        impossible=(Impossible(Source.PHYSICAL, RefusedError("there is a gap")),),
    )
    assert plan.others == ("not physical: there is a gap",)
    assert "the only possible source" in plan.reason


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([NotFoundError("no backup"), NotFoundError("no dump")], NotFoundError),
        ([NotFoundError("no backup"), RefusedError("a gap", hint="choose before")], RefusedError),
    ],
)
def test_when_all_ways_are_closed_every_reason_is_told(errors: list[BackupdError], kind: type[BackupdError]) -> None:
    with pytest.raises(kind) as refused:
        choose([], [Impossible(Source.PHYSICAL, errors[0]), Impossible(Source.LOGICAL, errors[1])], [], {})
    for error in errors:
        assert error.message in refused.value.detail


def test_a_mistyped_table_is_told_as_one_whatever_else_is_wrong() -> None:
    wrong = no_table("shop.ordes", [TableName("shop", "lines"), ORDERS], "B2")
    none = NotFoundError("server s has no restorable backup", hint="take one: backupd backup s --kind full")
    for order in (
        [Impossible(Source.LOGICAL, none), Impossible(Source.PHYSICAL, wrong)],
        [Impossible(Source.LOGICAL, wrong), Impossible(Source.PHYSICAL, none)],
    ):
        with pytest.raises(NotFoundError) as told:
            choose([], order, [], {})
        assert (told.value.message, told.value.hint) == (
            "no table fits shop.ordes in backup B2",
            "did you mean shop.orders? Names are case-sensitive",
        )
    assert no_table("other.thing", [ORDERS], "B2").hint == (
        "names are case-sensitive: schema.table, with * for any text; if it was made after this backup, restore from a "
        "later one (backupd backups), or the whole server"
    )


def test_measured_rates_and_the_objective_count() -> None:
    logical = candidate(Source.LOGICAL, base("B1", rto=30.0), stored=40 * MIB)
    plan = chosen(logical, rates={"loaded": Rate(1e6, samples=2)})
    loaded = next(step for step in plan.steps if step.name == "loaded")
    assert loaded.seconds > 100
    assert "measured" in loaded.estimate
    assert any("by measured and assumed rates" in warning for warning in plan.warnings)
    (assumed,) = [one for one in chosen(logical, rates={"loaded": Rate(1e6)}).warnings if "rates" in one]
    assert "by assumed rates" in assumed
    rates = {step.name: Rate(1e6, samples=2) for step in plan.steps}
    assert any("by measured rates" in warning for warning in chosen(logical, rates=rates).warnings)
    document = plan.as_json()
    assert document["rto"] == {"objective": 30.0, "kept": False}
    assert document["bytes"] == 40 * MIB
    assert document["tables"] == [{"source": "shop.orders", "target": "shop.orders"}]
    assert document["way"] == "logical"
