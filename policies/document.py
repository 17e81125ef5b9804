"""YAML files as trees that know their lines.

A tree is built from the parser's events, not by its constructor: so that duplicate keys, tags and aliases are met
one by one, nothing is ever executed or expanded, and every value keeps its line. Scalars follow YAML 1.2's core
schema (https://yaml.org/spec/1.2.2/#103-core-schema): ``yes`` and ``2026-11-21`` are texts.

From pydantic's errors to problems with a line and an advice.
"""

from __future__ import annotations

import io
import json
import math
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from backupd.model.errors import Problem
from policies.fields import BASE

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_OPEN = 1000
"""Brackets that are open at once, before the parser looks at them: it takes seconds for one line of 50,000. Texts in
quotes may hold some, so the exact depth is counted afterwards."""
MAX_NODES = 100_000
"""Values after expansion of all aliases: nine lines of YAML can otherwise mean billions."""

MAX_PROBLEMS = 100
"""Of one file, and of each sort: nobody reads more at once, and each one costs time."""

_TOO_LARGE = f"is larger than {MAX_BYTES // 1024} KiB: that is no configuration"

Scalar = str | int | float | bool | None

_INT = re.compile(r"[-+]?[0-9]{1,40}")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]{1,20}|0x[0-9a-fA-F]{1,20}")
_BRACKET = re.compile(r"[][{}]")
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
"""What YAML lets in only as an escape (https://yaml.org/spec/1.2.2/#51-character-set)."""
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")


@dataclass(slots=True)
class Node:
    """A value and its 1-based line. ``weight``: values in it, itself included, aliases counted as often as used.

    ``key_lines`` tells where each key of a mapping stands.
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


class UnreadableError(Exception):
    """Reading cannot go on. Never leaves this module."""

    def __init__(self, line: int | None, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


def read_document(path: Path) -> tuple[Node | None, list[Problem]]:
    """The tree of a YAML file whose top is a mapping, and everything wrong with it; no tree when it makes no sense."""
    try:
        text = _decode(_read(path))
    except UnreadableError as error:
        return None, [Problem(str(path), error.line, "", error.message)]
    return parse_document(text, str(path))


def read_text(text: str, file: str) -> tuple[Node | None, list[Problem]]:
    """As ``read_document`` would of a file with this text."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        return None, [Problem(file, None, "", _TOO_LARGE)]
    return parse_document(text.removeprefix("\ufeff"), file)


def parse_document(text: str, file: str) -> tuple[Node | None, list[Problem]]:
    """As ``read_document``, from text; ``file`` is what the problems call it."""
    builder = _Builder(file)
    try:
        for event in _events(text):
            builder.take(event)
        return builder.result(), builder.problems
    except UnreadableError as error:
        return None, [*builder.problems, Problem(file, error.line, "", error.message)]


