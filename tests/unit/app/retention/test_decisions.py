"""Each rule, and each thing that keeps a backup whatever the rules say."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from backupd.app.retention.decisions import solve
from backupd.app.retention.rules import BinlogRun, Decisions, Stored, View
from backupd.model.backup_record import BackupKind
from policies.policy import Keep
from tests.support.catalog.histories import NOW, days_ago, grounds, kept, of, rules, stored, view


def solved(one: View, keep: Keep | None, *, now: datetime = NOW) -> Decisions:
    return solve(one, keep, now=now, zone=UTC)


def daily(count: int) -> list[Stored]:
    """d0 is the newest, of an hour ago."""
    return [stored(f"d{number}", days_ago(number) - timedelta(hours=1)) for number in range(count)]


def test_a_destination_without_rules_keeps_everything_and_says_so() -> None:
    decisions = solved(view(daily(9)), None)
    assert len(decisions.kept) == 9
    assert of(decisions, "d5").reasons == ("this destination has no rules, so it keeps everything",)


def test_backups_of_a_server_that_is_no_longer_configured_are_kept() -> None:
    decisions = solved(view(daily(3), unconfigured="server shop is no longer configured"), None)
    assert of(decisions, "d2").reasons == ("server shop is no longer configured",)


def test_the_newest_from_before_the_window_stays_and_older_ones_go() -> None:
    decisions = solved(view(daily(12)), rules(recovery_window="7d"))
    assert kept(decisions) == {f"d{number}" for number in range(8)}
    assert "first moments need it" in of(decisions, "d7").reasons[0]
    (reason,) = of(decisions, "d8").reasons
    assert reason == (
        "recovery_window 7d: it ended before the window, which begins at 2026-11-14T12:00:00Z, and d7 is "
        "the newest from before it"
    )


def test_the_last_backup_of_each_bucket_stays_and_buckets_without_backups_do_not_count() -> None:
    backups = [
        stored("a", days_ago(0.1)),
        stored("b", days_ago(0.2)),
        stored("c", days_ago(40)),
        stored("d", days_ago(80)),
        stored("e", days_ago(80.1)),
        stored("f", days_ago(120)),
    ]
    decisions = solved(view(backups), rules(daily=3))
    assert kept(decisions) == {"a", "c", "d"}
    assert of(decisions, "c").reasons == ("daily: the last one of 2026-10-12 (2 of 3)",)
    assert of(decisions, "b").reasons == ("daily 3: a is the last one of 2026-11-21",)
    assert "are all later than 2026-07-24" in of(decisions, "f").reasons[0]


def test_each_rule_that_keeps_a_backup_is_named_and_each_that_does_not_keep_an_expired_one() -> None:
    decisions = solved(view(daily(40)), rules(daily=2, weekly=3, monthly=2, keep_fulls=1))
    assert grounds(decisions, "d0") == ["keep_fulls", "daily", "weekly", "monthly", "newest"]
    assert [reason.partition(" ")[0] for reason in of(decisions, "d39").reasons] == [
        "keep_fulls",
        "daily",
        "weekly",
        "monthly",
    ]


def test_days_are_those_of_the_policys_zone() -> None:
    backups = [
        stored("late", datetime(2026, 11, 20, 22, 30, tzinfo=UTC)),
        stored("later", datetime(2026, 11, 20, 23, 30, tzinfo=UTC)),
    ]
    assert kept(solved(view(backups), rules(daily=5))) == {"later"}
    assert kept(solve(view(backups), rules(daily=5), now=NOW, zone=ZoneInfo("Europe/Berlin"))) == {"late", "later"}


def test_logical_dumps_do_not_push_physical_backups_out() -> None:
    backups = [
        stored("dump", days_ago(0.1), kind=BackupKind.LOGICAL),
        stored("full", days_ago(0.2)),
        stored("old-dump", days_ago(0.3), kind=BackupKind.LOGICAL),
    ]
    decisions = solved(view(backups), rules(daily=1, keep_fulls=1))
    assert kept(decisions) == {"dump", "full"}


def dump(name: str, days: float, table_set: str = "", missing: int = 0, **changes: Any) -> Stored:
    return stored(name, days_ago(days), kind=BackupKind.LOGICAL, table_set=table_set, missing=missing, **changes)


def test_dumps_of_one_set_do_not_push_those_of_another_out() -> None:
    backups = [dump(f"hourly-{number}", number / 24, "money") for number in range(1, 8)]
    backups += [dump("weekly", 6), dump("weekly-before", 13), dump("archive", 30, "archive")]
    decisions = solved(view(backups), rules(keep_fulls=1))
    assert kept(decisions) == {"hourly-1", "weekly", "archive"}
    assert of(decisions, "archive").grounds[0].text == "keep_fulls: full backup 1 of the newest 1"
    assert "newest restorable dump of the set archive here" in of(decisions, "archive").grounds[1].text
    assert "newest restorable dump here" in of(decisions, "weekly").grounds[1].text


def test_the_window_needs_a_dump_of_each_set_from_before_it() -> None:
    backups = [dump("m1", 1, "money"), dump("m2", 8, "money"), dump("m3", 9, "money"), dump("w1", 12), dump("w2", 19)]
    decisions = solved(view(backups), rules(recovery_window="7d"))
    assert kept(decisions) == {"m1", "m2", "w1"}
    assert "m2 is the newest from before it" in of(decisions, "m3").reasons[0]
    assert "w1 is the newest from before it" in of(decisions, "w2").reasons[0]


def test_a_dump_without_a_table_never_pushes_out_one_that_has_it() -> None:
    backups = [
        dump("p1", 1, missing=1),
        dump("p2", 2, missing=1),
        dump("p3", 3, missing=2),
        dump("whole", 4),
        dump("whole-before", 5),
    ]
    decisions = solved(view(backups), rules(keep_fulls=2))
    assert kept(decisions) == {"p1", "p2", "whole", "whole-before"}
    assert "newest restorable dump here with all its tables" in " ".join(
        ground.text for ground in of(decisions, "whole").grounds
    )
    assert kept(solved(view([*backups[:3], replace(backups[3], marked=True)]), rules(keep_fulls=2))) == {"p1", "p2"}


def test_a_physical_backup_that_lacks_tables_never_pushes_out_a_whole_one_nor_does_a_doubtful_one() -> None:
    backups = [
        stored("p1", days_ago(1), missing=2),
        stored("p2", days_ago(2), missing=2),
        stored("whole", days_ago(3), proved_at=days_ago(3)),
        stored("gone", days_ago(9)),
    ]
    decisions = solved(view(backups), rules(keep_fulls=1))
    assert kept(decisions) == {"p1", "whole"}
    assert "with all its tables" in " ".join(ground.text for ground in of(decisions, "whole").grounds)
    doubted = [
        stored("full", days_ago(2), doubtful=True),
        stored("one", days_ago(1), parent="full"),
        stored("good", days_ago(3)),
        stored("new", days_ago(0.5)),
    ]
    decisions = solved(view(doubted), rules(keep_fulls=2))
    assert kept(decisions) == {"good", "new"}
    assert of(decisions, "one").reasons[0].startswith("it builds on full: a restore of it is expected to fail")


def test_dumps_that_all_lack_a_table_are_kept_by_the_rules_like_any_other() -> None:
    assert kept(solved(view([dump(f"p{day}", day, missing=1) for day in range(1, 9)]), rules(keep_fulls=2))) == {
        "p1",
        "p2",
    }


def test_where_there_are_only_dumps_the_binary_logs_of_every_set_stay() -> None:
    logs = tuple(BinlogRun(f"r{day}", days_ago(day + 1), days_ago(day), 10) for day in range(10))
    backups = [dump("m", 1, "money"), dump("w", 6.5)]
    decisions = solved(view(backups, runs=logs), rules(keep_fulls=1))
    gone = {item.run.name for item in decisions.runs if not item.keep}
    assert gone == {"r7", "r8", "r9"}
    beside = solved(view([*backups, stored("full", days_ago(2.5))], runs=logs), rules(keep_fulls=1))
    assert {item.run.name for item in beside.runs if item.keep} >= {"r0", "r1", "r2"}
    assert not {item.run.name for item in beside.runs if item.keep} & {"r4", "r5", "r6"}


def chain() -> list[Stored]:
    return [
        stored("full", days_ago(6)),
        stored("one", days_ago(5), parent="full"),
        stored("two", days_ago(4), parent="one"),
        stored("three", days_ago(3), parent="two"),
        stored("next", days_ago(1)),
    ]


def test_what_a_kept_increment_builds_on_stays_and_says_why() -> None:
    backups = [*chain(), stored("pin", days_ago(2.5), parent="two", pinned=True)]
    decisions = solved(view(backups), rules(keep_fulls=1))
    assert kept(decisions) == {"full", "one", "two", "pin", "next"}
    assert of(decisions, "one").reasons == ("pin is kept and builds on it",)
    assert of(decisions, "three").reasons == ("keep_fulls 1: it is not a full one",)


def test_a_full_backup_may_stay_without_its_increments() -> None:
    decisions = solved(view(chain()), rules(keep_fulls=2))
    assert kept(decisions) == {"full", "next"}


def test_damaged_copies_and_those_built_on_them_count_for_nothing_and_go() -> None:
    backups = [
        stored("full", days_ago(3), usable=False),
        stored("one", days_ago(2), parent="full"),
        stored("old", days_ago(9)),
        stored("new", days_ago(1)),
    ]
    decisions = solved(view(backups), rules(keep_fulls=2))
    assert kept(decisions) == {"old", "new"}
    assert of(decisions, "full").reasons[0].startswith("this copy is damaged, so no rule counts it")
    assert of(decisions, "one").reasons[0].startswith("it builds on full: this copy is damaged")


def test_a_damaged_copy_stays_while_nothing_restorable_is_newer() -> None:
    backups = [stored("good", days_ago(9)), stored("older", days_ago(10)), stored("bad", days_ago(1), usable=False)]
    decisions = solved(view(backups), rules(keep_fulls=1))
    assert kept(decisions) == {"good", "bad"}
    assert grounds(decisions, "bad") == ["remains"]
    assert kept(solved(view([stored("bad", days_ago(99), usable=False)]), rules(daily=1))) == {"bad"}


def test_an_increment_whose_parent_is_not_here_counts_for_nothing() -> None:
    decisions = solved(
        view([stored("lost", days_ago(3), parent="gone"), stored("new", days_ago(2))]), rules(keep_fulls=1, daily=7)
    )
    assert kept(decisions) == {"new"}
    assert "lost cannot be restored from here" in decisions.warnings[0]


def test_the_newest_restorable_and_the_newest_proved_chain_stay_whatever_the_rules_say() -> None:
    backups = [
        stored("p-full", days_ago(90)),
        stored("p", days_ago(89), parent="p-full", proved_at=days_ago(88)),
        stored("full", days_ago(60)),
        stored("last", days_ago(59), parent="full"),
    ]
    decisions = solved(view([*backups, stored("bad", days_ago(58), usable=False)]), rules(recovery_window="1d"))
    assert {"p-full", "p", "full", "last"} <= kept(decisions)
    assert set(decisions.stopped) == {"p-full", "p"}
    assert "a test restore proved" in of(decisions, "p").reasons[0]


def test_a_hold_keeps_everything_and_tells_what_would_have_gone() -> None:
    decisions = solved(view(daily(9), hold="audit until March"), rules(keep_fulls=2))
    assert decisions.expired == ()
    assert decisions.stopped == tuple(f"d{number}" for number in range(2, 9))
    assert of(decisions, "d4").reasons == ("nothing of shop is deleted: audit until March",)


def test_what_a_restore_reads_and_what_a_running_backup_builds_on_stay() -> None:
    decisions = solved(view(daily(9), being_read=frozenset({"d5"}), built_on=frozenset({"d6"})), rules(keep_fulls=1))
    assert kept(decisions) == {"d0", "d5", "d6"}
    assert (grounds(decisions, "d5"), grounds(decisions, "d6")) == (["read"], ["building"])


def test_backups_of_the_future_are_kept_with_a_warning_and_push_nothing_out() -> None:
    decisions = solved(view([*daily(3), stored("ahead", days_ago(-2))]), rules(keep_fulls=1))
    assert kept(decisions) == {"ahead", "d0"}
    assert "check the clock" in decisions.warnings[0]


def test_a_marked_backup_counts_for_nothing_and_is_not_expired_twice() -> None:
    backups = daily(3)
    backups[0] = stored("d0", backups[0].finished_at, marked=True)
    decisions = solved(view(backups), rules(keep_fulls=1))
    assert kept(decisions) == {"d1"}
    assert [decision.backup.id for decision in decisions.expired] == ["d2"]
    assert of(decisions, "d0").reasons == ("it is marked deleted here already",)


def test_a_marked_parent_of_what_stays_is_called_back() -> None:
    backups = [
        stored("full", days_ago(3), marked=True),
        stored("one", days_ago(2), parent="full", pinned=True),
        stored("new", days_ago(1)),
    ]
    decisions = solved(view(backups), rules(keep_fulls=1))
    assert "full" in kept(decisions)
    assert any("backupd backups undelete full" in warning for warning in decisions.warnings)


def test_without_binary_logs_a_window_promises_no_more_than_its_backups() -> None:
    decisions = solved(view(daily(12)), rules(recovery_window="7d"))
    assert [span.since == span.until for span in decisions.recoverable] == [True] * 7
    assert any("no binary logs are stored here" in warning for warning in decisions.warnings)


def hours_ago(hours: float) -> datetime:
    return NOW - timedelta(hours=hours)


def test_binary_logs_stay_from_the_base_of_the_window_on() -> None:
    base = daily(12)[7]
    runs = (
        BinlogRun("old", days_ago(30), base.started_at - timedelta(minutes=1)),
        BinlogRun("new", base.started_at - timedelta(minutes=1), NOW),
    )
    decisions = solved(view(daily(12), runs=runs), rules(recovery_window="7d"))
    assert [(item.run.name, item.keep) for item in decisions.runs] == [("old", False), ("new", True)]
    assert [(span.since, span.until, span.base) for span in decisions.recoverable] == [(days_ago(7), NOW, "d7")]
    assert decisions.warnings == ()


def test_a_newer_dump_does_not_cost_the_physical_backup_its_binary_logs() -> None:
    backups = [stored("full", days_ago(12)), stored("dump", days_ago(8), kind=BackupKind.LOGICAL)]
    runs = (BinlogRun("a", days_ago(13), days_ago(9)), BinlogRun("b", days_ago(9), NOW))
    decisions = solved(view(backups, runs=runs), rules(recovery_window="7d"))
    assert all(item.keep for item in decisions.runs)
    assert [(span.since, span.until, span.base) for span in decisions.recoverable] == [(days_ago(7), NOW, "full")]


def test_a_gap_in_the_binary_logs_is_named() -> None:
    runs = (BinlogRun("a", days_ago(9), hours_ago(30)), BinlogRun("b", hours_ago(20), hours_ago(2)))
    decisions = solved(
        view([stored("full", days_ago(8)), stored("new", hours_ago(10))], runs=runs), rules(recovery_window="7d")
    )
    assert decisions.warnings == (
        "recovery_window 7d: nothing between 2026-11-20T06:00:00Z and 2026-11-21T02:00:00Z can be restored",
        "recovery_window 7d: the newest moment that can be restored is 2026-11-21T10:00:00Z",
    )


def test_a_young_installation_is_no_gap_and_what_follows_closely_is_no_warning() -> None:
    runs = (BinlogRun("a", hours_ago(31), NOW - timedelta(minutes=10)),)
    assert solved(view([stored("full", hours_ago(30))], runs=runs), rules(recovery_window="7d")).warnings == ()
    assert solved(
        view([stored("full", hours_ago(30)), stored("old", hours_ago(40), usable=False)], runs=runs),
        rules(recovery_window="7d"),
    ).warnings


def test_a_window_of_a_hundred_years_keeps_everything() -> None:
    assert len(solved(view(daily(9)), rules(recovery_window="36525d")).kept) == 9


def test_the_document_names_every_backup_with_its_reasons_and_what_is_not_known() -> None:
    document = solved(view(daily(3)), rules(keep_fulls=1)).as_json()
    assert (document["keep"], document["expire"], document["bytes_expire"]) == (1, 2, 200)
    assert "objects shared with other backups stay" in document["note"]
    assert all(entry["reasons"] for entry in document["backups"])


def test_an_empty_destination_is_no_error() -> None:
    decisions = solved(view([]), rules(recovery_window="7d", daily=1))
    assert decisions.backups == ()
    assert decisions.warnings == ("recovery_window 7d: there is no restorable backup here at all",)
