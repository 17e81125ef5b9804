"""A job of a service whose catalog was moved away fails, and leaves no empty catalog in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.cli.main import main
from tests.support.service.house import Office


def test_a_job_whose_catalog_was_moved_away_fails_and_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    office = Office(tmp_path)
    settings = office.write()
    open_catalog(settings.catalog).close()
    held = settings.hold(tmp_path)
    (tmp_path / "catalog.db").rename(tmp_path / "kept.db")
    assert (
        main(
            [
                "run-job",
                "20261121T030000Z-00000001",
                "--token",
                "1",
                "--settings",
                str(held),
                "--config",
                str(office.file),
            ]
        )
        == 1
    )
    said = capsys.readouterr().err
    assert f"the catalog {tmp_path}/catalog.db is gone" in said
    assert "catalog rebuild" in said
    assert not (tmp_path / "catalog.db").exists()
    with Service.open(office.file):  # people's commands go on making the first one
        assert (tmp_path / "catalog.db").exists()
