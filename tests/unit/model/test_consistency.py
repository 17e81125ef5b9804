"""What several checks of a replica show together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from backupd.model.consistency import (
    NOBODY,
    ComparedServer,
    Consistency,
    ConsistencyCheck,
    ConsistencyVerdict,
    consistency_of,
)

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
WEEK = timedelta(days=7)


def check(
    days: float, equal: str = "", different: Mapping[str, str] | None = None, unchecked: Mapping[str, str] | None = None
) -> ConsistencyCheck:
    ended = NOW - timedelta(days=days)
    return ConsistencyCheck(
        id=f"check-{days}",
        server="shop",
        replica="db2",
        source="db1",
        tool="pt-table-checksum",
        started_at=ended - timedelta(minutes=5),
        finished_at=ended,
        equal=tuple(equal.split()),
        different=different or {},
        unchecked=unchecked or {},
    )


def state(*checks: ConsistencyCheck) -> Consistency:
    return consistency_of("db2", checks, WEEK, NOW)


def test_clean_is_every_table_of_the_newest_list_equal_and_in_time() -> None:
    assert state(check(1, "a b")).verdict is ConsistencyVerdict.CLEAN
    assert state(check(1, "a", unchecked={"b": "no time"}), check(6, "a b")).verdict is ConsistencyVerdict.CLEAN
    assert state(check(8, "a b")).verdict is ConsistencyVerdict.UNCHECKED


def test_less_is_unchecked_with_the_tables_that_are_missing() -> None:
    found = state(check(1, "a", unchecked={"größe": "left out"}))
    assert (found.verdict, found.unchecked) == (ConsistencyVerdict.UNCHECKED, {"größe": "left out"})
    assert "größe" in found.why
    late = state(check(1, "a", unchecked={"b": "no time"}), check(8, "a b"))
    assert late.verdict is ConsistencyVerdict.UNCHECKED
    assert list(late.unchecked) == ["b"]
    assert state().verdict is ConsistencyVerdict.UNCHECKED
    assert state(check(1)).verdict is ConsistencyVerdict.UNCHECKED, "nothing was compared"


def test_a_difference_lasts_until_a_later_check_finds_the_table_equal() -> None:
    differs = check(20, "a", different={"b": "1 of 2 chunks differ"})
    assert state(differs).verdict is ConsistencyVerdict.DIFFERENT
    skipped = check(1, "a", unchecked={"b": "left out"})
    assert state(skipped, differs).different == {"b": "1 of 2 chunks differ"}
    assert state(check(1, "a b"), differs).verdict is ConsistencyVerdict.CLEAN
    assert state(check(1, "a"), differs).verdict is ConsistencyVerdict.CLEAN, "the table is gone"


def test_nothing_is_clean_as_long_as_the_last_try_compared_nothing() -> None:
    failed = replace(check(0.5), trouble="it cannot be asked", tool="")
    found = state(failed, check(1, "a b"))
    assert found.verdict is ConsistencyVerdict.UNCHECKED
    assert "it cannot be asked" in found.why
    assert state(failed).verdict is ConsistencyVerdict.UNCHECKED
    assert state(failed, check(1, "a", different={"b": "differs"})).different == {"b": "differs"}
    assert state(check(0.2, "a b"), failed).verdict is ConsistencyVerdict.CLEAN


def test_what_was_equal_counts_for_the_server_that_was_compared_only() -> None:
    compared = replace(check(1, "a", different={"b": "differs"}), replica_uuid="u1", replica_made="2026-11-01")
    for present, verdicts in (
        (NOBODY, []),
        (ComparedServer("u1"), []),
        (ComparedServer("u1", "2026-11-01"), []),
        (ComparedServer("u2"), ["a"]),
        (ComparedServer("u1", "2026-11-02"), ["a"]),
    ):
        found = consistency_of("db2", [compared], WEEK, NOW, present=present)
        assert list(found.unchecked) == verdicts
        assert list(found.different) == ["b"], "what differed does until a check finds it equal"
