from __future__ import annotations

import pytest

from storage.destination import Capability, as_tree
from tests.contract.destination import DestinationContract, TreeContract
from tests.support.stores.memory import MemoryDestination


class TestMemory(TreeContract):
    @pytest.fixture
    def destination(self) -> MemoryDestination:
        return MemoryDestination("memory")

    @pytest.fixture
    def bare(self) -> MemoryDestination:
        return MemoryDestination("memory", initialised=False)


class TestMemoryWithoutTrees(DestinationContract):
    @pytest.fixture
    def destination(self) -> MemoryDestination:
        return MemoryDestination("memory", tree=False)

    @pytest.fixture
    def bare(self) -> MemoryDestination:
        return MemoryDestination("memory", tree=False, initialised=False)


def test_the_capability_decides_whether_there_are_trees() -> None:
    assert as_tree(MemoryDestination("m")) is not None
    assert as_tree(MemoryDestination("m", tree=False)) is None
    assert MemoryDestination("m", tree=False).capabilities is Capability.NONE
