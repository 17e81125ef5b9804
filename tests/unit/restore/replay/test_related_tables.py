"""What has to be replayed along with the wanted tables, held against a database that only pretends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from backupd.engine.binlog.changes import Changes
from backupd.engine.binlog.statements import effect, masked
from backupd.engine.relay_logs import patterns, skipped_statement
from backupd.model.binlog import Change, ChangeKind, Transaction
from backupd.model.table import TableName
from restore.replay.related_tables import Relatives, relatives
from tests.support.dice import rounds, thrown

AT = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
SCHEMAS = ("a", "b")


def name(text: str) -> TableName:
    return TableName(*text.split("."))


def said(*texts: str) -> Transaction:
    """As the index has the statements of one transaction."""
    changes = tuple(dict.fromkeys(change for text in texts for change in effect(text, "a").changes))
    return Transaction(
        "0-1-1", 4, 40, AT, precise=True, server_id=1, changes=changes, statement="; ".join(texts)[:1024]
    )


def indexed(text: str, size: int | None = None) -> Transaction:
    """As the index has a statement; ``size``: as one of before kept it."""
    changes = Changes(None)
    changes.begin(4)
    changes.statement(text, "a", only_begun=False)
    done, kept = changes.done()
    kept = kept if size is None else masked(text).strip()[:size]
    return Transaction("0-1-1", 4, 40, AT, precise=True, server_id=1, changes=done, statement=kept)


def rows(table: str, kind: ChangeKind = ChangeKind.INSERT, count: int = 1) -> Transaction:
    return Transaction(
        "0-1-1",
        4,
        40,
        AT,
        precise=True,
        server_id=1,
        changes=(Change(name(table).schema, name(table).table, kind, count),),
    )


def nobody(_name: TableName) -> tuple[TableName, ...]:
    return ()


def of(wanted: str, *statements: str, triggers: dict[str, str] | None = None, **values: object) -> Relatives:
    known = {name(table): text for table, text in (triggers or {}).items()}
    return relatives(
        [name(one) for one in wanted.split()],
        [said(one) for one in statements],
        nobody,
        triggers=known,
        **values,  # type: ignore[arg-type]  # options by name
    )


def shown(found: Relatives) -> str:
    return " ".join(one.shown for one in found.tables)


@pytest.mark.parametrize(
    ("wanted", "statements", "tables"),
    [
        ("a.t", ["INSERT INTO b.u VALUES (1)", "DROP TABLE b.u", "CREATE TABLE b.w LIKE a.t"], "a.t"),
        ("a.t", ["CREATE TABLE a.n LIKE a.t", "RENAME TABLE a.t TO a.o, a.n TO a.t"], "a.t a.n a.o"),
        ("a.t", ["RENAME TABLE a.x TO a.y", "ALTER TABLE y RENAME TO t"], "a.t a.x a.y"),
        ("a.t", ["CREATE TABLE t LIKE b.u", "CREATE TABLE b.u AS SELECT * FROM b.w"], "a.t b.u b.w"),
        ("a.t", ["INSERT INTO a.t SELECT x FROM b.u JOIN b.w ON 1"], "a.t b.u b.w"),
        ("a.t", ["INSERT INTO b.u SELECT x FROM a.t"], "a.t"),
        ("a.t", ["UPDATE t, b.u SET u.x = 1 WHERE t.x = u.x"], "a.t b.u"),
        ("a.t", ["ALTER TABLE b.p EXCHANGE PARTITION p0 WITH TABLE a.t"], "a.t b.p"),
        ("a.t", ["ALTER TABLE a.t ADD FOREIGN KEY (i) REFERENCES b.u (i)"], "a.t b.u"),
        ("a.t", ["DROP TABLE a.t, b.u"], "a.t b.u"),
        ("a.t", ["DROP TABLE IF EXISTS a.t, b.u"], "a.t"),
        ("a.t", ["CREATE VIEW a.v AS SELECT * FROM b.u", "INSERT INTO a.t SELECT * FROM a.v"], "a.t a.v b.u"),
        (
            "a.t",
            [
                "CREATE TRIGGER b.g AFTER INSERT ON b.u FOR EACH ROW INSERT INTO a.t VALUES (1)",
                "INSERT INTO b.u VALUES (1)",
            ],
            "a.t b.u",
        ),
        (
            "a.t",
            [
                "CREATE TRIGGER a.g AFTER INSERT ON t FOR EACH ROW BEGIN DELETE FROM b.u; UPDATE w SET i = 2; END",
                "INSERT INTO t VALUES (1)",
            ],
            "a.t a.w b.u",
        ),
        ("a.t", ["INSERT INTO a.T VALUES (1)"], "a.t a.T"),
    ],
)
def test_what_a_statement_ties_together_is_replayed_together(wanted: str, statements: list[str], tables: str) -> None:
    found = of(wanted, *statements)
    assert shown(found) == tables
    assert set(found.reasons) == set(found.tables[1:])
    assert all(found.reasons.values())
    assert found.inseparable == ()


def test_parents_of_foreign_keys_and_theirs_come_along() -> None:
    parents = {name("a.t"): [name("a.p")], name("a.p"): [name("b.q"), name("a.p")]}
    found = relatives([name("a.t")], [rows("a.t")], lambda one: parents.get(one, []))
    assert shown(found) == "a.t a.p b.q"
    assert "cascades" in found.reasons[name("b.q")]


def test_triggers_of_other_tables_count_only_where_statements_were_logged() -> None:
    firing = {
        name("b.u"): "CREATE TRIGGER g AFTER INSERT ON u FOR EACH ROW UPDATE a.t SET i = 1",
        name("b.calls"): "CALL something()",
        name("b.unknown"): "",
        name("b.other"): "SET @x = 1",
    }
    changed = ("b.u", "b.calls", "b.unknown", "b.other", "b.none")
    statements = [said(f"INSERT INTO {one} VALUES (1)") for one in changed]
    assert shown(relatives([name("a.t")], map(rows, changed), nobody, triggers=firing)) == "a.t"
    assert shown(relatives([name("a.t")], statements, nobody, triggers=firing)) == "a.t b.calls b.u b.unknown"
    # Where nobody knows which tables have any, each may.
    assert shown(relatives([name("a.t")], statements, nobody)) == f"a.t {' '.join(sorted(changed))}"


def test_names_at_the_target_are_followed_back_and_forth() -> None:
    found = of(
        "a.t a.kept",
        "RENAME TABLE a.t TO a.o, a.n TO a.t",
        "DROP TABLE a.o",
        "ALTER TABLE a.kept RENAME TO b.z",
        "CREATE TABLE b.z2 LIKE b.z",
        "RENAME TABLE b.z TO b.z3",
    )
    assert found.gone == {
        name("a.o"): None,
        name("a.n"): name("a.t"),
        name("a.kept"): name("b.z3"),
        name("b.z"): name("b.z3"),
    }
    assert found.made == (name("a.t"), name("b.z3"))
    again = of(
        "a.t a.u",
        "DROP DATABASE a",
        "CREATE DATABASE a",
        "CREATE TABLE a.t (i INT)",
        "CREATE TABLE IF NOT EXISTS a.v (i INT)",
    )
    assert (again.gone, again.made) == ({name("a.u"): None}, (name("a.t"),))


@pytest.mark.parametrize(
    ("statements", "made"),
    [
        (["CREATE TABLE a.t (i INT)"], True),
        (["CREATE OR REPLACE TABLE a.t (i INT)"], True),
        (["CREATE TABLE a.t LIKE b.u"], True),
        (["DROP TABLE IF EXISTS a.t", "CREATE TABLE a.t (i INT)"], True),
        (["DROP TABLE IF EXISTS a.t", "CREATE TABLE IF NOT EXISTS a.t (i INT)"], True),
        (["CREATE TABLE a.t (i INT)", "CREATE TABLE IF NOT EXISTS a.t (i INT)"], True),
        (["CREATE TABLE IF NOT EXISTS a.t (i INT)"], None),
        (["CREATE SEQUENCE IF NOT EXISTS a.t"], None),
        (["CREATE TABLE a.t (i INT)", "DROP TABLE a.t"], False),
        (["ALTER TABLE a.t ADD j INT"], False),
    ],
)
def test_a_table_that_is_in_no_backup_is_known_to_be_made_by_the_logs(statements: list[str], made: bool | None) -> None:
    """``made`` None: unless it was there before."""
    table = (name("a.t"),)
    unknown = of("a.t", *statements)
    assert (unknown.made, unknown.perhaps) == (table if made else (), table if made is None else ())
    nothing = of("a.t", *statements, before=[name("b.u")])
    assert (nothing.made, nothing.perhaps) == (() if made is False else table, ())
    kept = of("a.t", *statements, known=table, before=table)
    assert kept.perhaps == ()


def test_names_without_regard_to_case_are_one_where_the_server_says_so() -> None:
    statements = ("RENAME TABLE A.Old TO a.T", "INSERT INTO a.OLD VALUES (1)")
    assert shown(of("a.T", *statements, lower_case=True)) == "a.t a.old"
    assert shown(of("a.t a.e", known=[name("a.T"), name("a.tt"), name("a.é"), name("a.E")])) == "a.t a.e a.E a.T a.é"


@pytest.mark.parametrize("text", ["SELECT `a`.`f`(1)", "DO a.f()", "CALL a.p()"])
def test_what_changes_nobody_knows_which_tables_makes_them_inseparable(text: str) -> None:
    found = of("a.t", text)
    assert len(found.inseparable) == 1
    assert text in found.inseparable[0]
    for harmless in (
        "FLUSH TABLES",
        "GRANT SELECT ON *.* TO x@y",
        "CREATE PROCEDURE a.p() BEGIN CALL q(); END",
        "CREATE USER x@y",
        "DROP DATABASE b",
    ):
        assert of("a.t", harmless).inseparable == ()


def test_rows_that_went_through_a_view_make_them_inseparable_only_where_the_view_shows_them() -> None:
    views = {name("b.v"): "select * from a.t", name("b.w"): "select * from b.u", name("b.x"): ""}
    assert of("a.t", "INSERT INTO b.w VALUES (1)", views=views).inseparable == ()
    for view in ("b.v", "b.x"):
        assert view in of("a.t", f"INSERT INTO {view} VALUES (1)", views=views).inseparable[0]


WIDE = ", ".join(f"a_rather_long_column_name_{number} INT" for number in range(40))


@pytest.mark.parametrize(
    "text",
    [
        f"CREATE TABLE a.t (i INT, {WIDE}, FOREIGN KEY (i) REFERENCES b.u (i))",
        f"ALTER TABLE a.t ADD ({WIDE}), ADD FOREIGN KEY (i) REFERENCES b.u (i)",
        f"CREATE TABLE a.t /* {WIDE} */ LIKE b.u",
        f"CREATE TABLE a.t ({WIDE}) AS SELECT * FROM b.u",
        f"/* {WIDE} */ CREATE TABLE a.t LIKE b.u",
        "RENAME TABLE " + ", ".join(f"b.x{number} TO b.y{number}" for number in range(80)) + ", b.u TO a.t",
        r"CREATE TABLE a.t (password TEXT DEFAULT 'it\'s', FOREIGN KEY (i) REFERENCES b.u (i))",
    ],
)
def test_a_definition_of_which_the_index_has_the_beginning_makes_its_table_inseparable(text: str) -> None:
    found = relatives([name("a.t")], [indexed(text, size=1024)], nobody, known=[name("b.u")])
    assert "in part only" in found.inseparable[0]
    assert relatives([name("b.z")], [indexed(text, size=1024)], nobody).inseparable == ()
    now = relatives([name("a.t")], [indexed(text)], nobody, known=[name("b.u")])
    assert (name("b.u") in now.tables) is not bool(now.inseparable)
    assert not now.inseparable or "password" in text
    longer = text.replace("a_rather", "/* " + 70_000 * "x" + " */ a_rather", 1)
    if longer != text:
        assert "in part only" in relatives([name("a.t")], [indexed(longer)], nobody).inseparable[0]


def test_what_is_behind_a_definition_that_is_cut_is_of_no_interest_where_no_table_can_stand_there() -> None:
    partitions = ", ".join(f"PARTITION p{number} VALUES LESS THAN ({number})" for number in range(80))
    for text in (
        f"CREATE TABLE a.t (i INT) PARTITION BY RANGE (i) ({partitions})",
        f"CREATE INDEX i ON a.t (i) COMMENT '{WIDE}'",
        f"INSERT INTO a.t VALUES ('{WIDE}')",
        "DROP TABLE IF EXISTS a.t" + "".join(f", b.x{number}" for number in range(200)),
    ):
        assert relatives([name("a.t")], [indexed(text, size=1024)], nobody, triggers={}).inseparable == (), text


def test_a_table_keeps_its_triggers_when_it_is_renamed() -> None:
    trigger = "CREATE TRIGGER g AFTER INSERT ON b.u FOR EACH ROW UPDATE a.t SET i = 1"
    for renaming in (
        ["RENAME TABLE b.u TO b.v"],
        ["ALTER TABLE b.u RENAME TO b.v"],
        ["RENAME TABLE b.u TO b.w", "RENAME TABLE b.x TO b.u, b.w TO b.v"],
    ):
        later = [*renaming, "INSERT INTO b.v VALUES (1)"]
        assert "b.v" in shown(of("a.t", *later, triggers={"b.u": trigger})).split(), later
        assert "b.v" in shown(of("a.t", trigger, *later, triggers={})).split(), later
        assert shown(of("a.t", *later, triggers={})) == "a.t"
    cut = indexed(
        f"CREATE TRIGGER g AFTER INSERT ON b.u FOR EACH ROW BEGIN /* {WIDE} */ DELETE FROM a.t; END", size=1024
    )
    moved = [cut, said("RENAME TABLE b.u TO b.v"), said("INSERT INTO b.v VALUES (1)")]
    assert "triggers" in relatives([name("a.t")], moved, nobody, triggers={}).inseparable[0]


def test_a_trigger_that_is_cut_matters_where_statements_fired_it() -> None:
    trigger = f"CREATE TRIGGER g AFTER INSERT ON a.t FOR EACH ROW BEGIN /* {WIDE} */ DELETE FROM b.u; END"
    fired = said("INSERT INTO a.t VALUES (1)")
    for wanted in ("a.t", "b.z"):
        found = relatives([name(wanted)], [indexed(trigger, size=1024), fired], nobody, triggers={})
        assert "triggers" in found.inseparable[0]
        assert (
            relatives([name(wanted)], [indexed(trigger, size=1024), rows("a.t")], nobody, triggers={}).inseparable == ()
        )
    assert shown(relatives([name("a.t")], [indexed(trigger), fired], nobody, triggers={})) == "a.t b.u"


def test_every_query_that_a_view_had_counts() -> None:
    for first, second in (("a.t", "b.u"), ("b.u", "a.t")):
        found = of(
            "a.t",
            f"CREATE VIEW b.v AS SELECT * FROM {first}",
            "INSERT INTO b.v VALUES (1)",
            f"ALTER VIEW b.v AS SELECT * FROM {second}",
            "INSERT INTO b.v VALUES (1)",
        )
        assert "b.v" in found.inseparable[0]


def test_a_list_of_new_names_that_no_index_holds_may_have_any_table_in_it() -> None:
    text = "RENAME TABLE " + ", ".join(f"b.x{number} TO b.y{number}" for number in range(6000))
    assert "in part only" in relatives([name("a.t")], [indexed(text)], nobody).inseparable[0]


def test_a_filter_has_a_pattern_per_table_and_one_for_what_is_done_to_its_schema() -> None:
    assert patterns([name("s_1.t%"), TableName("s_1", "back\\slash")]) == (r"s\_1.t\%", r"s\_1.back\\slash", r"s\_1.")
    assert skipped_statement([name("a.t")]) == "TRUNCATE a.a"
    assert skipped_statement([name("a.a"), name("a.b")]) == "TRUNCATE a.c"


# -- against a database that only pretends

Content = tuple[object, ...]


@dataclass
class Pretended:
    """Tables hold what was done to them, so they are equal only when the very same was done in the same order.
    ``only``: what a narrowed replay is given; the rest is not there and skipped."""

    tables: dict[str, Content]
    triggers: dict[str, str]
    only: frozenset[str] | None = None
    steps: int = field(default=0)

    def run(self, step: tuple[str, ...]) -> None:
        self.steps += 1
        verb, *names = step
        changed = names if verb in ("swap", "rename", "drop", "join") else names[:1]
        if self.only is not None and not self.only & set(changed):
            return
        getattr(self, f"_{verb}")(*names)

    def _need(self, table: str) -> Content:
        return self.tables[table]  # KeyError: the server misses it

    def _insert(self, table: str) -> None:
        self.tables[table] = (*self._need(table), self.steps)
        if (other := self.triggers.get(table)) is not None:
            self.tables[other] = (*self._need(other), "fired", self.steps)

    def _copy(self, table: str, other: str) -> None:
        self.tables[table] = (*self._need(table), "copied", self._need(other))

    def _join(self, table: str, other: str) -> None:
        one, two = self._need(table), self._need(other)
        self.tables[table], self.tables[other] = (one, two), (two, self.steps)

    def _like(self, table: str, other: str) -> None:
        self.tables[table] = ("like", len(self._need(other)) > 0)

    def _rename(self, table: str, new: str) -> None:
        self.tables[new] = self._need(table)
        del self.tables[table]

    def _swap(self, table: str, other: str) -> None:
        self.tables[table], self.tables[other] = self._need(other), self._need(table)

    def _drop(self, table: str, other: str) -> None:
        for one in (table, other):
            self._need(one)
            del self.tables[one]


TEXTS = {
    "insert": "INSERT INTO {} VALUES (1)",
    "copy": "INSERT INTO {} SELECT * FROM {}",
    "join": "UPDATE {} x JOIN {} y ON x.i = y.i SET x.i = 1, y.i = 2",
    "like": "CREATE TABLE {} LIKE {}",
    "rename": "RENAME TABLE {} TO {}",
    "swap": "RENAME TABLE {0} TO a.between, {1} TO {0}, a.between TO {1}",
    "drop": "DROP TABLE {}, {}",
}


def history(dice: random.Random, database: Pretended, length: int) -> Iterator[tuple[str, ...]]:
    for number in range(length):
        there = sorted(database.tables)
        verb = dice.choice(["insert"] * 12 + ["copy", "join", "like", "rename", "swap", "drop"])
        one, other = dice.sample(there, 2)
        fresh = f"{dice.choice(SCHEMAS)}.n{number}"
        step = {"insert": (verb, one), "like": (verb, fresh, one), "rename": (verb, one, fresh)}.get(
            verb, (verb, one, other)
        )
        named = {one, other} & {*database.triggers, *database.triggers.values()}
        if (verb in ("rename", "swap", "drop") and named) or (verb == "drop" and len(there) < 6):
            continue  # a trigger would go along, or miss its table
        yield step


def transactions(dice: random.Random, steps: list[tuple[str, ...]]) -> Iterator[Transaction]:
    """Definitions commit by themselves, changes of rows now and then."""
    open_ones: list[str] = []
    for verb, *names in steps:
        text = TEXTS[verb].format(*names)
        if open_ones and (verb not in ("insert", "copy", "join") or dice.random() < 0.5):
            yield said(*open_ones)
            open_ones = []
        open_ones.append(text)
        if verb not in ("insert", "copy", "join"):
            yield said(*open_ones)
            open_ones = []
    if open_ones:
        yield said(*open_ones)


@pytest.mark.campaign
def test_a_narrowed_replay_of_any_history_ends_as_the_whole_one_did() -> None:
    dice = thrown("relatives")
    narrower = 0
    for _round in range(rounds(150)):
        first = {f"{dice.choice(SCHEMAS)}.t{number}": ("base", number) for number in range(dice.randint(8, 14))}
        firing = dice.sample(sorted(first), 4)
        triggers: dict[str, str] = {firing[0]: firing[1], firing[2]: firing[3]}
        whole = Pretended(dict(first), triggers)
        steps = []
        for step in history(dice, whole, dice.randint(5, 40)):
            whole.run(step)
            steps.append(step)
        log = list(transactions(dice, steps))
        wanted = dice.sample(sorted(whole.tables), 2)
        needed = relatives(
            [name(one) for one in wanted],
            log,
            nobody,
            triggers={name(table): f"INSERT INTO {other} VALUES (2)" for table, other in triggers.items()},
        )
        only = frozenset(one.shown for one in needed.tables)
        narrowed = Pretended({table: what for table, what in first.items() if table in only}, triggers, only)
        for step in steps:
            narrowed.run(step)
        assert {one: narrowed.tables.get(one) for one in wanted} == {one: whole.tables[one] for one in wanted}, (
            wanted,
            steps,
        )
        assert {one.shown for one in needed.made} >= set(narrowed.tables) - set(first)
        assert {one.shown for one in needed.gone} == {one for one in only if one not in narrowed.tables} & {
            word for step in steps for word in step
        } | ({"a.between"} & only)
        narrower += len(only) < len(first)
    assert narrower > rounds(150) // 10
