"""How the definition of a live table differs from that of a restored one, in words. Pure.

What the server prints of both is compared, so another version of it that prints the same in other words makes no
difference; foreign keys and triggers are those of the backup, since a staged table has none yet. Values of counters
differ always, and names of constraints may have to: neither counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from backupd.engine.server.definitions import TableDefinition
from backupd.engine.sql.dialect import Token, tokens_of, word_at
from backupd.engine.sql.tables import NO_ACTION, ForeignKey
from backupd.model.table import quote_name
from restore.cutover.keys_and_triggers import parse_triggers
from restore.cutover.staging_schema import parts

LIVE_ONLY = "the live table has, the restored one has not: "
RESTORED_ONLY = "the restored one has, the live table has not: "
_SHOWN = 300


def definition_differs(
    staged: TableDefinition, live: TableDefinition, restored: TableDefinition | None = None, *, triggers: bool = True
) -> tuple[str, ...]:
    """``staged``: as the server prints it now; ``restored``: as the backup has it, with what a staged table lacks;
    None: that is not compared, and without ``triggers`` these are not. Columns that only one of both has are not
    reported. Raises ValueError for text that no server prints.
    """
    if staged.is_sequence or live.is_sequence:
        one, other = _sequence(staged), _sequence(live)
        return () if one == other else (f"it was {one}, now {other}",)
    found = [*_columns(staged, live), *_listed(_keys(staged), _keys(live)), *_options(staged, live)]
    if restored is not None:
        found += _listed(map(_foreign_key, restored.foreign_keys), map(_foreign_key, live.foreign_keys))
        if triggers:
            found += _triggers(restored.triggers, live.triggers)
    return tuple(found)


def _sequence(definition: TableDefinition) -> str:
    found = list(tokens_of(definition.create))
    if definition.is_sequence:
        return "a sequence " + _line(definition.create[found[2].end :])
    return "a table"


def _columns(staged: TableDefinition, live: TableDefinition) -> Iterator[str]:
    ours, theirs = ({column.name.lower(): column for column in one.columns.all} for one in (staged, live))
    both = [name for name in ours if name in theirs]
    for name in both:
        one, other = ours[name], theirs[name]
        if one.rest != other.rest:
            yield (
                f"column {quote_name(one.name)} was {_line(f'{one.type} {one.rest}')}, "
                f"now {_line(f'{other.type} {other.rest}')}"
            )
    if both != [name for name in theirs if name in ours]:
        yield "the columns stand in another order"


def _keys(definition: TableDefinition) -> Iterator[str]:
    """Keys and checks; checks without their names."""
    for item in parts(definition.create)[1]:
        words = list(tokens_of(item))
        if words[0].kind == "name" or [word.word for word in words[2:4]] == ["FOREIGN", "KEY"]:
            continue
        yield item[words[2].start :] if words[0].word == "CONSTRAINT" else item


def _foreign_key(key: ForeignKey) -> str:
    """Without its name; a parent in the same schema without that."""
    parent = quote_name(key.parent.table) if key.parent.schema == key.child.schema else str(key.parent)
    columns, others = (
        ", ".join(quote_name(name.lower()) for name in names) for names in (key.columns, key.parent_columns)
    )
    rules = "".join(
        f" ON {change} {rule}"
        for change, rule in (("DELETE", key.on_delete), ("UPDATE", key.on_update))
        if rule not in NO_ACTION
    )
    return f"FOREIGN KEY ({columns}) REFERENCES {parent} ({others}){rules}"


def _listed(staged: Iterable[str], live: Iterable[str]) -> Iterator[str]:
    ours, theirs = Counter(staged), Counter(live)
    yield from (f"{LIVE_ONLY}{_line(text)}" for text in (theirs - ours).elements())
    yield from (f"{RESTORED_ONLY}{_line(text)}" for text in (ours - theirs).elements())


def _options(staged: TableDefinition, live: TableDefinition) -> Iterator[str]:
    ours, theirs = (_options_of(parts(one.create)[2]) for one in (staged, live))
    for name in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(name), theirs.get(name)
        if one == other:
            continue
        if one and other:
            yield f"{name} was {_line(one)}, now {_line(other)}"
        else:
            value = other if one is None else one
            yield f"{LIVE_ONLY if one is None else RESTORED_ONLY}{name}{f' {_line(value)}' if value else ''}"


def _options_of(text: str) -> Mapping[str, str]:
    """By their names; those that have no value have an empty one."""
    found: dict[str, str] = {}
    words = list(tokens_of(text))
    at = 0
    while at < len(words):
        word = words[at]
        if [one.word for one in words[at : at + 2]] == ["PARTITION", "BY"]:
            found["PARTITION BY"] = " ".join(one.text for one in words[at + 2 :])
            break
        equals = next((index for index in (at + 1, at + 2) if word_at(words, index) == "="), 0)
        two = equals == at + 2 and word.word in ("DEFAULT", "DATA", "INDEX")
        if equals == at + 1 or two:
            found[f"{word.word} {words[at + 1].word}" if two else word.word or word.text] = _value(words[equals + 1 :])
            at = equals + 1 + _length(words[equals + 1 :])
        else:
            found[word.text] = ""
            at += 1
    found.pop("AUTO_INCREMENT", None)
    return found


def _value(words: Sequence[Token]) -> str:
    return " ".join(word.text for word in words[: _length(words)])


def _length(words: Sequence[Token]) -> int:
    """Of a value: one word, or all of a list in parentheses."""
    depth = 0
    for at, word in enumerate(words):
        depth += (word.word == "(") - (word.word == ")")
        if depth <= 0:
            return at + 1
    return len(words)


def _triggers(restored: str, live: str) -> Iterator[str]:
    ours, theirs = ({trigger.name: trigger for trigger in parse_triggers(one)} for one in (restored, live))
    yield from (f"{LIVE_ONLY}trigger {quote_name(name)}" for name in theirs if name not in ours)
    for name, trigger in ours.items():
        other = theirs.get(name)
        if other is None:
            yield f"{RESTORED_ONLY}trigger {quote_name(name)}"
        elif _without_table(trigger.statement) != _without_table(other.statement):
            yield f"trigger {quote_name(name)} was {_line(trigger.statement)}, now {_line(other.statement)}"
        elif trigger.setting != other.setting:
            yield (
                f"trigger {quote_name(name)} was made with {_line(trigger.setting.removeprefix('SET '))}, "
                f"now {_line(other.setting.removeprefix('SET '))}"
            )


def _without_table(statement: str) -> str:
    """The table of a trigger may have another name now."""
    head, _, body = statement.partition(" FOR EACH ROW ")
    return f"{head.rpartition(' ON ')[0]} FOR EACH ROW {body}"


def _line(text: str) -> str:
    """On one line, and not too long a one."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ..."
