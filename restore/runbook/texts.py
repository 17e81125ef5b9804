"""The texts of runbooks, in files beside this one: ``NAME.md.j2`` (Markdown, Jinja) and ``NAME.sh`` (POSIX shell).

Shell is cut into blocks, each under a line ``# --- BLOCK``. ``@word@`` stands for a value, so that shellcheck can read
the file as it is; alone at the left margin it stands for lines, for none where the value is empty. What shellcheck is
told (``# shellcheck ...``) is in no runbook.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_DIRECTIVE = re.compile(r"^ *# shellcheck .*\n", re.MULTILINE)
_BLOCK = re.compile(r"^# --- ([a-z0-9_]+)\n", re.MULTILINE)
_LINE = re.compile(r"^@([a-z_]+)@\n", re.MULTILINE)
_VALUE = re.compile(r"@([a-z_]+)@")


@cache
def _blocks(name: str) -> dict[str, str]:
    """By their names; what is before the first one is ""."""
    head, *parts = _BLOCK.split(_DIRECTIVE.sub("", (_HERE / f"{name}.sh").read_text(encoding="utf-8")))
    return {"": head, **dict(zip(parts[::2], parts[1::2], strict=True))}


def shell(name: str, block: str = "", **values: object) -> str:
    """A block of ``NAME.sh`` with its ``values``, without line ends around it. What a value holds stays as it is."""
    text = _LINE.sub(lambda found: found[0] if values[found[1]] else "", _blocks(name)[block].strip("\n"))
    return _VALUE.sub(lambda found: str(values[found[1]]), text)


def document(name: str, **values: object) -> str:
    """The Markdown of ``NAME.md.j2``. Raises jinja2.UndefinedError where it names a value that is not given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    texts = Environment(  # noqa: S701 - Markdown for people, nothing that a browser reads
        loader=FileSystemLoader(_HERE),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return texts.get_template(f"{name}.md.j2").render(values)
