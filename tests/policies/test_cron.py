from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cron import parse_cron


@pytest.mark.parametrize(("text", "field", "values"), [
    ("0 2 * * sun", 4, {0}), ("0 2 * * 7", 4, {0}), ("0 2 * * mon-sat", 4, {1, 2, 3, 4, 5, 6}),
    ("0 2 * * sat-sun", 4, {6, 0}), ("0 2 * * *", 4, set(range(7))), ("*/20 * * * *", 0, {0, 20, 40}),
    ("5/20 * * * *", 0, {5, 25, 45}), ("1,3,10-12 * * * *", 0, {1, 3, 10, 11, 12}), ("0 0 1 JAN,jul *", 3, {1, 7}),
    ("0 8-18/5 * * *", 1, {8, 13, 18}), ("0 0 29 2 *", 2, {29})])
def test_fields_are_read_as_crontab_does(text: str, field: int, values: set[int]) -> None:
    assert parse_cron(text)[field] == values


@pytest.mark.parametrize(("text", "message"), [
    ("", "5 fields"), ("0 2 * *", "5 fields"), ("@daily", "5 fields"), ("0 0 2 * * sun", "5 fields"),
    ("60 * * * *", "'60' is not a minute: 0 to 59"), ("0 24 * * *", "not a hour"), ("0 0 0 * *", "day of the month"),
    ("0 0 * 13 *", "month"), ("0 0 * * 8", "day of the week"), ("0 0 * * fri-mon", "two ranges"),
    ("0 0 * * sunday", "sun, mon"), ("x * * * *", "'x' is not a minute"), ("*/0 * * * *", "step"),
    ("1-2-3 * * * *", "not a minute"), ("*-5 * * * *", "not a minute"), ("1, * * * *", "not a minute"),
    ("0 0 30 2 *", "never comes"), ("0 0 31 4,6 *", "never comes"), ("١ * * * *", "not a minute")])
def test_what_is_no_expression_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cron(text)


@given(st.text(alphabet="0123456789*/-, sunmojafeb٣", max_size=30))
def test_any_text_is_an_expression_or_a_value_error(text: str) -> None:
    try:
        fields = parse_cron(text)
    except ValueError:
        return
    assert all(fields)
