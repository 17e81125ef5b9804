"""Each contract of pyproject.toml refuses an import that breaks it. A contract that names a room which is no longer
there, or ignores too much, would be kept by anything."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

import grimp
import pytest
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

from tests.house.defined import ROOT

configure()
OPTIONS = read_user_options(str(ROOT / "pyproject.toml"))
KINDS: dict[str, Any] = {
    "layers": LayersContract,
    "forbidden": ForbiddenContract,
    "acyclic_siblings": AcyclicSiblingsContract,
}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    """Every import of the product."""
    first, *others = OPTIONS.session_options["root_packages"]
    return grimp.build_graph(first, *others, include_external_packages=True, cache_dir=None)


def _kept(contract: dict[str, Any], imports: grimp.ImportGraph) -> bool:
    checked = KINDS[contract["type"]](contract["name"], OPTIONS.session_options, contract)
    return bool(checked.check(imports, verbose=False).kept)


def _violations(contract: dict[str, Any], imports: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    """Pairs of importer and imported, each of which the contract has to refuse."""
    if contract["type"] == "layers":
        for container in contract.get("containers", [""]):
            layers = [
                [".".join(filter(None, (container, room.strip()))) for room in layer.split("|")]
                for layer in contract["layers"]
            ]
            for upper, lower in pairwise(layers):
                yield from ((below, above) for above in upper for below in lower)
            yield from (pair for layer in layers for pair in pairwise(layer))
    elif contract["type"] == "forbidden":
        allowed = {line.partition(" ")[0] for line in contract.get("ignore_imports", ())}
        inside = tuple(name.rstrip(".*") for name in allowed)
        for source in contract["source_modules"]:
            module = next(
                name
                for name in sorted(imports.find_descendants(source) or {source})
                if not any(name == room or name.startswith(f"{room}.") for room in inside)
            )
            yield from ((module, library) for library in contract["forbidden_modules"])
    else:
        for package in contract["ancestors"]:
            importer, imported = next(
                (one, other)
                for one in sorted(imports.find_children(package))
                for other in sorted(imports.find_children(package) - {one})
                if imports.find_shortest_chains(other, one, as_packages=True)
            )
            yield importer, imported


@pytest.mark.parametrize("contract", OPTIONS.contracts_options, ids=lambda contract: contract["name"])
def test_a_contract_refuses_what_breaks_it(contract: dict[str, Any], imports: grimp.ImportGraph) -> None:
    assert _kept(contract, deepcopy(imports))
    violations = list(_violations(contract, imports))
    assert violations
    passed = []
    for importer, imported in violations:
        planted = deepcopy(imports)
        if imported not in planted.modules:
            planted.add_module(imported, is_squashed=True)
        planted.add_import(importer=importer, imported=imported)
        if _kept(contract, planted):
            passed.append((importer, imported))
    assert passed == []
