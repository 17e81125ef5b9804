"""The manual pages: everything that --help and the reference have, in a form that man shows without a complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from backupd.cli.main import app
from backupd.cli.manual import PROGRAM, SETTINGS, main, pages
from policies.configuration import Configuration
from policies.policy import Policy


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


def shown(page: str, tmp_path: Path) -> str:
    """As a terminal of 100 columns shows it; what the formatter complains of fails the test."""
    (tmp_path / "page").write_text(page)
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-P-cbou", "-rLL=100n", "-ww", tmp_path / "page"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


needs_groff = pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")


@needs_groff
def test_every_command_and_option_is_in_the_manual(written: dict[str, str], tmp_path: Path) -> None:
    text = shown(written[PROGRAM], tmp_path)

    def look(command: Any, name: str) -> None:
        if command.hidden:
            assert f"{name} " not in text
            return
        assert name in text
        for one in command.params:
            if one.param_type_name == "option" and not one.hidden:
                assert one.opts[0] in text
        for below, inner in getattr(command, "commands", {}).items():
            look(inner, f"{name} {below}")

    look(typer.main.get_command(app), "backupd")
    assert "EXIT STATUS" in text
    assert "wrong usage, an unknown name, an invalid configuration" in " ".join(text.split())


@needs_groff
def test_every_setting_is_in_the_manual(written: dict[str, str], tmp_path: Path) -> None:
    text = shown(written[SETTINGS], tmp_path)
    for model in (Configuration, Policy):
        for name in model.model_json_schema()["properties"]:
            assert re.search(rf"^\s+{re.escape(name)}\b", text, re.MULTILINE), name
    assert "catalog: sqlite:////var/lib/backupd/catalog.db" in text
    assert "`" not in re.sub(r"‘|’", "", text.partition("THE CONFIGURATION FILE")[0])


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_man_shows_the_pages(tmp_path: Path) -> None:
    assert main([str(tmp_path / "man")]) == 0
    for name, begins in ((PROGRAM, "BACKUPD(1)"), (SETTINGS, "BACKUPD.YAML(5)")):
        done = subprocess.run(["man", "-l", tmp_path / "man" / name], capture_output=True, text=True, check=True)
        assert (done.stderr, done.stdout.split()[0]) == ("", begins)
