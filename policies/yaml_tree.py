"""YAML files as trees that know their lines.

A tree is built from the parser's events, not by its constructor: so that duplicate keys, tags and aliases are met
one by one, nothing is ever executed or expanded, and every value keeps its line. Scalars follow YAML 1.2's core
schema (https://yaml.org/spec/1.2.2/#103-core-schema): ``yes`` and ``2026-11-21`` are texts.

The events come from libyaml, which PyYAML brings along: it takes a twentieth of the time of a parser in Python.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
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
from policies.document import MAX_PROBLEMS, Node, Scalar

_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The second one is in Python: of a PyYAML that was built without libyaml."""

MAX_BYTES = 1024 * 1024
_PIECE = 64 * 1024
"""Bytes that are read at once."""
MAX_DEPTH = 32
MAX_OPEN = 1000
"""Brackets that are open at once, before the parser looks at them: it takes seconds for one line of 50,000. Texts in
quotes may hold some, so the exact depth is counted afterwards."""
MAX_NODES = 100_000
"""Values after expansion of all aliases: nine lines of YAML can otherwise mean billions."""

_TOO_LARGE = f"is larger than {MAX_BYTES // 1024} KiB: that is no configuration"

_INT = re.compile(r"[-+]?[0-9]{1,40}")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]{1,20}|0x[0-9a-fA-F]{1,20}")
_BRACKET = re.compile(r"[][{}]")
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
"""What YAML lets in only as an escape (https://yaml.org/spec/1.2.2/#51-character-set)."""
_BREAK = re.compile("[\x85\u2028\u2029]")
"""Ends of lines in YAML 1.1 and not in 1.2: what an editor shows as one comment would hold settings."""
_OF_NUMBERS = "+-.0123456789"
"""What any number begins with."""
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")


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
        # Opened before it is looked at, so that it is the same file; the flags keep that from waiting for who writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise UnreadableError(None, "is a folder, not a file")
            if not stat.S_ISREG(mode):
                raise UnreadableError(None, "is not a regular file")
            raw = b""
            while len(raw) <= MAX_BYTES and (more := os.read(descriptor, _PIECE)):
                raw += more
        finally:
            os.close(descriptor)
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
    if found := _BREAK.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise UnreadableError(line, f"holds the line separator U+{ord(found[0]):04X}: end lines as usual")
    _refuse_open_brackets(text)
    try:
        parser = _LOADER(text)
        try:
            while parser.check_event():
                yield parser.get_event()
        finally:
            parser.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at_tab = error.problem_mark is not None and text[error.problem_mark.index :].startswith("\t")
        raise UnreadableError(mark.line + 1 if mark else None, _explained(error, at_tab=at_tab)) from error
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # the latter two: without libyaml
        raise UnreadableError(None, f"is not YAML: {(str(error).splitlines() or ['malformed'])[0]}") from error


def _refuse_open_brackets(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(depth - 1, 0)
        if depth > MAX_OPEN:
            raise UnreadableError(text.count("\n", 0, bracket.start()) + 1, f"is nested deeper than {MAX_DEPTH} levels")


def _explained(error: yaml.MarkedYAMLError, *, at_tab: bool) -> str:
    problem = str(error.problem or "").strip()
    context = str(error.context or "").strip()
    if at_tab or "tab" in problem:
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
        if isinstance(event, ScalarEvent):
            self._refuse_tag(event.tag, line)
            self._scalar(event, line)
        elif isinstance(event, (MappingStartEvent, SequenceStartEvent)):
            self._refuse_tag(event.tag, line)
            self._open(Node(line, {} if isinstance(event, MappingStartEvent) else []), event.anchor)
        elif isinstance(event, (MappingEndEvent, SequenceEndEvent)):
            self._close()
        elif isinstance(event, AliasEvent):
            self._alias(str(event.anchor), line)
        elif isinstance(event, DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise UnreadableError(line, "holds a second document (---): one file, one document")

    def result(self) -> Node | None:
        if self._top is None or (self._top.value is None and not self.problems):
            self._problem(1, "is empty")
            return None
        if not isinstance(self._top.value, dict):
            self._problem(self._top.line, "must be a mapping: lines of `name: value`")
            return None
        return self._top

    def _scalar(self, event: ScalarEvent, line: int) -> None:
        # Written as an escape, which are in such quotes alone: YAML allows it, paths and terminals do not.
        if event.style == '"' and (found := _FORBIDDEN.search(event.value)):
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
            self._problem(line, f"`{key}` is written twice, first in line {first}")
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

    def _refuse_tag(self, tag: str | None, line: int) -> None:
        if tag is not None:
            self._problem(line, f"tags ({tag[:40]}) are not supported: put texts in quotes instead")

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
    if text[0] not in _OF_NUMBERS:
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text
