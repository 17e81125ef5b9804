"""Messages say the values that they name: a string with ``{name}`` of a variable around it has its prefix ``f``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.defined import PACKAGES, ROOT

_HOLE = re.compile(r"(?<!\{)\{([A-Za-z_]\w*)(?:[.\[!:][^{}]*)?\}(?!\})")
_FILLED_IN = frozenset({"format", "format_map", "replace"})
PLACEHOLDERS = {("restore/datadir/checks.py", "{target}"): "what people write into the SQL of a check"}
"""Such words that are no variable, though one around them is called so."""


def lost(source: str) -> Iterator[str]:
    """The holes of strings that nothing fills in, though the function around them has a variable of that name."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes = [node for statement in function.body for node in ast.walk(statement)]
            names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            filled = {id(part) for node in nodes if _fills(node) for part in ast.walk(node)}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    if holes := list(_holes(node, names)):
                        whole = ast.get_source_segment(source, node) or ""
                        yield from (hole for hole in holes if "{" + hole not in whole)  # {{name}} is meant
                elif isinstance(node, ast.Constant) and id(node) not in filled:
                    yield from _holes(node, names)


def _holes(string: ast.JoinedStr | ast.Constant, names: set[str]) -> Iterator[str]:
    for part in string.values if isinstance(string, ast.JoinedStr) else [string]:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield from (hole[0] for hole in _HOLE.finditer(part.value) if hole[1] in names)


def _fills(node: ast.AST) -> bool:
    """An f-string, a call of ``format``, and a docstring, which is none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _FILLED_IN
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_message_has_lost_its_f(package: str) -> None:
    found = {
        (str(path.relative_to(ROOT)), hole)
        for path in (ROOT / package).rglob("*.py")
        for hole in lost(path.read_text())
    }
    assert found - PLACEHOLDERS.keys() == set()
    assert {where for where in PLACEHOLDERS if where[0].startswith(f"{package}/")} <= found


@pytest.mark.parametrize(
    ("source", "holes"),
    [
        ("def f(name): say('no {name}')", ["{name}"]),
        ("def f():\n  for a, b in c: raise E('x {a.id} {b!r:>4} {c}')", ["{a.id}", "{b!r:>4}"]),
        ("def f(name): say(f'no {name}', 'of ' '{name}')", ["{name}"]),
        ("def f(name): say(f'no {name} ' 'of {name}')", ["{name}"]),
        ("def f(name): say(f'no {name}' '{{name}}', '{{name}}', '{other}')", []),
        ("def f(name):\n  'With {name}.'\n  return 'a {name}'.format(name=name)", []),
        ("@get('/{name}')\ndef f(name): pass", []),
    ],
)
def test_lost_prefixes_are_found(source: str, holes: list[str]) -> None:
    assert list(lost(source)) == holes
