from __future__ import annotations

from backupd.model.proof import Phase
from backupd.process.run_context import RunContext, Stopwatch


def test_phases_of_a_part_are_its_own_and_those_of_the_whole() -> None:
    reported: list[Phase] = []
    whole = RunContext(watch=Stopwatch(reported.append))
    with whole.watch.phase("fetched", 7):
        pass
    part = whole.with_own_phases()
    with part.watch.phase("prepared"):
        pass
    assert [phase.name for phase in part.watch.phases] == ["prepared"]
    assert [phase.name for phase in whole.watch.phases] == ["fetched", "prepared"]
    assert reported == whole.watch.phases
    assert part.cancel is whole.cancel


def test_a_run_is_cancelled_by_its_event() -> None:
    context = RunContext()
    assert not context.is_cancelled()
    context.cancel.set()
    assert context.is_cancelled()