def _read(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UnreadableError(None, "is a folder, not a file")
        if not stat.S_ISREG(mode):
            raise UnreadableError(None, "is not a regular file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UnreadableError(None, "does not exist") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableError(None, f"cannot be read: {reason}") from error
    if len(raw) > MAX_BYTES:
        raise UnreadableError(None, _TOO_LARGE)
    return raw


def _decode(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableError(1, "is UTF-16: save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UnreadableError(line, f"byte 0x{raw[error.start]:02x} is not UTF-8: save the file as UTF-8") from error


def _events(text: str) -> Iterator[Event]:
    if found := _FORBIDDEN.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise UnreadableError(line, f"holds the control character U+{ord(found[0]):04X}")
    _refuse_open_brackets(text)
    try:
        yield from YAML(typ="safe", pure=True).parse(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UnreadableError(mark.line + 1 if mark else None, _explained(error)) from error
    except (YAMLError, ValueError, OverflowError, AttributeError, AssertionError, IndexError, TypeError) as error:
        # All but the first are how ruamel.yaml meets some malformed directives, tags and escapes: its checks miss them.
        raise UnreadableError(None, f"is not YAML: {(str(error).splitlines() or ['malformed'])[0]}") from error


def _refuse_open_brackets(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(depth - 1, 0)
        if depth > MAX_OPEN:
            raise UnreadableError(text.count("\n", 0, bracket.start()) + 1, f"is nested deeper than {MAX_DEPTH} levels")


def _explained(error: MarkedYAMLError) -> str:
    problem = str(error.problem or "").strip()
    context = str(error.context or "").strip()
    if "'\\t'" in problem or "tab" in problem:
        return "a tab is used for indentation: YAML allows spaces only"
    if "scanning an alias" in context:
        return "a value that begins with * needs quotes"
    if "scanning an anchor" in context:
        return "a value that begins with & needs quotes"
    if "mapping values are not allowed" in problem:
        return "is not YAML: a second ': ' in one line; indent the lines alike, or put the value in quotes"
    return f"is not YAML: {', '.join(part for part in (context, problem) if part)}"


@dataclass(slots=True)
class _Frame:
    """A mapping or list whose end has not come yet."""

    node: Node
    anchor: str | None
    key: str | None = None
    key_line: int = 0


class _Builder:
    def __init__(self, file: str) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._stack: list[_Frame] = []
        self._anchors: dict[str, Node] = {}
        self._open_anchors: set[str] = set()
        self._top: Node | None = None
        self._documents = 0

    def take(self, event: Event) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise UnreadableError(line, "holds a second document (---): one file, one document")
        elif isinstance(event, (MappingStartEvent, SequenceStartEvent)):
            self._refuse_tag(event, line)
            self._open(Node(line, {} if isinstance(event, MappingStartEvent) else []), event.anchor)
        elif isinstance(event, (MappingEndEvent, SequenceEndEvent)):
            self._close()
        elif isinstance(event, AliasEvent):
            self._alias(str(event.anchor), line)
        elif isinstance(event, ScalarEvent):
            self._refuse_tag(event, line)
            self._scalar(event, line)

    def result(self) -> Node | None:
        if self._top is None or (self._top.value is None and not self.problems):
            self._problem(1, "is empty")
            return None
        if not isinstance(self._top.value, dict):
            self._problem(self._top.line, "must be a mapping: lines of `name: value`")
            return None
        return self._top

    def _scalar(self, event: ScalarEvent, line: int) -> None:
        if found := _FORBIDDEN.search(event.value):  # written as an escape: YAML allows it, paths and terminals do not
            raise UnreadableError(line, f"holds the control character U+{ord(found[0]):04X}")
        plain = event.style in (None, "")
        frame = self._stack[-1] if self._stack else None
        if frame is not None and isinstance(frame.node.value, dict) and frame.key is None:
            if plain and event.value == "<<":
                self._problem(line, "merge keys (<<) are not supported: write the keys out")
            if event.anchor:
                self._anchors[event.anchor] = Node(line, event.value)
            self._key(event.value, line)
            return
        node = Node(line, _resolve(event.value) if plain else event.value)
        if event.anchor:
            self._anchors[event.anchor] = node
        self._attach(node)

    def _alias(self, anchor: str, line: int) -> None:
        if anchor in self._open_anchors:
            raise UnreadableError(line, f"*{anchor} is used inside &{anchor}: it would never end")
        node = self._anchors.get(anchor)
        if node is None:
            raise UnreadableError(line, f"*{anchor} names nothing: a value that begins with * needs quotes")
        frame = self._stack[-1] if self._stack else None
        if frame is not None and isinstance(frame.node.value, dict) and frame.key is None:
            if not isinstance(node.value, str):
                raise UnreadableError(line, "a name must be plain text")
            self._key(node.value, line)
            return
        self._attach(node)

    def _key(self, key: str, line: int) -> None:
        frame = self._stack[-1]
        if key in frame.node.key_lines:
            first = frame.node.key_lines[key]
            self._problem(line, f"`{key}` is written twice in the same place, first in line {first}")
        frame.key, frame.key_line = key, line

    def _open(self, node: Node, anchor: str | None) -> None:
        if self._stack and isinstance(self._stack[-1].node.value, dict) and self._stack[-1].key is None:
            raise UnreadableError(node.line, "a name must be plain text, not a list or a mapping")
        if len(self._stack) >= MAX_DEPTH:
            raise UnreadableError(node.line, f"is nested deeper than {MAX_DEPTH} levels")
        self._stack.append(_Frame(node, anchor))
        if anchor:
            self._open_anchors.add(anchor)

    def _close(self) -> None:
        frame = self._stack.pop()
        if frame.anchor:
            self._open_anchors.discard(frame.anchor)
            self._anchors[frame.anchor] = frame.node
        self._attach(frame.node)

    def _attach(self, node: Node) -> None:
        if not self._stack:
            self._top = node
            return
        frame = self._stack[-1]
        frame.node.weight += node.weight
        if frame.node.weight > MAX_NODES:
            raise UnreadableError(node.line, f"means more than {MAX_NODES:,} values: aliases that multiply are refused")
        if isinstance(frame.node.value, list):
            frame.node.value.append(node)
        elif isinstance(frame.node.value, dict) and frame.key is not None:
            frame.node.value.setdefault(frame.key, node)
            frame.node.key_lines.setdefault(frame.key, frame.key_line)
            frame.key = None

    def _refuse_tag(self, event: Event, line: int) -> None:
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._problem(line, f"tags ({str(tag)[:40]}) are not supported: put texts in quotes instead")

    def _problem(self, line: int, message: str) -> None:
        if len(self.problems) >= MAX_PROBLEMS:
            raise UnreadableError(line, f"has more than {MAX_PROBLEMS} problems before this line: correct those first")
        self.problems.append(Problem(self._file, line, "", message))


_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def _resolve(text: str) -> Scalar:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


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
    """How many letters are wrong, missing, too many, or in each other's place."""
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


def place(node: Node, location: Location) -> tuple[int, str]:
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
    line, dotted = place(node, location)
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
    """The schemas that a place may have; a tag in the location picks one of a union."""
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
