"""Print figures of the source tree, one column for each ``--root``: sizes of files, lines, imports, docstrings.

    scripts/figures [--root PATH]... [--formatted] [--trace] [--cpu] [--json]

PATH is a checkout of any commit (default: this one). Only the product is counted: backupd, api, storage, restore and
policies.

code lines          lines with at least one token, without blank lines, comments, imports and docstrings. Every string
                    that is a statement counts as a docstring, so those below attributes, too
files per folder    Python files directly in a folder, without ``__init__.py``
module              a Python file other than ``__init__.py``; its size is that of all its lines
imported by one     modules that exactly one other file of the product imports, wherever in that file; imports under
                    ``if TYPE_CHECKING`` are no imports, here and in cycles
cycles              groups of modules that import each other; among siblings: groups of neighbours in one package (its
                    modules and subpackages, each with all below it) that do. The five packages at the top are not
                    siblings: the command line stands above the REST interface, which stands above the use cases
public name         a class, function or method whose own name, class and file have no underscore in front
errors stated       of public functions that raise an exception by name: those whose docstring has the word "raise" or
                    the name of one of these exceptions
units stated        of public functions with a parameter or a result that is a plain float: those where the name of the
                    parameter or function, or the docstring, names a unit
trace               a real backup and a real restore asked for over REST, on a private MariaDB (scripts/trace.py)
cpu                 user and system time of each read-only command, and of the process of a job until its work begins,
                    seconds, the median of three runs

``--formatted`` counts a copy that `ruff format` of this checkout has formatted, with its settings: columns of different
commits are comparable only with it. ``--trace`` and ``--cpu`` run the programs of PATH with its own ``.venv``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PACKAGES = ("backupd", "api", "storage", "restore", "policies")
LARGEST_FOLDER = 16
_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_UNITS = re.compile(
    r"second|minute|hour|days?\b|byte|[kmg]i?b\b|percent|share|ratio|fraction|factor|between 0 and 1", re.IGNORECASE
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def modules_of(root: Path) -> dict[str, Module]:
    """By name."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found[name] = Module(name, path, text, ast.parse(text))
    return found


def code_lines(module: Module) -> int:
    left_out: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _LAYOUT:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - left_out)


