"""A letter to people: once as values, shown as text and as HTML. Nothing in it can be taken for markup or a header."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from html import escape
from textwrap import indent

from backupd.process.output import Redactor

_LONGEST = 4000
"""Characters of one text: a mail is no log."""
_LINES = 60
_LINE = 600
_SUBJECT = 160


@dataclass(frozen=True, slots=True)
class Block:
    """One thing that is told. ``tone``: ``error``, ``warning``, ``good`` or empty; ``facts``: pairs of label and
    value."""

    heading: str
    tone: str = ""
    message: str = ""
    hint: str = ""
    detail: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows under headings; the first cell of a row names it."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Letter:
    """``link``: the page that shows more, empty where there is none; ``footer``: who writes."""

    subject: str
    intro: str = ""
    blocks: tuple[Block, ...] = ()
    grids: tuple[Grid, ...] = ()
    link: str = ""
    footer: str = ""

    @property
    def subject_line(self) -> str:
        """One line, however many the names in it have."""
        return one_line(self.subject, _SUBJECT)

    def as_text(self) -> str:
        """The body as plain text."""
        parts = [clean(self.intro)] if self.intro else []
        parts += [_block_text(block) for block in self.blocks]
        parts += [_grid_text(grid) for grid in self.grids]
        if self.link:
            parts.append(f"More: {one_line(self.link, _LONGEST)}")
        return "\n\n".join([*parts, f"-- \n{clean(self.footer)}"]) + "\n"

    def as_html(self) -> str:
        """The body as HTML; every value is escaped."""
        body = [f"<p>{_html(self.intro)}</p>"] if self.intro else []
        body += [_block_html(block) for block in self.blocks]
        body += [_grid_html(grid) for grid in self.grids]
        if self.link.startswith(("http://", "https://")):
            link = escape(one_line(self.link, _LONGEST), quote=True)
            body.append(f'<p><a href="{link}">{link}</a></p>')
        body.append(f'<p style="color:#666;font-size:13px">{_html(self.footer)}</p>')
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="color-scheme" content="light dark"></head>\n'
            '<body style="font-family:sans-serif;line-height:1.45;max-width:46em">\n'
            + "\n".join(body)
            + "\n</body></html>\n"
        )


def one_line(text: str, longest: int) -> str:
    """``text`` on one line, without secrets, and cut where it is too long."""
    line = " ".join("".join(_visible(char) for char in clean(text)).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def clean(text: str) -> str:
    """``text`` without secrets and table data, control characters, and more than anybody reads."""
    redactor = Redactor()
    lines = [redactor.line(line[:_LINE]) for line in text.splitlines()]
    if len(lines) > _LINES:
        lines = [*lines[:_LINES], f"... and {len(lines) - _LINES} more lines"]
    shown = "\n".join("".join(_visible(char) for char in line).rstrip() for line in lines)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} ..."


def _visible(char: str) -> str:
    """Control characters, marks that turn the direction of writing and lone surrogates become something harmless."""
    category = unicodedata.category(char)
    if category == "Cs":
        return "�"
    return " " if category in {"Cc", "Cf", "Zl", "Zp"} else char


def _block_text(block: Block) -> str:
    parts = [one_line(block.heading, _SUBJECT), "=" * min(len(one_line(block.heading, _SUBJECT)), 78)]
    if block.message:
        parts += ["", clean(block.message)]
    if block.hint:
        parts += ["", "What to do next:", indent(clean(block.hint), "    ")]
    if block.detail:
        parts += ["", "What is known:", indent(clean(block.detail), "    ")]
    if block.facts:
        parts += ["", *(f"{label}: {one_line(value, _LONGEST)}" for label, value in block.facts)]
    return "\n".join(parts)


_COLOURS = {"error": "#b3261e", "warning": "#8a5a00", "good": "#1b6e3c"}


def _block_html(block: Block) -> str:
    colour = _COLOURS.get(block.tone, "#555")
    parts = [
        f'<div style="border-left:4px solid {colour};padding:2px 14px;margin:18px 0">',
        f'<h2 style="font-size:17px;margin:4px 0;color:{colour}">{_html(one_line(block.heading, _SUBJECT))}</h2>',
    ]
    if block.message:
        parts.append(f"<p>{_html(block.message)}</p>")
    if block.hint:
        parts.append(f"<p><b>What to do next</b><br>{_html(block.hint)}</p>")
    if block.detail:
        parts.append(
            '<p><b>What is known</b></p><pre style="white-space:pre-wrap;font-size:13px">'
            f"{escape(clean(block.detail))}</pre>"
        )
    if block.facts:
        parts.append(
            "<p>"
            + "<br>".join(f"{escape(label)}: {escape(one_line(value, _LONGEST))}" for label, value in block.facts)
            + "</p>"
        )
    return "\n".join([*parts, "</div>"])


def _grid_text(grid: Grid) -> str:
    rows = [tuple(one_line(cell, 60) for cell in row) for row in (grid.columns, *grid.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(grid.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([one_line(grid.heading, _SUBJECT), "", *lines])


def _grid_html(grid: Grid) -> str:
    cell = 'style="text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid #999"'
    head = "".join(f"<th {cell}>{escape(name)}</th>" for name in grid.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td {cell}>{escape(one_line(value, 200))}</td>" for value in row) + "</tr>"
        for row in grid.rows
    )
    return (
        f'<h2 style="font-size:17px">{_html(grid.heading)}</h2>\n'
        f'<table style="border-collapse:collapse;font-size:14px">\n<tr>{head}</tr>\n{rows}\n</table>'
    )


def _html(text: str) -> str:
    return escape(clean(text)).replace("\n", "<br>")
