"""A document as a tree that knows its lines; from pydantic's errors to problems with a line and an advice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError
from pydantic_core import ErrorDetails

from backupd.model.errors import Problem
from policies.fields import BASE

MAX_PROBLEMS = 100
"""Of one file, and of each sort: nobody reads more at once, and each one costs time."""

Scalar = str | int | float | bool | None


@dataclass(slots=True)
class Node:
    """A value and its 1-based line. ``weight``: number of values in it and this one, aliases counted as often as used.

    ``key_lines``: the line of each key of a mapping.
    """

    line: int
    value: Scalar | dict[str, Node] | list[Node]
    weight: int = 1
    key_lines: dict[str, int] = field(default_factory=dict)

    def plain(self) -> object:
        """The same as ordinary Python values."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def child(self, step: str | int) -> Node | None:
        if isinstance(self.value, dict) and isinstance(step, str):
            return self.value.get(step)
        if isinstance(self.value, list) and isinstance(step, int) and 0 <= step < len(self.value):
            return self.value[step]
        return None

    def at(self, *steps: str | int) -> Node | None:
        """What these steps lead to; None where one of them leads nowhere."""
        found: Node | None = self
        for step in steps:
            found = found.child(step) if found is not None else None
        return found

    def names(self, step: str) -> tuple[str, ...]:
        """The keys of the mapping under ``step``; none where there is no such mapping."""
        found = self.child(step)
        return tuple(found.value) if found is not None and isinstance(found.value, dict) else ()


Model = TypeVar("Model", bound=BaseModel)

Location = Sequence[str | int]

_ALIKE = 0.6
"""The least likeness of a name that is perhaps meant."""
_MOST_MEANT = 3

_MESSAGES = {
    "union_tag_not_found": "its `type` is missing: filesystem, s3 or sftp",
    "dict_type": "must be a mapping: lines of `name: value`",
    "model_type": "must be a mapping: lines of `name: value`",
    "model_attributes_type": "must be a mapping: lines of `name: value`",
    "tuple_type": "must be a list: [one, two]",
    "list_type": "must be a list: [one, two]",
    "string_type": "must be text: put it in quotes",
    "too_short": "must not be empty",
    "string_too_short": "is too short",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "int_from_float": "must be a whole number",
}


def validate(model: type[Model], node: Node, file: Path) -> tuple[Model | None, list[Problem]]:
    """The value of a file, or everything that is wrong with it. Relative paths start at the file's folder."""
    try:
        return model.model_validate(node.plain(), context={BASE: file.absolute().parent}), []
    except ValidationError as error:
        # The input is left out: it may hold what should never have been written there.
        details = error.errors(include_url=False, include_input=False)
        return None, limited((_problem(model, node, str(file), detail) for detail in details), file)


