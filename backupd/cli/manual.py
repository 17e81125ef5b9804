"""The manual pages, made from what `--help` and the reference of the configuration are made from: ``backupd(1)`` with
every command, ``backupd.yaml(5)`` with every setting. ``python -m backupd.cli.manual FOLDER`` writes them there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from backupd.cli.main import EXIT_CODES, app
from backupd.cli.session import CONFIG_VARIABLE, DEFAULT_CONFIG
from policies.reference import reference

PROGRAM, SETTINGS = "backupd.1", "backupd.yaml.5"
_FILES = (
    (str(DEFAULT_CONFIG), "the configuration, see backupd.yaml(5)"),
    ("/etc/backupd/servers.d/*.yaml", "more servers"),
    ("/etc/backupd/policies/*.yaml", "the policies, one in each file"),
    ("/var/lib/backupd/catalog.db", "the catalog: what was taken, where it is, what was proved"),
)
_ENVIRONMENT = (
    (CONFIG_VARIABLE, f"the configuration file, where --config names none. Default: {DEFAULT_CONFIG}"),
    ("BACKUPD_RUNTIME", "the folder for sockets and option files of programs that run. Default: below /run or /tmp"),
    ("COLUMNS", "how wide tables may be"),
)
_ROW = re.compile(r"\| `?(?P<name>[^|`]+)`? \| (?P<what>.*) \| (?P<default>[^|]*) \|")
_MARK = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\[([^]]+)\]\([^)]+\)")


def pages() -> dict[str, str]:
    """Each page by the name of its file."""
    return {PROGRAM: _program(), SETTINGS: _settings()}


def write(folder: Path) -> tuple[Path, ...]:
    """Write the pages into this folder, which is made; gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in pages().items():
        file = folder / name
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return tuple(written)


# -- the program


def _program() -> str:
    root: Any = typer.main.get_command(app)
    context = typer.Context(root, info_name="backupd")
    return "\n".join(
        [
            _head("BACKUPD", 1),
            ".SH NAME",
            f"backupd \\- {_text(root.help.rstrip('.'))}",
            ".SH SYNOPSIS",
            ".B backupd",
            _text("[OPTIONS] COMMAND [ARGS]..."),
            ".SH DESCRIPTION",
            *_paragraphs(
                "backupd takes backups of MySQL, Percona Server and MariaDB, archives their binary logs, restores "
                "them, and proves by test restores that it can. `backupd serve` does all that as policies say; every "
                "other command does one thing now. To begin with: `backupd check`."
            ),
            ".SH OPTIONS",
            *_options(root, context),
            ".SH COMMANDS",
            *(line for name, one in root.commands.items() for line in _command(one, name, context)),
            ".SH EXIT STATUS",
            *_terms(tuple(text.split(": ", 1)) for text in EXIT_CODES),
            ".SH ENVIRONMENT",
            *_terms(_ENVIRONMENT),
            ".SH FILES",
            *_terms(_FILES),
            ".SH SEE ALSO",
            ".BR backupd.yaml (5)",
            "",
        ]
    )


def _command(command: Any, name: str, above: typer.Context) -> Iterator[str]:
    """A command, or those of a group, hidden ones left out."""
    if command.hidden:
        return
    context = typer.Context(command, info_name=name, parent=above)
    if (inner := getattr(command, "commands", None)) is not None:
        yield f".SS {_text(context.command_path)}"
        yield from _paragraphs(command.help or "")
        for below, one in inner.items():
            yield from _command(one, below, context)
        return
    usage = " ".join(piece.replace("{", "").replace("}", "") for piece in command.collect_usage_pieces(context))
    yield f".SS {_text(f'{context.command_path} {usage}'.replace('[[', '[').replace(']]', ']'))}"
    yield from _paragraphs(command.help or "")
    yield from _options(command, context)


def _options(command: Any, context: typer.Context) -> Iterator[str]:
    """Arguments and options with their help, as `--help` has them."""
    records = (one.get_help_record(context) for one in command.get_params(context))
    yield from _terms(record for record in records if record is not None)


# -- its settings


def _settings() -> str:
    lines = iter(reference().splitlines())
    body = list(_from_markdown(lines))
    return "\n".join(
        [
            _head("BACKUPD.YAML", 5),
            ".SH NAME",
            "backupd.yaml \\- configuration and policies of backupd",
            ".SH DESCRIPTION",
            *body,
            ".SH SEE ALSO",
            ".BR backupd (1)",
            "",
        ]
    )


def _from_markdown(lines: Iterator[str]) -> Iterator[str]:
    """The reference has headings, paragraphs, items, tables of three columns, and blocks of YAML; nothing else."""
    for line in lines:
        if line.startswith("```"):
            yield ".PP\n.RS 4\n.nf"
            for inner in lines:
                if inner.startswith("```"):
                    break
                yield _text(inner) or "\\&"
            yield ".fi\n.RE"
        elif line.startswith("### "):
            yield f".SS {_text(line.removeprefix('### '))}"
        elif line.startswith("## "):
            yield f".SH {_text(line.removeprefix('## ').upper())}"
        elif line.startswith("* "):
            yield f".IP \\(bu 2\n{_marked(line.removeprefix('* '))}"
        elif (row := _ROW.fullmatch(line)) and row["name"] != "name":
            default = row["default"].strip()
            ending = f" Default: {default}." if default and not default.startswith("**") else ""
            ending = " Required." if default.startswith("**") else ending
            yield f".TP\n.B {_text(row['name'])}\n{_marked(row['what'] + ending)}"
        elif not line:
            yield ".PP"
        elif not line.startswith(("# ", "<!--", "|")):
            yield _marked(line.strip())


# -- roff


def _head(title: str, section: int) -> str:
    return f'.TH {title} {section} "" "backupd {version("backupd")}" "backupd"\n.ad l'


def _text(text: str) -> str:
    """``text`` as it is, whatever it begins with."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _marked(text: str) -> str:
    """Markdown's code and emphasis in bold."""
    found, place = [], 0
    for mark in _MARK.finditer(text):
        found.append(_text(text[place : mark.start()]))
        shown = mark[1] or mark[2]
        found.append(f"\\fB{_text(shown)}\\fR" if shown else _text(mark[3]))
        place = mark.end()
    return "".join([*found, _text(text[place:])])


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield ".PP"
        yield _marked(" ".join(paragraph.split()))


def _terms(pairs: Iterable[Sequence[str]]) -> Iterator[str]:
    for name, about in pairs:
        words = _marked(" ".join(about.split())) or "\\&"
        yield f".TP\n.B {_text(name)}\n{words}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages into the folder that the command line names; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m backupd.cli.manual", description="Write the manual pages.")
    parser.add_argument("folder", type=Path, help="where to; it is made")
    for file in write(parser.parse_args(argv).folder):
        sys.stdout.write(f"{file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
