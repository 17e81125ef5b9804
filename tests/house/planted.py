"""Defects of one expression each that a test has to notice: read from mutants.toml, found in the sources, planted.

A defect is named by the function and by the text of the expression, compared without its layout, not by a file or line:
the same list is planted before and after files move and are formatted anew.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.house.defined import Definition, in_product, in_tests

LIST = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """In ``function`` the expression ``old`` becomes ``new``; ``test``: the test function that fails then."""

    function: str
    old: str
    new: str
    test: str

    def place(self) -> tuple[Definition, ast.expr]:
        """Raises LookupError unless there is exactly one."""
        wanted = ast.dump(ast.parse(self.old, mode="eval").body)
        found = [
            (one, node)
            for one in in_product(self.function)
            for node in ast.walk(one.node)
            if isinstance(node, ast.expr) and ast.dump(node) == wanted
        ]
        if len(found) != 1:
            raise LookupError(f"{self.function}: `{self.old}` is there {len(found)} times, not once")
        return found[0]

    def planted(self) -> tuple[Path, bytes]:
        """The file that it is in, and its bytes with the defect. Raises LookupError."""
        definition, node = self.place()
        raw = definition.path.read_bytes()
        lines = raw.splitlines(keepends=True)
        if node.end_lineno is None or node.end_col_offset is None:
            raise LookupError(f"{self.function}: nothing says where `{self.old}` ends")
        begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        return definition.path, raw[:begin] + f"({self.new})".encode() + raw[end:]

    def test_at(self) -> Definition:
        """Raises LookupError."""
        found = in_tests(self.test)
        if len(found) != 1:
            raise LookupError(f"there are {len(found)} tests {self.test}, not one")
        return found[0]


def mutants() -> list[Mutant]:
    return [Mutant(**one) for one in tomllib.loads(LIST.read_text())["mutant"]]