def imports_of(module: Module, names: set[str]) -> set[str]:
    """Names of the modules of ours that it imports."""
    found: set[str] = set()
    for node in _executed(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(whole if whole in names else node.module for whole in wholes)
    return (found & names) - {module.name}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below it but what stands under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _executed(child)


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach each other (Tarjan's strongly connected components with more than one member)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group: list[str] = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return sorted(groups)


def sibling_cycles(graph: Mapping[str, set[str]], packages: set[str]) -> list[list[str]]:
    found = []
    for package in sorted(packages):
        siblings: dict[str, set[str]] = defaultdict(set)
        depth = package.count(".") + 2
        for name, others in graph.items():
            for other in others:
                if name.startswith(f"{package}.") and other.startswith(f"{package}."):
                    one, another = (".".join(each.split(".")[:depth]) for each in (name, other))
                    siblings[one] |= {another} - {one}
        found += cycles(siblings)
    return found


def public_names(modules: Mapping[str, Module]) -> Iterator[Function | ast.ClassDef]:
    def below(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
        for node in body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                yield node
                if isinstance(node, ast.ClassDef):
                    yield from below(node.body)

    for module in modules.values():
        if not module.path.name.startswith("_") or module.is_package:
            yield from below(module.tree.body)


def raised_names(function: Function) -> set[str]:
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(called, ast.Name) and called.id[0].isupper():
                found.add(called.id)
    return found


def says_errors(function: Function, raised: set[str]) -> bool:
    text = ast.get_docstring(function) or ""
    return "raise" in text.lower() or any(name in text for name in raised)


def float_names(function: Function) -> list[str]:
    """Names of the parameters that are plain floats, and its own when its result is."""

    def is_float(annotation: ast.expr | None) -> bool:
        return annotation is not None and ast.unparse(annotation) in ("float", "float | None")

    of = function.args
    found = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs) if is_float(one.annotation)]
    return found + ([function.name] if is_float(function.returns) else [])


def says_units(function: Function, names: list[str]) -> bool:
    text = ast.get_docstring(function) or ""
    return _UNITS.search(text) is not None or all(_UNITS.search(name) for name in names)


def figures(root: Path) -> dict[str, Any]:
    modules = modules_of(root)
    names = set(modules)
    graph = {name: imports_of(module, names) for name, module in modules.items()}
    counted = {name: code_lines(module) for name, module in modules.items()}
    real = {name: module for name, module in modules.items() if not module.is_package}
    folders = Counter(str(module.path.relative_to(root).parent) for module in real.values())
    importers = Counter(other for others in graph.values() for other in others)
    public = list(public_names(modules))
    functions = [node for node in public if not isinstance(node, ast.ClassDef)]
    raising = [(node, raised) for node in functions if (raised := raised_names(node))]
    floating = [(node, floats) for node in functions if (floats := float_names(node))]
    documented = sum(ast.get_docstring(node) is not None for node in public)
    return {
        "files": len(modules),
        "modules": len(real),
        "largest folder": max(folders.values()),
        f"folders over {LARGEST_FOLDER} files": {
            folder: count for folder, count in folders.most_common() if count > LARGEST_FOLDER
        },
        "code lines": sum(counted.values()),
        "lines": sum(module.lines for module in modules.values()),
        "median module, lines": statistics.median(module.lines for module in real.values()),
        "median module, code lines": statistics.median(counted[name] for name in real),
        "modules over 600 lines": sorted(name for name, module in real.items() if module.lines > 600),
        "modules under 60 lines": sum(module.lines < 60 for module in real.values()),
        "modules imported by one": sum(importers[name] == 1 for name in real),
        "cycles of modules": cycles(graph),
        "cycles among siblings": sibling_cycles(graph, {module.package for module in modules.values()}),
        "public names": len(public),
        "with docstring": documented,
        "with docstring, percent": round(100 * documented / len(public), 1),
        "public functions that raise": len(raising),
        "errors stated": sum(says_errors(node, raised) for node, raised in raising),
        "public functions with plain floats": len(floating),
        "units stated": sum(says_units(node, floats) for node, floats in floating),
    }


def formatted(root: Path, into: Path) -> Path:
    """A copy of the product in ``into``, formatted."""
    for package in PACKAGES:
        shutil.copytree(root / package, into / package, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    subprocess.run(
        [
            str(HERE / ".venv/bin/ruff"),
            "format",
            "--quiet",
            "--no-cache",
            "--config",
            str(HERE / "pyproject.toml"),
            str(into),
        ],
        check=True,
    )
    return into


def column(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        found = figures(formatted(root, Path(folder)) if options.formatted else root)
    for name, wanted in (("trace", options.trace), ("cpu", options.cpu)):
        if wanted:
            found |= driven(root, name)
    return found


def driven(root: Path, what: str) -> dict[str, Any]:
    """What ``scripts/trace.py`` finds with the programs of that checkout."""
    done = subprocess.run(
        [str(root / ".venv/bin/python"), str(HERE / "scripts/trace.py"), what],
        cwd=root,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{name} {count}" for name, count in value.items()) or "0"
    if isinstance(value, list):
        return "<br>".join([str(len(value)), *(", ".join(one) if isinstance(one, list) else one for one in value)])
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """In Markdown."""
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    rows = dict.fromkeys(name for column in columns.values() for name in column)
    lines += [f"| {name} | {' | '.join(shown(column.get(name, '')) for column in columns.values())} |" for name in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, action="append", help="a checkout (repeatable)")
    parser.add_argument("--formatted", action="store_true", help="count a copy that ruff has formatted")
    parser.add_argument("--trace", action="store_true", help="run a backup and a restore; what they pass through")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of each read-only command")
    parser.add_argument("--json", action="store_true", help="JSON in place of a table in Markdown")
    options = parser.parse_args()
    columns = {str(root): column(root.resolve(), options) for root in options.root or [HERE]}
    print(json.dumps(columns, indent=2) if options.json else table(columns))


if __name__ == "__main__":
    main()
