from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import restore.runbook
from restore.runbook.shared_steps import document, shell

FOLDER = Path(restore.runbook.__file__).parent
FILES = sorted(FOLDER.glob("*.sh"))


def test_a_value_stays_as_it_is_whatever_it_holds() -> None:
    text = shell(
        "destinations", "sftp_logs", enter="cd @port@ \\1 {{ x }}", port=22, binlogs="b", account="a", logs="l"
    )
    assert "\ncd @port@ \\1 {{ x }}\n" in text
    assert text.startswith("mkdir -p b\nsftp -q -b - -P 22 ")


def test_a_value_that_is_empty_leaves_no_empty_line() -> None:
    with_tool, without = (
        shell("whole", "prepare", known="k", folders="f", prepared="p", type="t", aside=aside)
        for aside in ("aside() { :; }", "")
    )
    assert with_tool.replace("aside() { :; }\n", "") == without


def test_a_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises(KeyError):
        shell("logical", "settings", client="mysql")
    with pytest.raises(UndefinedError):
        document("logical", signed=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_shell_is_cut_into_blocks_and_keeps_to_itself_what_shellcheck_is_told(path: Path) -> None:
    blocks = re.findall(r"^# --- ([a-z0-9_]+)$", path.read_text(), re.MULTILINE) or [""]
    assert len(blocks) == len(set(blocks))
    for block in blocks:
        names = re.findall(r"@([a-z_]+)@", path.read_text())
        text = shell(path.stem, block, **dict.fromkeys(names, "x"))
        assert text == text.strip("\n") != ""
        assert "shellcheck" not in text
        assert "# ---" not in text


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: scripts/setup --test installs it")
def test_shellcheck_finds_nothing_in_the_shell_of_runbooks() -> None:
    done = subprocess.run(["shellcheck", "--shell=sh", *map(str, FILES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
