"""The installed program, as a shell meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from backupd.app.context import settings
from backupd.cli import session

PROGRAM = Path(sys.executable).with_name("backupd")


def run(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *argv],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin"} | (env or {}),
    )


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, backupd.cli.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"sqlalchemy", "alembic", "apscheduler", "pydantic", "pymysql", "gnupg", "zstandard", "jinja2"}
    assert not heavy & set(loaded)


def test_every_command_of_this_version_explains_itself() -> None:
    text = run("--help").stdout
    for command in (
        "check",
        "backup",
        "backups",
        "plan",
        "restore",
        "test-restore",
        "verify",
        "runbook",
        "policy",
        "fsck",
        "catalog",
    ):
        assert f"\n  {command}  " in text
        assert run(command, "--help").stdout.startswith(f"Usage: backupd {command} ")


def test_the_default_configuration_is_the_one_that_the_settings_name() -> None:
    assert session.DEFAULT_CONFIG == settings.DEFAULT_FILE
    assert session.CONFIG_VARIABLE == settings.FILE_VARIABLE


def test_whatever_the_umask_is_nobody_else_reads_what_a_command_makes_and_no_core_is_dumped(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, resource, sys; from backupd.cli import main; os.umask(0);"
        "main.app = lambda **_: print(resource.getrlimit(resource.RLIMIT_CORE), pathlib.Path(sys.argv[1]).touch());"
        "main.main([])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "made"], capture_output=True, text=True, check=True)
    assert done.stdout == "(0, 0) None\n"
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_no_command_shows_the_help_and_is_wrong_usage() -> None:
    assert run().returncode == 2


def test_a_missing_configuration_file_is_named_and_exits_with_2(tmp_path: Path) -> None:
    done = run("backups", "--config", str(tmp_path / "nowhere.yaml"))
    assert done.returncode == 2
    assert "nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    done = subprocess.run(
        f"{PROGRAM} policy schema | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


def test_the_printed_example_is_a_valid_policy(tmp_path: Path) -> None:
    policy = tmp_path / "gold.yaml"
    policy.write_text(run("policy", "example").stdout)
    done = run("policy", "validate", str(policy))
    assert (done.returncode, done.stderr) == (0, "")


def test_everything_wrong_in_a_policy_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    policy = tmp_path / "bad.yaml"
    policy.write_text("physical: {full: never}\nphysicall: 1\n")
    done = run("policy", "validate", str(policy))
    assert done.returncode == 2
    assert f"{policy}:1: " in done.stderr
    assert f"{policy}:2: " in done.stderr