def limited(problems: Iterator[Problem], file: Path) -> list[Problem]:
    """The first of them, and that there are more; those are not even made."""
    first = list(islice(problems, MAX_PROBLEMS))
    if next(problems, None) is not None:
        first.append(
            Problem(str(file), None, "", f"has more problems than the first {MAX_PROBLEMS}: correct these first")
        )
    return first


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean `gold`?``, or what there is, or nothing. Of names that look alike the one that takes the fewest
    slips of a finger; all of them where those are as many."""
    names = sorted(known)
    wanted = word.lower()
    ranks = {
        name: (_slips(wanted, name.lower()), -ratio)
        for name in names
        if (ratio := SequenceMatcher(None, wanted, name.lower()).ratio()) >= _ALIKE
    }
    close = [name for name, rank in ranks.items() if rank == min(ranks.values())]
    if close:
        return f"; did you mean {' or '.join(f'`{name}`' for name in close[:_MOST_MEANT])}?"
    return f"; known: {', '.join(names[:20])}" if names else ""


def _slips(one: str, other: str) -> int:
    """How many letters are wrong, missing, too many, or swapped."""
    before, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        line = [row]
        for column, wanted in enumerate(other, 1):
            least = min(last[column] + 1, line[-1] + 1, last[column - 1] + (letter != wanted))
            if row > 1 and column > 1 and (letter, one[row - 2]) == (other[column - 2], wanted):
                least = min(least, before[column - 2] + 1)
            line.append(least)
        before, last = last, line
    return last[-1]


def line_and_name(node: Node, location: Location) -> tuple[int, str]:
    """The line of what ``location`` leads to, or of the last thing on the way there; and its dotted name."""
    line, dotted = node.line, ""
    for step in location:
        child = node.child(step)
        if child is None:
            continue  # a name that pydantic adds: the tag of a union, "[key]"
        line = node.key_lines.get(step, child.line) if isinstance(step, str) else child.line
        dotted = _join(dotted, step)
        node = child
    return line, dotted


def _join(dotted: str, step: str | int) -> str:
    if isinstance(step, int):
        return f"{dotted}[{step}]"
    return f"{dotted}.{step}" if dotted else step


def _problem(model: type[BaseModel], node: Node, file: str, error: ErrorDetails) -> Problem:
    location, kind = error["loc"], error["type"]
    line, dotted = line_and_name(node, location)
    if kind == "missing":
        dotted = _join(dotted, str(location[-1]))
    return Problem(file, line, dotted, _message(model, error))


def _message(model: type[BaseModel], error: ErrorDetails) -> str:
    kind, location, context = error["type"], error["loc"], error.get("ctx", {})
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    match kind:
        case "missing":
            message = f"is missing{_description(model, location)}"
        case "extra_forbidden":
            message = _unknown(model, location)
        case "union_tag_invalid":
            tag = str(context.get("tag", ""))[:60]
            known = str(context.get("expected_tags", "")).replace("'", "").split(", ")
            message = f"`type: {tag}` is not known{suggestion(tag, known)}"
        case "value_error":
            message = error["msg"].removeprefix("Value error, ")
        case _:
            message = f"must {error['msg'].removeprefix('Input should ').removeprefix('String should ')}"
    return message


def _description(model: type[BaseModel], location: Location) -> str:
    for candidate in _models_at(model, location[:-1]):
        field = next((f for n, f in candidate.model_fields.items() if (f.alias or n) == location[-1]), None)
        if field is not None and field.description:
            example = json.dumps(field.examples[0], ensure_ascii=False) if field.examples else ""
            example = f", for example {location[-1]}: {example}" if example else ""
            return f": {field.description.rstrip('.')}{example}"
    return ""


def _unknown(model: type[BaseModel], location: Location) -> str:
    word, known = str(location[-1]), set[str]()
    for candidate in _models_at(model, location[:-1]):
        refused: Mapping[str, str] = getattr(candidate, "refused", {})
        if word.lower() in refused:
            return refused[word.lower()]
        known |= {field.alias or name for name, field in candidate.model_fields.items()}
    return f"is not known here{suggestion(word, known)}"


def _models_at(model: type[BaseModel], location: Location) -> list[type[BaseModel]]:
    """The schemas that a location may have; a tag in the location picks one of a union."""
    types: list[Any] = [model]
    for step in location:
        tagged = [kind for kind in types if _is_model(kind) and step not in _fields(kind) and _has_tag(kind, step)]
        types = tagged or [inner for kind in types for inner in _step(kind, step)]
    return [kind for kind in types if _is_model(kind)]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _fields(kind: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _has_tag(kind: type[BaseModel], step: str | int) -> bool:
    annotation = _fields(kind).get("type")
    return get_origin(annotation) is Literal and step in get_args(annotation)


def _step(kind: Any, step: str | int) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, RootModel):  # its own name, `root`, leads nowhere
        return _step(kind.model_fields["root"].annotation, step)
    if _is_model(kind):
        return _alternatives(_fields(kind)[str(step)]) if step in _fields(kind) else []
    arguments = [argument for argument in get_args(kind) if argument is not Ellipsis]
    return _alternatives(arguments[-1]) if arguments else []


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation]
