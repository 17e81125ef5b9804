"""What an installation knows of marks and of what it put elsewhere, in either database."""

from __future__ import annotations

from datetime import timedelta

from backupd.catalog.session import Catalog
from backupd.model.backup_record import Sighting
from tests.support.catalog.samples import NOON

ONE, TWO = ("shop", "20261121T040000Z-0000000a"), ("zoo", "20261121T040000Z-0000000b")
HOUR = timedelta(hours=1)


def test_a_mark_counts_from_when_it_was_first_seen_and_another_in_its_place_anew(catalog: Catalog) -> None:
    stored = NOON - 99 * HOUR + timedelta(microseconds=1)
    marks = catalog.marks
    assert marks.look("a", {ONE: stored, TWO: stored}, NOON) == {ONE: Sighting(NOON), TWO: Sighting(NOON)}
    assert marks.look("a", {ONE: stored, TWO: NOON}, NOON + HOUR) == {ONE: Sighting(NOON), TWO: Sighting(NOON + HOUR)}
    assert marks.look("b", {ONE: stored}, NOON + HOUR) == {ONE: Sighting(NOON + HOUR)}, "each place by itself"
    assert marks.look("a", {TWO: NOON}, NOON + HOUR) == {TWO: Sighting(NOON + HOUR)}
    assert marks.look("a", {ONE: stored, TWO: NOON}, NOON + 2 * HOUR)[ONE] == Sighting(NOON + 2 * HOUR), "it was away"


def test_what_was_wanted_here_is_known_by_the_mark_that_was_put_for_it(catalog: Catalog) -> None:
    marks = catalog.marks
    marks.take("a", ONE, NOON, stored=None, confirmed=True)
    wanted = Sighting(NOON, ours=True, confirmed=True)
    assert marks.look("a", {ONE: NOON}, NOON + HOUR) == {ONE: wanted}
    marks.take("a", ONE, NOON + HOUR, stored=NOON, confirmed=False)
    assert marks.look("a", {ONE: NOON}, NOON + HOUR) == {ONE: wanted}
    assert marks.look("a", {ONE: NOON + HOUR}, NOON + HOUR) == {ONE: Sighting(NOON + HOUR)}
    marks.take("a", ONE, NOON + 2 * HOUR, stored=NOON + HOUR, confirmed=True)
    assert marks.look("a", {ONE: NOON + HOUR}, NOON)[ONE] == Sighting(NOON + HOUR, ours=True, confirmed=True)
    marks.forget("a", ONE)
    assert marks.look("a", {ONE: NOON + HOUR}, NOON) == {ONE: Sighting(NOON)}


def test_digests_of_deposits_are_kept_by_place_and_key(catalog: Catalog) -> None:
    for place, key, digest in (("a", "x", "0"), ("a", "y", "1"), ("b", "x", "2"), ("a", "x", "3")):
        catalog.deposits.put(place, key, digest)
    catalog.deposits.forget("a", ["y", "z"])
    assert (catalog.deposits.at("a"), catalog.deposits.at("b")) == ({"x": "3"}, {"x": "2"})
