"""Which tables have to be replayed along with those that are wanted.

A replay that is narrowed down to some tables skips the rest. That is exact only when nothing that is skipped had to do
with them: a table that was renamed to one of them, one that a statement copied rows from, parents of foreign keys
(InnoDB's cascades are in no log), one whose triggers wrote to them while statements were logged. They are found here,
from the index of the logs, before anything is fetched. What a statement needs and is not found stops the replay: the
copy holds these tables only, so the server misses it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from backupd.engine.binlog import statements as statementnames
from backupd.engine.binlog.changes import is_cut
from backupd.engine.binlog.statements import effect
from backupd.engine.relay_logs import mistakable
from backupd.engine.sql.dialect import Token, tokens_of
from backupd.model.binlog import STATEMENT_SIZE, Change, ChangeKind, Transaction
from backupd.model.table import TableName, quote_name

_DATA = frozenset({ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE})
_DEFINING = frozenset({ChangeKind.CREATE, ChangeKind.ALTER, ChangeKind.DROP, ChangeKind.RENAME})
_VERBS = frozenset({"CREATE", "ALTER", "DROP", "RENAME", "INSERT", "REPLACE", "UPDATE", "DELETE", "WITH", "LOAD"})
_READS = re.compile(r"\b(?:SELECT|JOIN|TABLE)\b", re.IGNORECASE)
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Relatives:
    """``tables``: all that are replayed, the wanted ones first; under every name that they bore in between, so not each
    is in the backup. ``reasons``: why those that nobody asked for. ``gone``: those that do not exist under this name at
    the end: what the table was renamed to at last, None when it was dropped. ``made``: those that are there at the
    end and that statements made. ``perhaps``: those that CREATE ... IF NOT EXISTS made unless they were there before,
    which nobody knows. ``inseparable``: why these tables cannot be replayed without all others; empty as a rule."""

    tables: tuple[TableName, ...]
    reasons: Mapping[TableName, str]
    gone: Mapping[TableName, TableName | None]
    made: tuple[TableName, ...]
    perhaps: tuple[TableName, ...] = ()
    inseparable: tuple[str, ...] = ()


def relatives(
    tables: Collection[TableName],
    transactions: Iterable[Transaction],
    parents: Callable[[TableName], Collection[TableName]],
    *,
    triggers: Mapping[TableName, str] | None = None,
    views: Mapping[TableName, str] | None = None,
    known: Collection[TableName] = (),
    before: Collection[TableName] | None = None,
    lower_case: bool = False,
) -> Relatives:
    """What ``tables``, named as they are at the end of ``transactions`` (from the backup on, in log order), need.

    ``parents``: tables that the foreign keys of one refer to, when the backup was taken. ``triggers``: tables with
    triggers then, and their text ("" where it is not known); None: nobody knows which have any. ``views`` likewise.
    ``known``: tables that there were then; ``before``: all of them, None where others may have been there, too.
    ``lower_case``: does the server compare names without regard to case?
    Transactions without a statement say nothing here and may be left out.
    """
    fold = _lower if lower_case else _same
    reading = _Reading(fold, {fold(name) for name in known})
    for transaction in transactions:
        if transaction.statement:
            reading.take(transaction)
    firing = None if triggers is None else {fold(name): text for name, text in triggers.items()}
    closure = _Closure(
        reading,
        lambda name: [fold(parent) for parent in parents(name)],
        firing,
        {fold(name): text for name, text in (views or {}).items()},
    )
    wanted = tuple(dict.fromkeys(fold(name) for name in tables))
    reasons = closure.of(wanted)
    whole = (*wanted, *sorted(reasons))
    fates = _Fates(
        frozenset(whole), {fold(name) for name in known}, None if before is None else {fold(name) for name in before}
    )
    for step in reading.steps:
        fates.take(*step)
    return Relatives(
        whole,
        reasons,
        fates.gone(),
        fates.made(surely=True),
        fates.made(surely=False),
        (*reading.wild, *closure.inseparable),
    )


def _same(name: TableName) -> TableName:
    return name


def _lower(name: TableName) -> TableName:
    return TableName(name.schema.lower(), name.table.lower())


@dataclass(frozen=True, slots=True)
class _Link:
    """``together``: when one of these is needed all are, with ``reads``."""

    together: frozenset[TableName]
    reads: frozenset[TableName]


@dataclass(slots=True)
class _Reading:
    """What statements showed, in log order. ``written``: tables whose rows statements changed."""

    fold: Callable[[TableName], TableName]
    seen: set[TableName]
    """All tables that are known to have been there."""
    links: dict[_Link, str] = field(default_factory=dict)
    """And an example: the statement."""
    written: set[TableName] = field(default_factory=set)
    triggers: dict[TableName, list[str]] = field(default_factory=dict)
    views: dict[TableName, list[str]] = field(default_factory=dict)
    steps: list[tuple[ChangeKind, TableName, TableName | None]] = field(default_factory=list)
    """CREATE and DROP with a table, RENAME with both names; ALTER for a CREATE that leaves what is there. A table ""
    means all of its schema."""
    wild: list[str] = field(default_factory=list)
    cut: dict[TableName, str] = field(default_factory=dict)
    """Tables and views of which a definition is not known to its end, and why that is so."""

    def take(self, transaction: Transaction) -> None:
        changes = transaction.changes
        named = {self.fold(TableName(change.schema, change.name)): change for change in changes if change.name}
        by_statement = [name for name, change in named.items() if change.kind in _DATA and not change.rows]
        self.seen.update(named)
        self.written.update(by_statement)
        if len(by_statement) == len(changes) == 1 and not _READS.search(transaction.statement):
            return
        schemas = tuple(dict.fromkeys(change.schema for change in changes if change.schema))
        said = list(statementnames.statements(transaction.statement))
        self._wild(transaction, said, schemas)
        cut = is_cut(transaction.statement) or any(statementnames.hides_names(tokens) for tokens in said)
        if cut:
            self._unknown(transaction, said, named)
        for tokens in said:
            changed = frozenset(named) if len(said) == 1 else self._changed_by(tokens, named, schemas)
            verb = tokens[0].word
            one = verb in _VERBS and any(named[name].kind in _DEFINING or name in by_statement for name in changed)
            if verb == "DROP" and "EXISTS" in (token.word for token in tokens[:6]):
                one = False  # those that are not there are no trouble
            reads = frozenset(self._resolved(statementnames.read_by(tokens), named, schemas))
            if verb == "ALTER" and any(token.word == "EXCHANGE" for token in tokens):
                changed |= reads
            if changed and ((one and len(changed) > 1) or reads - changed):
                self.links.setdefault(_Link(changed, reads), _shortened(transaction.statement))
            self._definitions(tokens, changes, named, schemas, cut=cut)

    def _unknown(self, transaction: Transaction, said: list[list[Token]], named: Mapping[TableName, Change]) -> None:
        """Of a statement that is not known to its end, whether it defines anything or not."""
        first = said[0] if said else []
        if statementnames.has_named_all(first) and not any(statementnames.hides_names(tokens) for tokens in said):
            return
        why = (
            f"{transaction.gtid or f'byte {transaction.start}'} is known from the index in part only, so what else "
            f"it names is not: {_shortened(transaction.statement)}"
        )
        for name, change in named.items():
            if change.kind in _DEFINING - {ChangeKind.DROP}:
                self.cut.setdefault(name, why)
            elif change.kind is ChangeKind.OTHER and (not first or statementnames.is_trigger(first)):
                self.triggers.setdefault(name, []).append("")
        longer = bool(first) and first[0].word == "RENAME" and len(transaction.statement) > STATEMENT_SIZE
        if (longer or not transaction.changes) and len(self.wild) < _NAMED:
            self.wild.append(why)  # not even its changes are all known

    def _changed_by(
        self, tokens: list[Token], named: Mapping[TableName, Change], schemas: tuple[str, ...]
    ) -> frozenset[TableName]:
        """By one of several statements."""
        changes = effect(_text(tokens), "").changes
        return frozenset(
            name
            for name in self._resolved([(one.schema, one.name) for one in changes if one.name], named, schemas)
            if name in named
        )

    def _definitions(
        self,
        tokens: list[Token],
        changes: tuple[Change, ...],
        named: Mapping[TableName, Change],
        schemas: tuple[str, ...],
        *,
        cut: bool,
    ) -> None:
        text = "" if cut else _text(tokens)
        table = statementnames.created_trigger(tokens)
        if table is not None:
            for name in self._resolved((table,), named, schemas):
                self.triggers.setdefault(name, []).append(text)
        pairs = statementnames.renamed(tokens)
        for old, new in pairs:
            before, after = (self._resolved((one,), named, schemas) for one in (old, new))
            if before and after:
                self.steps.append((ChangeKind.RENAME, before[0], after[0]))
        a_view = statementnames.is_view(tokens)
        if tokens[0].word not in {"CREATE", "DROP"} and not a_view:
            return
        perhaps = tokens[0].word == "CREATE" and "IF" in {token.word for token in tokens[1:6]}
        for change in changes:
            if change.kind in (ChangeKind.CREATE, ChangeKind.DROP) or (a_view and change.name):
                name = self.fold(TableName(change.schema, change.name))
                if a_view:
                    self.views.setdefault(name, []).append(text)
                else:
                    self.steps.append((ChangeKind.ALTER if perhaps else change.kind, name, None))

    def _resolved(
        self, names: Iterable[statementnames.Name], named: Iterable[TableName], schemas: tuple[str, ...]
    ) -> list[TableName]:
        """With their schemas: those of the tables that are known to be meant, else all that come into question."""
        found: list[TableName] = []
        for schema, table in names:
            same = [name for name in named if not schema and name.table == self.fold(TableName("", table)).table]
            found += same or [self.fold(TableName(one, table)) for one in ((schema,) if schema else schemas)]
        return found

    def _wild(self, transaction: Transaction, said: Iterable[list[Token]], schemas: tuple[str, ...]) -> None:
        """Changes of data whose tables nobody knows: of a function, say, or written by an account of another kind."""
        if not any(change.kind is ChangeKind.OTHER and not change.name for change in transaction.changes):
            return
        for tokens in said:
            if effect(_text(tokens), schemas[0] if schemas else "").wild:
                if len(self.wild) < _NAMED:
                    self.wild.append(
                        f"{transaction.gtid or f'byte {transaction.start}'} changes data of tables that "
                        f"its statement does not name: {_shortened(transaction.statement)}"
                    )
                return


def _text(tokens: Iterable[Token]) -> str:
    return " ".join(quote_name(token.plain) if token.kind == "name" else token.text for token in tokens)


def _shortened(statement: str) -> str:
    line = " ".join(statement.split())
    return line if len(line) <= 100 else f"{line[:100]} ..."


class _Closure:
    def __init__(
        self,
        reading: _Reading,
        parents: Callable[[TableName], Collection[TableName]],
        triggers: Mapping[TableName, str] | None,
        views: Mapping[TableName, str],
    ) -> None:
        self._reading, self._parents = reading, parents
        self._views = {
            name: [*([views[name]] if name in views else []), *reading.views.get(name, [])]
            for name in dict.fromkeys((*views, *reading.views))
        }
        self._triggers = triggers
        self._former: dict[TableName, set[TableName]] = {}
        for kind, old, new in reading.steps:
            if kind is ChangeKind.RENAME and new is not None:
                self._former.setdefault(new, set()).add(old)
        self.inseparable: list[str] = []
        self._by_pattern: dict[str, list[TableName]] = {}
        for name in sorted(reading.seen):
            self._by_pattern.setdefault(mistakable(name), []).append(name)

    def of(self, wanted: tuple[TableName, ...]) -> dict[TableName, str]:
        """Everything that ``wanted`` needs besides, and why."""
        found: dict[TableName, str] = dict.fromkeys(wanted, "")
        todo = list(wanted)
        by_table: dict[TableName, list[tuple[_Link, str]]] = {}
        for link, why in self._reading.links.items():
            for name in link.together:
                by_table.setdefault(name, []).append((link, why))
        while todo:
            while todo:
                name = todo.pop()
                for other, why in self._needs(name, by_table):
                    if other not in found:
                        found[other] = why
                        todo.append(other)
            for other, why in (*self._firing(found), *self._alike(found)):
                if other not in found:
                    found[other] = why
                    todo.append(other)
        self.inseparable += [
            f"statements changed rows through the view {view.shown}, and a narrowed replay skips them"
            for view, texts in self._views.items()
            if view in self._reading.written
            and view not in wanted
            and any(not text or _touches(text, found) for text in texts)
        ]
        unknown = dict.fromkeys(why for name, why in self._reading.cut.items() if name in found)
        unknown |= dict.fromkeys(
            f"statements changed rows of {name.shown}, and the index does not record what its triggers did"
            for name in found
            if name in self._reading.written
            and any("" in self._reading.triggers.get(one, ()) for one in self._names_of(name))
        )
        self.inseparable += itertools.islice(unknown, _NAMED)
        return {name: why for name, why in found.items() if name not in wanted}

    def _needs(
        self, name: TableName, by_table: Mapping[TableName, list[tuple[_Link, str]]]
    ) -> Iterator[tuple[TableName, str]]:
        for parent in self._parents(name):
            yield parent, f"{name.shown} has a foreign key to it, and cascades are in no binary log"
        for link, why in by_table.get(name, ()):
            for other in sorted(link.together | link.reads):
                yield other, f"a statement names it along with {name.shown}: {why}"
        for text in self._views.get(name, ()):
            for other in _names_in(text, name.schema):
                yield other, f"the view {name.shown} reads it"
        if name in self._reading.written:
            for text in self._fires(name):
                for other in _names_in(text, name.schema):
                    yield other, f"a trigger of {name.shown} names it"

    def _firing(self, found: Mapping[TableName, str]) -> Iterator[tuple[TableName, str]]:
        """Tables whose triggers may have written to those found, while only the statement was logged."""
        for table in sorted(self._reading.written - found.keys()):
            if self._triggers is None:
                yield table, "statements changed its rows, and it may have triggers"
            for text in self._fires(table):
                if not text or _touches(text, found):
                    yield table, "statements changed its rows, and its triggers may write to the others"

    def _alike(self, found: Mapping[TableName, str]) -> Iterator[tuple[TableName, str]]:
        for name in found:
            for other in self._by_pattern.get(mistakable(name), ()):
                yield other, f"the server's filter does not distinguish it from {name.shown}"

    def _fires(self, table: TableName) -> list[str]:
        """The triggers that ``table`` may have: a table keeps its own when it is renamed."""
        texts: list[str] = []
        for name in self._names_of(table):
            texts += [self._triggers[name]] if self._triggers is not None and name in self._triggers else []
            texts += self._reading.triggers.get(name, ())
        return texts

    def _names_of(self, table: TableName) -> list[TableName]:
        """All that it may have been called, its own name first."""
        names = [table]
        for name in names:
            names += sorted(self._former.get(name, set()).difference(names))
        return names


def _touches(text: str, tables: Iterable[TableName]) -> bool:
    """May a body write to one of ``tables``? What it calls may write to any."""
    words = {token.plain.lower() for token in tokens_of(text) if token.may_name}
    return "call" in words or any(table.table.lower() in words for table in tables)


def _names_in(text: str, schema: str) -> Iterator[TableName]:
    """Tables that the body of a trigger or a view names, behind the words that tables stand behind."""
    tokens = list(tokens_of(text))
    for at, token in enumerate(tokens[:-1]):
        behind = token.word in {"INTO", "UPDATE", "FROM", "JOIN"}
        if behind and tokens[at + 1].may_name and tokens[at + 1].word not in {"SELECT", "ON", "OR", "NEW", "OLD"}:
            name = tokens[at + 1].plain
            dotted = at + 3 < len(tokens) and tokens[at + 2].word == "." and tokens[at + 3].may_name
            yield TableName(name, tokens[at + 3].plain) if dotted else TableName(schema, name)


class _Fates:
    """What became of each name."""

    def __init__(
        self, names: frozenset[TableName], known: Collection[TableName], before: Collection[TableName] | None
    ) -> None:
        self._names, self._known, self._before = names, known, before
        self._there: dict[TableName, bool] = {}
        """Of each name that something happened to: is there a table of that name now?"""
        self._made: dict[TableName, bool] = {}
        """Those that are there now and that statements made; False: unless they were there before."""
        self._went: dict[TableName, TableName | None] = {}

    def take(self, kind: ChangeKind, name: TableName, new: TableName | None) -> None:
        if not name.table:
            if kind is ChangeKind.DROP:
                for one in self._names:
                    if one.schema == name.schema:
                        self._leave(one, None)
        elif kind in (ChangeKind.CREATE, ChangeKind.ALTER):
            self._come(name, perhaps=kind is ChangeKind.ALTER)
        else:
            self._leave(name, new)
            if new is not None:
                self._come(new)

    def _come(self, name: TableName, *, perhaps: bool = False) -> None:
        before = self._there.get(name, name in self._known)
        if not (perhaps and before):
            never = self._before is not None and name not in self._before
            self._made[name] = not perhaps or name in self._there or never
        self._there[name] = True
        self._went.pop(name, None)

    def _leave(self, name: TableName, to: TableName | None) -> None:
        self._made.pop(name, None)
        self._there[name] = False
        for old, now in self._went.items():
            if now == name:
                self._went[old] = to
        self._went[name] = to

    def gone(self) -> dict[TableName, TableName | None]:
        return {name: self._went.get(name) for name in sorted(self._names) if self._there.get(name) is False}

    def made(self, *, surely: bool) -> tuple[TableName, ...]:
        return tuple(name for name in sorted(self._names) if self._made.get(name) is surely)
