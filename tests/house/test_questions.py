"""Every question of the newcomer's test has an answer, wherever it is defined by now."""

from __future__ import annotations

from tests.house.questions import questions


def test_every_answer_is_defined_in_exactly_one_file() -> None:
    found = questions()
    assert len({one.text for one in found}) == len(found) == 20
    for question in found:
        assert question.files()
