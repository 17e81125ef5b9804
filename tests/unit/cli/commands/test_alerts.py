"""`backupd alerts` by the real service: what was typed wrong is an error, never an empty list."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.catalog.session import open_catalog
from backupd.cli.main import main
from tests.support.service.house import Office


@pytest.fixture
def config(tmp_path: Path) -> str:
    office = Office(tmp_path)
    open_catalog(office.write().catalog).close()
    return str(office.file)


def test_a_server_that_nobody_knows_is_an_error(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "--config", config]) == 0
    assert main(["alerts", "list", "db1", "--config", config]) == 0
    assert capsys.readouterr().out == "no open incidents\n" * 2
    for words in (["frob"], ["list", "frob"], ["list", "frob", "--all"]):
        assert main(["alerts", *words, "--config", config]) != 0
        captured = capsys.readouterr()
        assert "no server 'frob'" in captured.err
        assert "no open incidents" not in captured.out


@pytest.mark.parametrize("limit", ["99999999999999999999", "9223372036854775807", "0", "-1"])
@pytest.mark.parametrize("command", ["list", "messages"])
def test_a_limit_that_nobody_means_is_wrong_usage(
    config: str, command: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["alerts", command, "--limit", limit, "--config", config]) == 2
    assert "--limit" in capsys.readouterr().err
