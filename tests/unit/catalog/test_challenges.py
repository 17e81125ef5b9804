from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from backupd.catalog.session import Catalog
from backupd.model.access import Challenge
from backupd.model.errors import NotFoundError, RefusedError

NOW = datetime(2026, 11, 21, 4, 25, tzinfo=UTC)


def test_a_challenge_is_answered_once(catalog: Catalog) -> None:
    first = Challenge("20261121T042500Z-00000001", "A" * 40, "ops@example.com", NOW, "0" * 64)
    second = Challenge("20261122T042500Z-00000002", "A" * 40, "ops@example.com", NOW + timedelta(days=1), "1" * 64)
    other = Challenge("20261122T042500Z-00000003", "B" * 40, "bank", NOW, "2" * 64)
    for challenge in (first, second, other):
        catalog.challenges.add(challenge)
    assert catalog.challenges.list("A" * 40) == (second, first)
    assert set(catalog.challenges.list()) == {first, second, other}
    catalog.challenges.answer(first.id, NOW + timedelta(days=2), "ann")
    answered = catalog.challenges.get(first.id)
    assert (answered.answered_at, answered.answered_by) == (NOW + timedelta(days=2), "ann")
    with pytest.raises(RefusedError, match="answered already"):
        catalog.challenges.answer(first.id, NOW, "bob")
    with pytest.raises(RefusedError, match="older than 30 days"):
        catalog.challenges.answer(other.id, NOW + timedelta(days=30, seconds=1), "bank")
    catalog.challenges.answer(other.id, NOW + timedelta(days=30), "bank")
    with pytest.raises(NotFoundError, match="no challenge"):
        catalog.challenges.get("20261122T042500Z-00000009")
