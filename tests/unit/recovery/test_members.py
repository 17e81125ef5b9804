"""Which member of a group a run goes through, and why: by rules that give a reason for every member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.model.server_facts import Role
from backupd.recovery.members import (
    Candidate,
    Choice,
    Compared,
    Identity,
    Node,
    Preference,
    Rules,
    choose,
    follow,
    taken_because,
)

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


def identity(number: int) -> Identity:
    return Identity(f"uuid-{number}", number, "db", f"/data/{number}")


SOURCE = Candidate("db1", identity=identity(1), role=Role.SOURCE, logs=True)
REPLICA = Candidate(
    "db2",
    identity=identity(2),
    role=Role.REPLICA,
    read_only=True,
    logs=True,
    log_updates=True,
    follows=frozenset({1}),
)
OTHER = replace(REPLICA, name="db3", identity=identity(3))


ANY_RULES = Rules()


def order(candidates: Sequence[Candidate], rules: Rules = ANY_RULES) -> list[str]:
    return [one.name for one in choose(candidates, rules) if not one.left]


def why(candidates: Sequence[Candidate], name: str, rules: Rules = ANY_RULES) -> str:
    (found,) = (one for one in choose(candidates, rules) if one.name == name)
    assert found.left
    return found.reason


def test_replicas_come_before_the_source_unless_it_is_preferred() -> None:
    assert order([SOURCE, REPLICA, OTHER]) == ["db2", "db3", "db1"]
    assert order([SOURCE, REPLICA, OTHER], Rules(Preference.SOURCE)) == ["db1", "db2", "db3"]
    assert order([OTHER, SOURCE, REPLICA], Rules(Preference.ANY)) == ["db3", "db1", "db2"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"trouble": "it cannot be asked: refused"}, "it cannot be asked: refused"),
        ({"away": "backup job 1 has taken it out of rotation"}, "backup job 1 has taken it out of rotation"),
        ({"stopped": "replication is stopped (SQL)"}, "replication is stopped (SQL)"),
        ({"lag": 61.0}, "it is 1m 1s behind its source, more than max_lag (1m)"),
        (
            {"lag": 2.0, "unheard": "its source may be db1, which cannot be asked", "silent": 60.0},
            (
                "its lag is not known: its source may be db1, which cannot be asked, and it would not notice for 1m "
                "that its source is gone; max_lag is 1m"
            ),
        ),
        ({"unordered": "it applies with 4 workers in any order"}, "it applies with 4 workers in any order"),
        ({"node": Node("Donor/Desynced")}, "its node is Donor/Desynced, not Synced"),
    ],
)
def test_a_member_that_cannot_be_taken_is_left_with_its_reason(changed: dict[str, object], reason: str) -> None:
    bad = replace(REPLICA, **changed)  # type: ignore[arg-type]  # of several fields
    assert why([SOURCE, bad], "db2") == reason
    assert order([SOURCE, bad]) == ["db1"]


def test_a_replica_of_which_the_lag_is_not_known_comes_behind_one_of_which_it_is() -> None:
    unsure = replace(REPLICA, unheard="its source may be db1, which cannot be asked", silent=30.0)
    away = replace(SOURCE, trouble="it cannot be asked: refused")
    assert order([away, unsure, OTHER]) == ["db3", "db2"]
    (first, *_rest) = choose([away, unsure], Rules())
    assert first.reason == (
        "a replica, whose lag is not known (0.0s behind what it has received, and its source may be db1, which cannot "
        "be asked)"
    )


def test_a_delayed_replica_is_not_late_and_comes_behind_the_others() -> None:
    delayed = replace(REPLICA, delay=3600.0)
    assert order([delayed, OTHER, SOURCE]) == ["db3", "db2", "db1"]
    (first, *_rest) = choose([delayed, SOURCE], Rules())
    assert "delayed by 1h on purpose" in first.reason


def test_two_names_of_one_server_are_refused_both() -> None:
    same = replace(REPLICA, name="vip")
    assert order([SOURCE, REPLICA, same]) == ["db1"]
    assert "the same server as vip" in why([SOURCE, REPLICA, same], "db2")
    assert "a proxy or a virtual address" in why([SOURCE, REPLICA, same], "vip")


def test_of_several_members_that_follow_nobody_the_one_that_is_followed_is_the_source() -> None:
    stale = Candidate("old", identity=identity(9), logs=True)
    assert order([stale, SOURCE, REPLICA]) == ["db2", "db1"]
    assert why([stale, SOURCE, REPLICA], "old") == "it is no replica, and the replicas of the group follow db1"
    assert order([stale, SOURCE]) == []
    assert why([stale, SOURCE], "db1") == "old, db1 are no replicas: nothing shows which of them is the source"


def test_where_two_sources_are_followed_no_replica_of_one_of_them_is_taken() -> None:
    rival = Candidate("db9", identity=identity(9), role=Role.SOURCE, logs=True)
    its = replace(OTHER, follows=frozenset({9}))
    assert order([SOURCE, rival, REPLICA, its]) == []
    assert why([SOURCE, rival, REPLICA, its], "db2") == (
        "it follows db1, and nothing shows which of db1, db9 is the source"
    )
    both = replace(REPLICA, name="both", identity=identity(4), follows=frozenset({1, 9}))
    assert order([SOURCE, rival, REPLICA, its, both]) == ["both"]


def test_a_copied_uuid_makes_members_that_nobody_can_tell_apart() -> None:
    copied = replace(OTHER, identity=Identity("uuid-2", 3, "db", "/data/3"))
    assert order([SOURCE, REPLICA, copied], Rules(stay="uuid-2")) == ["db1"]
    assert "it has the same uuid as db3 (uuid-2), which is another server" in why([SOURCE, REPLICA, copied], "db2")
    assert "remove auto.cnf" in why([SOURCE, REPLICA, copied], "db3")


def test_of_members_with_one_uuid_the_stream_stays_with_the_one_that_it_was() -> None:
    copied = replace(OTHER, identity=Identity("uuid-2", 3, "db", "/data/3"))
    found = choose([REPLICA, copied], Rules(needs_log=True, stay="uuid-2"))
    for name in ("db2", "db3"):
        following = follow(found, current="uuid-2", name=name, gone_since=NOW, patience=timedelta(minutes=5), now=NOW)
        assert following.name == name


def test_a_chain_stays_with_its_member_whatever_is_preferred() -> None:
    assert order([SOURCE, REPLICA], Rules(stay="uuid-1")) == ["db1", "db2"]
    late = replace(REPLICA, lag=100.0)
    assert order([SOURCE, late], Rules(stay="uuid-2")) == ["db1"]


def test_a_physical_backup_needs_a_member_on_this_host() -> None:
    far = replace(REPLICA, elsewhere="the server says it runs on db9")
    assert order([SOURCE, far], Rules(here=True)) == ["db1"]
    assert order([SOURCE, far]) == ["db2", "db1"]


def test_a_log_that_lacks_what_is_replicated_is_not_streamed() -> None:
    assert why([SOURCE, replace(REPLICA, log_updates=False)], "db2", Rules(needs_log=True)).endswith("is OFF)")
    assert order([replace(SOURCE, logs=False), REPLICA], Rules(needs_log=True)) == ["db2"]


def test_a_replica_that_was_compared_comes_first_and_one_that_differs_last_of_its_kind() -> None:
    equal, different = replace(OTHER, compared=Compared.EQUAL), replace(REPLICA, compared=Compared.DIFFERENT)
    unknown = replace(REPLICA, name="db4", identity=identity(4))
    assert order([different, unknown, equal, SOURCE]) == ["db3", "db4", "db2", "db1"]


def test_of_nodes_the_one_is_taken_that_leaves_most_others_in_service() -> None:
    nodes = [
        Candidate("n1", identity=identity(1), node=Node("Synced", 2, 1)),
        Candidate("n2", identity=identity(2), node=Node("Synced", 2, 0)),
        Candidate("n3", identity=identity(3), node=Node("Joined", 2, 0)),
    ]
    assert order(nodes) == ["n2", "n1"]


def test_the_reason_names_who_was_passed_over() -> None:
    found = choose([SOURCE, replace(REPLICA, lag=90.0), OTHER], Rules())
    said = taken_because(found, "db1", [("db3", "the hook failed")])
    assert said.startswith("the source, though the group prefers replicas")
    assert "db3: the hook failed" in said
    assert "db2: it is 1m 30s behind its source" in said


PATIENT = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
"""On a machine that does much else."""
candidate = st.builds(
    Candidate,
    name=st.just(""),
    trouble=st.sampled_from(["", "", "", "gone"]),
    identity=st.builds(identity, st.integers(1, 5)),
    role=st.sampled_from(Role),
    stopped=st.sampled_from(["", "", "stopped"]),
    lag=st.floats(0, 200),
    delay=st.sampled_from([0.0, 3600.0]),
    read_only=st.booleans(),
    logs=st.booleans(),
    log_updates=st.booleans(),
    node=st.one_of(
        st.none(), st.builds(Node, st.sampled_from(["Synced", "Joined"]), st.integers(0, 3), st.integers(0, 2))
    ),
    away=st.sampled_from(["", "", "away"]),
    elsewhere=st.sampled_from(["", "far"]),
    compared=st.sampled_from(Compared),
    follows=st.frozensets(st.integers(1, 5), max_size=2),
)
groups = st.lists(candidate, min_size=1, max_size=5).map(
    lambda found: [replace(one, name=f"db{number}") for number, one in enumerate(found)]
)
rules = st.builds(
    Rules,
    prefer=st.sampled_from(Preference),
    here=st.booleans(),
    needs_log=st.booleans(),
    stay=st.sampled_from(["", "uuid-1", "uuid-2"]),
)


@PATIENT
@given(groups, rules)
def test_every_member_is_there_once_with_a_reason_and_no_bad_one_is_taken(found: list[Candidate], asked: Rules) -> None:
    chosen = choose(found, asked)
    assert sorted(one.name for one in chosen) == sorted(one.name for one in found)
    assert all(one.reason for one in chosen)
    assert [one.left for one in chosen] == sorted(one.left for one in chosen)
    by_name = {one.name: one for one in found}
    taken = [by_name[one.name] for one in chosen if not one.left]
    for one in taken:
        assert not one.trouble
        assert not one.away
        assert not (one.role is Role.REPLICA and (one.stopped or one.lag > 60))
        assert not (asked.here and one.elsewhere)
        assert not (asked.needs_log and not one.logs)
        assert one.node is None or one.node.state == "Synced"
    assert len({one.identity for one in taken}) == len(taken)


@PATIENT
@given(groups, rules)
def test_the_same_members_give_the_same_order(found: list[Candidate], asked: Rules) -> None:
    assert choose(found, asked) == choose(list(found), asked)


@PATIENT
@given(groups, rules, st.data())
def test_a_member_that_goes_changes_nothing_among_the_replicas_that_stay(
    found: list[Candidate], asked: Rules, data: st.DataObject
) -> None:
    """Falling back takes the next one, not another order."""
    alone = [replace(one, identity=identity(10 + number)) for number, one in enumerate(found)]
    followers = [replace(one, role=Role.REPLICA, node=None) for one in alone]
    gone = data.draw(st.sampled_from(followers)).name
    before = [one.name for one in choose(followers, asked) if not one.left and one.name != gone]
    after = [replace(one, trouble="gone") if one.name == gone else one for one in followers]
    assert [one.name for one in choose(after, asked) if not one.left] == before


# -- the binary log


def following(
    candidates: Sequence[Candidate], current: str, gone: timedelta | None, name: str = ""
) -> tuple[str, bool]:
    found = follow(
        choose(candidates, Rules(Preference.SOURCE, needs_log=True, stay=current)),
        current=current,
        name=name,
        gone_since=NOW - gone if gone is not None else None,
        patience=timedelta(minutes=5),
        now=NOW,
    )
    return found.name, found.switched


def test_the_first_stream_goes_through_the_source() -> None:
    assert following([REPLICA, SOURCE], "", None) == ("db1", False)


def test_the_log_stays_with_its_member_until_that_is_gone_for_long_enough() -> None:
    gone = replace(SOURCE, trouble="it cannot be asked")
    assert following([SOURCE, REPLICA], "uuid-2", timedelta(hours=1)) == ("db2", False)
    assert following([gone, REPLICA], "uuid-1", timedelta(minutes=4), name="db1") == ("db1", False)
    assert following([gone, REPLICA], "uuid-1", timedelta(minutes=4)) == ("", False)
    assert following([gone, REPLICA], "uuid-1", timedelta(minutes=5)) == ("db2", True)
    assert following([gone, replace(REPLICA, log_updates=False)], "uuid-1", timedelta(hours=1)) == ("", False)


def test_a_member_that_is_late_or_away_still_has_its_own_log() -> None:
    for changed in (replace(REPLICA, lag=900.0), replace(REPLICA, away="backup"), replace(REPLICA, stopped="stopped")):
        assert following([SOURCE, changed], "uuid-2", timedelta(hours=1)) == ("db2", False)


def test_a_choice_is_equal_whatever_was_found() -> None:
    assert Choice("db1", "why", found=SOURCE) == Choice("db1", "why")
