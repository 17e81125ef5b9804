"""What a look opens, restates and closes, for whatever happens in whatever order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from backupd.alerts.conditions import Condition, Key, Kind, Settled, settle
from backupd.alerts.rules import KINDS, LOST, REPLICATION, RPO, STREAM
from backupd.model.event import Event, Severity

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINE = [Key(kind, server, subject) for kind in (STREAM, RPO) for server in ("db1", "db2") for subject in ("", "nas")]
BY_KIND = {name: kind for kind in (STREAM, RPO) for name in (kind.broken, kind.mended, kind.unwatched)}


def key_of(event: Event) -> Key:
    return Key(BY_KIND[event.kind], event.server, event.subject)


class Book:
    """Events as the catalog keeps them; a key is open when its newest event opened it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def open(self) -> list[Key]:
        newest = {key_of(event): event for event in self.events}
        return [key for key, event in newest.items() if event.kind == key.kind.broken]

    def write(self, found: Settled) -> None:
        self.events += [*found.opened, *found.closed]


KEYS = st.sampled_from(MINE)
LOOKS = st.lists(
    st.tuples(st.dictionaries(KEYS, st.booleans(), max_size=4), st.sets(KEYS, max_size=6), st.sets(KEYS, max_size=2)),
    max_size=20,
)


@given(LOOKS)
def test_whatever_is_seen_no_key_is_open_twice_nothing_closes_that_was_not_open_and_what_is_gone_is_closed(
    looks: list[tuple[dict[Key, bool], set[Key], set[Key]]],
) -> None:
    book = Book()
    for number, (holds, looked, gone) in enumerate(looks):
        before = set(book.open())
        conditions = [Condition(key, Severity.ERROR, f"look {number}", opens=opens) for key, opens in holds.items()]
        found = settle(
            NOW + timedelta(minutes=number),
            book.open(),
            conditions,
            dict.fromkeys(looked, "it is well"),
            dict.fromkeys(gone, "nobody looks"),
        )
        opened, closed = [key_of(one) for one in found.opened], [key_of(one) for one in found.closed]
        assert len(set(opened)) == len(opened)
        assert len(set(closed)) == len(closed)
        assert set(opened) == {key for key, opens in holds.items() if opens} - before
        assert set(closed) == before & (looked | gone) - set(holds)
        assert {key_of(one) for one in found.restated} == before & set(holds)
        assert {one.kind for one in found.closed} <= {key.kind.mended for key in looked} | {
            key.kind.unwatched for key in gone - looked
        }
        book.write(found)
        assert set(book.open()) == (before | set(opened)) - set(closed)
    for key in MINE:
        history = [event.kind == key.kind.broken for event in book.events if key_of(event) == key]
        assert history == [number % 2 == 0 for number in range(len(history))], "it opens and closes in turn"


@given(st.sets(KEYS), st.sets(KEYS))
def test_a_look_that_finds_the_same_again_writes_nothing(holding: set[Key], well: set[Key]) -> None:
    conditions = [Condition(key, Severity.WARNING, "broken") for key in holding]
    again = settle(NOW, holding, conditions, dict.fromkeys(well, "well"))
    assert (again.opened, again.closed) == ((), ())
    assert settle(NOW, (), (), dict.fromkeys(well, "well"), dict.fromkeys(holding, "gone")) == Settled()


def test_two_kinds_that_the_same_event_ends_are_ended_by_one() -> None:
    keys = [Key(kind, "db1", "nas") for kind in (REPLICATION, LOST)]
    (over,) = settle(NOW, keys, looked=dict.fromkeys(keys, "it has everything again")).closed
    assert (over.kind, over.message) == ("replication-caught-up", "it has everything again")
    assert len(settle(NOW, keys, gone=dict.fromkeys(keys, "nas is gone")).closed) == 2


def test_no_two_kinds_share_what_opens_them() -> None:
    names = [name for kind in KINDS for name in (kind.broken, kind.unwatched)]
    assert len(set(names)) == len(names) == 2 * len(KINDS)
    assert {one.mended for one in KINDS} & set(names) == set()
    assert Kind("a", "b", "").unwatched == "a-unwatched"
