from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from storage.config import FilesystemConfig
from storage.registry import open_destination, open_destinations


def test_opening_touches_nothing(tmp_path: Path) -> None:
    config = FilesystemConfig(type="filesystem", path=tmp_path / "backups")
    found = open_destinations({"local": config, "other": config})
    assert list(found) == ["local", "other"]
    assert found["local"].name == "local"
    assert not found["local"].is_initialised()
    assert list(tmp_path.iterdir()) == []
    assert open_destination("x", config).name == "x"


@pytest.mark.parametrize("document", [
    {"type": "filesystem"}, {"type": "filesystem", "path": "relative"}, {"type": "filesystem", "path": "/"},
    {"type": "filesystem", "path": "/srv/../etc"}, {"type": "floppy", "path": "/srv"},
    {"type": "filesystem", "path": "/srv", "pth": "/x"}, {"path": "/srv"}])
def test_a_wrong_configuration_is_refused(document: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        FilesystemConfig.model_validate(document)
