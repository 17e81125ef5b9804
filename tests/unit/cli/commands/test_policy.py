"""``backupd policy`` as it is typed, against files only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backupd.cli.main import main
from policies.reference import example
from tests.support.service.house import Office

SIX = {f"db{number}": "gold" for number in range(6)}


def test_a_policy_is_explained_from_its_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gold.yaml").write_text(example("gold"))
    assert main(["policy", "explain", str(tmp_path / "gold.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "A full copy of the data files is taken at 02:00 on sun." in shown
    assert "physical.incremental" in shown
    assert "local after these runs: " in shown
    assert "recovery_window 7d" in shown


def test_the_document_holds_runs_and_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gold.yaml").write_text(example("gold"))
    assert main(["policy", "explain", str(tmp_path / "gold.yaml"), "--server", "shop-db1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["server"] == "shop-db1"
    assert {run["leg"] for run in document["runs"]} >= {"physical.full", "physical.incremental", "verify"}
    assert [one["destination"] for one in document["ahead"]] == ["local", "offsite", "vault"]
    assert all(backup["reasons"] for one in document["ahead"] for backup in one["backups"])


def test_very_many_runs_are_listed_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text('physical: {full: "every 1h"}\ndestinations: {required: [local]}\n')
    assert main(["policy", "explain", str(tmp_path / "x.yaml")]) == 0
    assert "... and 276 more; --json lists them all" in capsys.readouterr().out


def test_with_a_configuration_the_server_s_own_backups_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Office(tmp_path).write()
    new = tmp_path / "policies" / "gold.yaml"
    assert main(["policy", "explain", str(new), "--config", str(tmp_path / "backupd.yaml")]) == 0
    assert "gold for db1" in capsys.readouterr().out
    assert main(["policy", "explain", str(new), "--config", str(tmp_path / "backupd.yaml"), "--server", "db9"]) == 2
    assert "no server 'db9'" in capsys.readouterr().err


def test_a_policy_that_is_wrong_is_not_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("physical: {full: never}\n")
    assert main(["policy", "explain", str(tmp_path / "x.yaml")]) == 2
    assert f"{tmp_path}/x.yaml:1: physical.full" in capsys.readouterr().err


def test_validating_with_a_configuration_finds_what_does_not_fit_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Office(tmp_path, SIX).write()
    config = ["--config", str(tmp_path / "backupd.yaml")]
    assert main(["policy", "validate", str(tmp_path / "policies"), *config, "--json"]) == 0
    found = {Path(one["file"]).name: one["warnings"] for one in json.loads(capsys.readouterr().out)}
    assert [text.partition(":")[0] for text in found["backupd.yaml"]] == ["timing.jitter"] * 2
    assert "6 servers start in the same minute" in found["backupd.yaml"][0]
    (tmp_path / "new.yaml").write_text(example("gold"))
    assert main(["policy", "validate", str(tmp_path / "new.yaml")]) == 0
    capsys.readouterr()
    assert main(["policy", "validate", str(tmp_path / "new.yaml"), *config]) == 2
    assert "no destination `offsite` in the configuration" in capsys.readouterr().err
