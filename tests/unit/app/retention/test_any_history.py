"""What must hold for every history, however many backups failed, rotted or lost their parents."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.app.retention.decisions import problems, solve
from backupd.app.retention.rules import BinlogRun, Decisions, Stored, View
from backupd.model.backup_record import BackupKind
from policies.policy import Keep
from tests.support.catalog.histories import NOW, applied, kept, stored

COUNTS = ("keep_fulls", "hourly", "daily", "weekly", "monthly", "yearly")
some = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def solved(view: View, keep: Keep | None) -> Decisions:
    return solve(view, keep, now=NOW, zone=UTC)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Runs of days in which some fail (no row at all), some copies rot, some parents are gone, some are pinned or
    proved; a few end in the future."""
    backups: list[Stored] = []
    at = NOW - timedelta(days=draw(st.integers(0, 60)))
    last: str | None = None
    for number in range(draw(st.integers(0, 25))):
        at += timedelta(hours=draw(st.sampled_from([1, 6, 24, 24, 30, 24 * 9])))
        fate = draw(st.sampled_from(["full", "increment", "increment", "increment", "failed", "logical"]))
        if fate == "failed":
            continue
        name = f"{number:03}"
        parent = None
        if fate == "increment":
            parent = draw(st.sampled_from([last, last, last, "gone", *(b.id for b in backups[-4:])])) or "gone"
        mark = draw(st.sampled_from(["", "", "", "", "damaged", "marked", "pinned", "proved"]))
        kind = BackupKind.LOGICAL if fate == "logical" else None
        more: dict[str, Any] = {}
        if fate == "logical":
            more = {"table_set": draw(st.sampled_from(["", "", "money"])), "missing": draw(st.sampled_from([0, 0, 1]))}
        backups.append(
            stored(
                name,
                at,
                parent=parent,
                kind=kind,
                **more,
                usable=mark != "damaged",
                marked=mark == "marked",
                pinned=mark == "pinned",
                proved_at=at if mark == "proved" else None,
            )
        )
        if fate != "logical":
            last = name
    runs = tuple(
        BinlogRun(f"r{number}", NOW - timedelta(hours=start), NOW - timedelta(hours=max(start - length, 0)))
        for number, (start, length) in enumerate(
            draw(st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 400)), max_size=4))
        )
    )
    ids = [backup.id for backup in backups]
    read = frozenset(draw(st.lists(st.sampled_from(ids), max_size=2))) if ids else frozenset[str]()
    return View("shop", "local", tuple(backups), runs, being_read=read)


