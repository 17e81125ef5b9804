from __future__ import annotations

import pytest

from backupd.cli import session
from tests.support.service.fake import FakeService


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """The Service that commands will find."""
    fake = FakeService()
    monkeypatch.setattr(session, "open_service", fake.open)
    monkeypatch.delenv("BACKUPD_CONFIG", raising=False)
    return fake
