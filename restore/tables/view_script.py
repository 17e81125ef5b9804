"""The views of several schemas as one script, each behind those that it reads.

The script of one schema has its views in order; where a view reads one of another schema that reads the first schema
again, no order of whole scripts loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from backupd.engine.schema.definition_text import tokens
from backupd.model.table import TableName, quote_name

_SET_DELIMITER = "DELIMITER "
_UTF8 = "SET NAMES utf8mb4;"


@dataclass(frozen=True, slots=True)
class _View:
    """``script``: with the settings that it was made in."""

    name: TableName
    statement: str
    script: str


def joined(scripts: Mapping[str, str]) -> str:
    """Of the scripts of views by schema. A circle, which only names can make, is cut somewhere."""
    views = {view.name: view for schema, text in scripts.items() for view in _views(schema, text)}
    reads = {name: _named(view, views.__contains__) for name, view in views.items()}
    ordered: dict[TableName, None] = {}
    while len(ordered) < len(reads):
        ready = [name for name, of in reads.items() if name not in ordered and of <= ordered.keys()]
        ordered |= dict.fromkeys(ready or [next(name for name in reads if name not in ordered)])
    return "".join(f"USE {quote_name(name.schema)};\n{views[name].script}\n" for name in ordered)


def _views(schema: str, text: str) -> Iterator[_View]:
    lines = iter(text.split("\n"))
    script = [_UTF8]
    for line in lines:
        if not line or line.startswith("--"):
            continue
        script.append(line)
        body = [line]
        delimiter = line.removeprefix(_SET_DELIMITER)
        if line.startswith(_SET_DELIMITER) and delimiter != ";":
            body = list(takewhile(delimiter.__ne__, lines))
            script += [*body, delimiter, _SET_DELIMITER + ";"]
        statement = "\n".join(body)
        if statement.startswith("CREATE "):
            yield _View(TableName(schema, _made(statement)), statement, "\n".join(script))
            script = [_UTF8]


def _made(statement: str) -> str:
    """The name of the view."""
    words = tokens(statement)
    for word in words:
        if word.word == "VIEW":
            name = next(words, None)
            return name.plain if name else ""
    return ""


def _named(view: _View, known: Callable[[TableName], bool]) -> set[TableName]:
    found = set()
    words = list(tokens(view.statement))
    for at, token in enumerate(words):
        if token.kind == "name":
            qualified = at > 1 and words[at - 1].text == "." and words[at - 2].kind == "name"
            found.add(TableName(words[at - 2].plain if qualified else view.name.schema, token.plain))
    return {name for name in found if known(name)} - {view.name}
