"""Where in the product, or in its tests, a class, function or value is defined: by its name, so that a list of names
stays true when files move."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backupd", "api", "storage", "restore", "policies")


@dataclass(frozen=True)
class Definition:
    """``name``: of a function, a class or a value of a module, below a class ``Class.name``."""

    name: str
    path: Path
    node: ast.stmt

    @property
    def file(self) -> str:
        return str(self.path.relative_to(ROOT))


@functools.cache
def _texts(*folders: str) -> dict[Path, str]:
    return {path: path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


@functools.cache
def _definitions(path: Path) -> tuple[Definition, ...]:
    return tuple(_below(path, ast.parse(path.read_text()).body, ""))


def _named(name: str, *folders: str) -> list[Definition]:
    """Functions within functions are left out."""
    last = name.rpartition(".")[2]
    words = re.compile(rf"\b(def|class) {last}\b|^{last} = ", re.MULTILINE)
    return [
        one
        for path, text in _texts(*folders).items()
        if last in text and words.search(text)
        for one in _definitions(path)
        if one.name == name
    ]


def _below(path: Path, body: list[ast.stmt], prefix: str) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Definition(prefix + node.name, path, node)
            if isinstance(node, ast.ClassDef):
                yield from _below(path, node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not prefix:
            yield Definition(node.targets[0].id, path, node)


def in_product(name: str) -> list[Definition]:
    return _named(name, *PACKAGES)


def in_tests(name: str) -> list[Definition]:
    return _named(name, "tests")
