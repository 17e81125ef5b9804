"""Each defect that scripts/mutants plants has its place and its test, wherever these are by now."""

from __future__ import annotations

from tests.house.planted import mutants


def test_every_defect_has_exactly_one_place_and_one_test() -> None:
    found = mutants()
    assert len({(one.function, one.old) for one in found}) == len(found) == 57
    for mutant in found:
        path, content = mutant.planted()
        assert content != path.read_bytes()
        compile(content, path, "exec")
        mutant.test_at()