@st.composite
def keeps(draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = {name: draw(st.integers(1, 6)) for name in COUNTS if draw(st.booleans())}
    if draw(st.booleans()) or not values:
        values["recovery_window"] = f"{draw(st.integers(1, 40))}d"
    return values


def whole(view: View) -> list[Stored]:
    """Restorable, told by walking up each chain afresh; oldest first."""
    by_id = {backup.id: backup for backup in view.backups}

    def fine(backup: Stored | None) -> bool:
        return (
            backup is not None
            and backup.usable
            and not backup.marked
            and (backup.parent is None or fine(by_id.get(backup.parent)))
        )

    return sorted((b for b in view.backups if fine(b) and b.finished_at <= NOW), key=lambda b: (b.finished_at, b.id))


@some
@given(views(), keeps())
def test_no_increment_is_kept_without_what_it_builds_on(view: View, keep: dict[str, Any]) -> None:
    decisions = solved(view, Keep.model_validate(keep))
    here, stays = {b.id for b in view.backups}, kept(decisions)
    for decision in decisions.kept:
        parent = decision.backup.parent
        assert parent is None or parent in stays or parent not in here


@some
@given(views(), keeps())
def test_the_newest_restorable_and_the_newest_proved_chain_are_always_kept(view: View, keep: dict[str, Any]) -> None:
    stays = kept(solved(view, Keep.model_validate(keep)))
    for leg in {(backup.kind is BackupKind.LOGICAL, backup.table_set) for backup in view.backups}:
        ours = [backup for backup in whole(view) if (backup.kind is BackupKind.LOGICAL, backup.table_set) == leg]
        assert {backup.id for backup in ours[-1:]} <= stays
        assert {backup.id for backup in [b for b in ours if not b.missing][-1:]} <= stays
        assert {backup.id for backup in [b for b in ours if b.proved_at][-1:]} <= stays


@some
@given(views(), keeps())
def test_pinned_backups_those_being_read_and_those_of_the_future_are_kept(view: View, keep: dict[str, Any]) -> None:
    stays = kept(solved(view, Keep.model_validate(keep)))
    assert {b.id for b in view.backups if b.pinned} <= stays
    assert view.being_read <= stays
    assert {b.id for b in view.backups if b.finished_at > NOW and not b.marked} <= stays


@some
@given(views(), keeps())
def test_what_is_promised_has_its_base_and_its_binary_logs(view: View, keep: dict[str, Any]) -> None:
    decisions = solved(view, Keep.model_validate(keep))
    good = {b.id: b for b in whole(view)}
    logs = [item.run for item in decisions.runs if item.keep]
    for span in decisions.recoverable:
        base = good[span.base]
        assert base.id in kept(decisions)
        assert base.finished_at <= span.since <= span.until <= NOW
        reached = base.finished_at
        while reached < span.until:
            further = max((r.last_at for r in logs if r.first_at <= reached), default=reached)
            assert further > reached, "a moment is promised that no kept log covers"
            reached = further


@some
@given(views(), st.integers(1, 40))
def test_a_window_loses_no_moment_that_could_be_restored_before(view: View, days: int) -> None:
    keep = Keep.model_validate({"recovery_window": f"{days}d"})
    before = solved(replace(view, hold="everything stays"), keep)
    after = solved(applied(view, solved(view, keep)), keep)
    assert [(s.since, s.until) for s in after.recoverable] == [(s.since, s.until) for s in before.recoverable]


@some
@given(views(), keeps(), keeps())
def test_a_further_rule_never_takes_anything_away(view: View, keep: dict[str, Any], more: dict[str, Any]) -> None:
    fewer = solved(view, Keep.model_validate(keep))
    both = solved(view, Keep.model_validate({**more, **keep}))
    assert kept(fewer) <= kept(both)
    assert {item.run.name for item in fewer.runs if item.keep} <= {item.run.name for item in both.runs if item.keep}


@some
@given(views(), keeps())
def test_solving_again_after_applying_expires_nothing_more(view: View, keep: dict[str, Any]) -> None:
    rules = Keep.model_validate(keep)
    first = solved(view, rules)
    again = solved(applied(view, first), rules)
    assert again.expired == ()
    assert all(item.keep for item in again.runs)
    assert kept(again) == kept(first)


@some
@given(views(), keeps(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_is_irrelevant(view: View, keep: dict[str, Any], dice: Any) -> None:
    backups, runs = list(view.backups), list(view.runs)
    dice.shuffle(backups)
    dice.shuffle(runs)
    rules = Keep.model_validate(keep)
    shuffled = replace(view, backups=tuple(backups), runs=tuple(runs))
    assert solved(shuffled, rules).as_json() == solved(view, rules).as_json()


@some
@given(views(), keeps())
def test_every_decision_has_a_reason_and_a_hold_expires_nothing(view: View, keep: dict[str, Any]) -> None:
    rules = Keep.model_validate(keep)
    decisions = solved(view, rules)
    assert all(decision.reasons and all(decision.reasons) for decision in decisions.backups)
    assert solved(replace(view, hold="no"), rules).expired == ()
    assert {d.backup.id for d in decisions.expired} <= {*solved(replace(view, hold="no"), rules).stopped}


def test_backups_that_build_on_each_other_in_a_circle_are_problems_and_no_endless_loop() -> None:
    circle = [
        stored("a", NOW - timedelta(days=3), parent="b"),
        stored("b", NOW - timedelta(days=2), parent="a"),
        stored("c", NOW - timedelta(days=1), parent="c"),
        stored("good", NOW - timedelta(hours=1)),
    ]
    assert all(problems({b.id: b for b in circle})[name] for name in "abc")
    assert kept(solved(View("shop", "local", tuple(circle)), Keep.model_validate({"daily": 9}))) == {"good"}
