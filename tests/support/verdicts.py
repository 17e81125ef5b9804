"""The pytest plugin that says what a failed test means for the run (tests/support/oracle.py: what is data)."""

from __future__ import annotations

import pytest

from tests.support import oracle


@pytest.hookimpl(tryfirst=True)
def pytest_assertrepr_compare(op: str, left: object, right: object) -> None:
    """An assert's comparison has failed."""
    __tracebackhide__ = True
    oracle.judge(op, left, right)
