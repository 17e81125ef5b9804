"""What a shell is offered at Tab: by the words of a line, and in a real shell."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from backupd.catalog.session import open_catalog
from backupd.cli.commands.completion import FILES, SHELLS, answer, script
from backupd.cli.main import app, main
from tests.support.catalog import samples

ROOT = typer.main.get_command(app)
ID = samples.backup().id


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of two servers, a group and two destinations, whose catalog knows one backup."""
    base = tmp_path_factory.mktemp("completion")
    (base / "servers.d").mkdir()
    (base / "servers.d" / "more.yaml").write_text(
        "crm-db2: {host: crm}\nunit: {members: [unit-1, unit-2]}\nunit-1: {}\n"
    )
    (base / "backupd.yaml").write_text(
        f"catalog: sqlite:///{base}/catalog.db\nservers: {{shop-db1: {{socket: /x}}}}\n"
        "destinations: {local: {type: filesystem}, offsite: {type: s3}}\n"
    )
    with open_catalog(f"sqlite:///{base}/catalog.db") as catalog:
        catalog.backups.add(samples.backup())
    return base


@pytest.fixture(autouse=True)
def configured(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKUPD_CONFIG", str(world / "backupd.yaml"))


def offered(line: str) -> list[str] | None:
    *before, last = line.split(" ")[1:]
    found = answer(ROOT, before, last)
    return None if found is None else list(found)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("backupd pl", ["plan"]),
        ("backupd run-", []),
        ("backupd backup ", ["crm-db2", "shop-db1", "unit"]),
        ("backupd backup s", ["shop-db1"]),
        ("backupd backup shop-db1 ", []),
        ("backupd backup shop-db1 --kind ", ["full", "incremental", "logical"]),
        ("backupd backup --kind=l", ["--kind=logical"]),
        ("backupd backup --ki", ["--kind"]),
        ("backupd backup --kind full --ki", []),
        ("backupd --json backup sh", ["shop-db1"]),
        ("backupd backups sh", ["show", "shop-db1"]),
        ("backupd backups --lab", ["--label"]),
        ("backupd backups show ", [ID]),
        ("backupd backups list shop-", ["shop-db1"]),
        ("backupd proofs --outcome f", ["failed"]),
        ("backupd plan shop-db1 --to ", ["latest", f"backup:{ID}"]),
        ("backupd plan crm-db2 --to ", ["latest"]),
        ("backupd plan shop-db1 --to backup:", [f"backup:{ID}"]),
        ("backupd restore shop-db1 --into c", ["crm-db2"]),
        ("backupd replicate --to o", ["offsite"]),
        ("backupd catalog sign ", ["local", "offsite"]),
        ("backupd catalog rebuild --from l", ["local"]),
        ("backupd completion ", list(SHELLS)),
        ("backupd nonsense ", []),
        ("backupd nonsense --", ["--config", "--json", "--version", "--help"]),
        ("backupd backup -- --", []),
    ],
)
def test_what_may_follow_is_offered(line: str, words: list[str]) -> None:
    assert offered(line) == words


@pytest.mark.parametrize(
    "line", ["backupd --config ", "backupd plan x --datadir /s", "backupd policy validate ", "backupd --config=/e"]
)
def test_names_of_files_are_left_to_the_shell(line: str) -> None:
    assert offered(line) is None


def test_the_configuration_that_is_named_counts(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("servers: {other-db: {}}\n")
    assert offered(f"backupd --config {other} backup ") == ["other-db"]
    assert offered(f"backupd backup --config={other} ") == ["other-db"]


@pytest.mark.parametrize("text", ["servers: [", "servers: 7", "- a", "", "catalog: {a: b}", "\0"])
def test_a_broken_configuration_offers_no_names_and_says_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "backupd.yaml").write_text(text)
    monkeypatch.setenv("BACKUPD_CONFIG", str(tmp_path / "backupd.yaml"))
    for line in ("backupd backup ", "backupd backups show ", "backupd plan x --to "):
        assert main(["complete", "bash", "", line]) == 0
    assert main(["complete", "zsh", "--", "replicate", "--to", ""]) == 0
    assert capfd.readouterr() == ("latest\n", "")


def test_bash_gets_what_is_behind_the_place_where_it_splits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "bash", " \t\n\"'><=;|&(:", "backupd plan shop-db1 --to backup:2"]) == 0
    assert capsys.readouterr().out == f"{ID}\n"
    assert main(["complete", "bash", " \t\n", "backupd plan 'shop-db1' --to backup:2"]) == 0
    assert capsys.readouterr().out == f"backup:{ID}\n"
    assert main(["complete", "bash", "", "backupd plan --datadir "]) == FILES


def test_other_shells_get_what_an_option_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "fish", "--", "serve", "--stand"]) == 0
    assert capsys.readouterr().out.startswith("--standby\tIf another backupd service")
    assert main(["complete", "zsh", "--", "plan", "shop-db1", "--to", "backup:"]) == 0
    assert capsys.readouterr().out == f"backup\\:{ID}\n"


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "known: bash, zsh, fish" in capsys.readouterr().err


def program(folder: Path) -> Path:
    """``backupd`` as it is called in a shell."""
    found = folder / "backupd"
    found.write_text(f'#!/bin/sh\nexec {sys.executable} -m backupd "$@"\n')
    found.chmod(0o755)
    return found


def called(shell: str, text: str, folder: Path) -> str:
    environ = {**os.environ, "PATH": f"{program(folder).parent}:{os.environ['PATH']}"}
    done = subprocess.run([shell, "-c", text], capture_output=True, text=True, check=False, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bash_completes_what_is_typed(tmp_path: Path) -> None:
    """At a terminal, with the keys that a person presses."""
    environ = {**os.environ, "PATH": f"{program(tmp_path).parent}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
    leader, follower = pty.openpty()
    with io.FileIO(leader, "r+") as keys:
        shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=environ,
            cwd=tmp_path,
            start_new_session=True,
        )
        os.close(follower)
        try:
            keys.write(b"source <(backupd completion bash)\n")
            # The completed line becomes the arguments of printf: Ctrl-A goes to its beginning.
            keys.write(b"backupd plan shop-db1 --to back\t\x01printf '<%s>' \nexit\n")
            shown = ""
            with suppress(OSError):  # the end of a terminal
                while chunk := keys.read(65536):
                    shown += chunk.decode(errors="replace")
        finally:
            shell.kill()
            shell.wait()
    assert f"<backupd><plan><shop-db1><--to><backup:{ID}>" in shown


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_what_is_typed(tmp_path: Path) -> None:
    text = """
autoload -Uz compinit && compinit -u -d dump
source <(backupd completion zsh)
_describe() { print -l -- ${(P)4}; }
words=(backupd plan shop-db1 --to back); CURRENT=5; _backupd
"""
    assert called("zsh", text, tmp_path).splitlines() == [f"backup\\:{ID}"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_what_is_typed(tmp_path: Path) -> None:
    found = called("fish", "backupd completion fish | source; complete -C 'backupd backup s'", tmp_path)
    assert [line.split("\t")[0] for line in found.splitlines()] == ["shop-db1"]


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_the_script_is_one_that_the_shell_reads(shell: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script(shell))
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
