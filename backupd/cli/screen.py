"""Answers on stdout (for people or as one JSON document), everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from backupd.model.errors import BackupdError, ConfigurationError, DamagedError

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 400
"""Columns when nobody looks: wide enough that no table ever cuts a name."""


def is_live(stream: TextIO) -> bool:
    """Is ``stream`` a terminal that can move its cursor?"""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def console_for(stream: TextIO) -> Console:
    """A rich console that never guesses: colours on a terminal only, unlimited width elsewhere."""
    from rich.console import Console

    return Console(
        file=stream,
        width=None if stream.isatty() else _PIPED_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


class Screen:
    """Where one command shows its result. ``as_json`` leaves out everything for people."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, value: Any) -> None:
        """Print ``value`` as the command's only document; nothing unless JSON was asked for."""
        if self.as_json:
            json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
            sys.stdout.write("\n")
            sys.stdout.flush()

    def line(self, text: str = "", *, style: str = "") -> None:
        """One line for people, never wrapped, so that it can be copied."""
        if not self.as_json:
            console_for(sys.stdout).print(text, style=style or None, soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """A table for people. Long values fold instead of being cut; ``right`` names columns of numbers."""
        if self.as_json:
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(Text(column), overflow="fold", justify="right" if column in right else "left")
        for row in rows:
            table.add_row(*(Text(value) for value in row))
        console_for(sys.stdout).print(table)

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values under each other, for people."""
        known = [(name, value) for name, value in pairs if value]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            self.line(f"{name:<{width}}  {value}")

    def warn(self, text: str) -> None:
        """A line on stderr, also with JSON."""
        console_for(sys.stderr).print(f"warning: {text}", style="yellow", soft_wrap=True)

    def error(self, error: BackupdError) -> None:
        """Message, detail and hint on stderr; with JSON also the document ``{"error": ...}`` on stdout."""
        console = console_for(sys.stderr)
        console.print(f"error: {error.message}", style="bold red", soft_wrap=True)
        for line in error.detail.splitlines():
            console.print(f"  {line}", soft_wrap=True)
        if error.hint:
            console.print(f"hint: {error.hint}", style="cyan", soft_wrap=True)
        self.document({"error": error_as_json(error)})


def error_as_json(error: BackupdError) -> dict[str, Any]:
    """``message``, ``detail``, ``hint``, ``type``; and each problem or damage where there are several."""
    document: dict[str, Any] = {
        "message": error.message,
        "detail": error.detail,
        "hint": error.hint,
        "type": error.problem_type,
    }
    if isinstance(error, ConfigurationError):
        document["problems"] = [
            {"file": problem.file, "line": problem.line, "field": problem.field, "message": problem.message}
            for problem in error.problems
        ]
    if isinstance(error, DamagedError):
        document["damages"] = list(error.damages)
    return document
