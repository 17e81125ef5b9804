"""Whoever can write to the store forges a backup: its option file names a library that lies in the backup, too.

mariadb-backup loads what such a file names when it prepares the copy, and a server when it starts on it: once as root,
in a sandbox that it could leave.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.physical import streaming
from backupd.engine.physical.streaming import prepare_step
from backupd.engine.server import sandbox
from backupd.engine.server.backup_files import KNOWN
from backupd.engine.server.launch import LaunchedServer, ServerConfig, options_for_copy
from backupd.engine.server.sandbox import confine, is_available, worker
from backupd.model.errors import DamagedError, RefusedError
from backupd.process.command import Command
from backupd.process.pipeline import run
from backupd.process.run_context import RunContext
from restore.datadir.occupancy import refuse_links
from restore.fetch.chain import prepare
from restore.runbook.shared_steps import known_lines
from tests.support.hostile.evil_library import MARK, evil_library
from tests.support.servers.backups import MEMORY, Taken, take, the_tool
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import runs_as_root, short_directory

FORGED = "plugin_dir=./\nplugin_load=evil.so\n!include /etc/my.cnf\ninnodb_undo_directory=/var/lib/mysql\n"


@pytest.fixture(scope="module")
def forged() -> Iterator[Taken]:
    """A real backup, with a library in it, and an option file that names it."""
    with short_directory() as place, PrivateServer() as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.t (i INT PRIMARY KEY)")
        taken = take(server, place / "forged")
        (taken.base / "evil.so").write_bytes(evil_library())
        with (taken.base / "backup-my.cnf").open("a") as file:
            file.write(FORGED)
        yield taken


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the evil library is for x86-64")
def test_the_library_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.so").write_bytes(evil_library())
    monkeypatch.chdir(tmp_path)
    ctypes.CDLL(str(tmp_path / "evil.so"))
    assert (tmp_path / MARK).read_text() == "pwned\n"


def test_prepare_loads_nothing_that_the_backup_names(forged: Taken, short_tmp: Path) -> None:
    base = forged.copy(short_tmp / "data")
    prepare(the_tool(), base, [], forged.receipts, RunContext(), memory=MEMORY, logs=short_tmp / "logs")
    assert not (base / MARK).exists()
    text = (base / "backup-my.cnf").read_text()
    assert not any(word in text for word in ("evil", "plugin", "include", "/"))
    assert "evil" not in (short_tmp / "logs/prepare-1.log").read_text()


@pytest.mark.parametrize("option", ["filename=", "filekey=FILE:"])
def test_no_file_of_the_host_is_handed_out_as_a_key(forged: Taken, short_tmp: Path, option: str) -> None:
    """Root reads every file, and gives the key plugin copies of those that it shall have."""
    ours = short_tmp / "keys.txt"
    ours.write_text("1;770A8A65DA156D24EE2A093277530142\n")
    base = forged.copy(short_tmp / "data")
    lines = f"plugin_load=file_key_management\nfile_key_management_{option}/etc/shadow\n"
    (base / "backup-my.cnf").write_text(f"[mysqld]\n{lines}")
    for allowed, said in (((), "configuration"), ((ours,), "/etc/shadow")):
        with pytest.raises(RefusedError, match=said):
            prepare(
                the_tool(),
                base,
                [],
                forged.receipts,
                RunContext(key_files=allowed),
                memory=MEMORY,
                logs=short_tmp / "logs",
            )
        config = ServerConfig(
            "mariadbd", base, short_tmp / "run", options=options_for_copy(base, {}), key_files=allowed
        )
        with pytest.raises(RefusedError, match=said), LaunchedServer(config):
            pass
    assert list(short_tmp.rglob("backupd-keys*")) == []
    assert not (short_tmp / "logs/prepare-1.log").exists()


def test_a_server_on_the_copy_is_not_told_of_it_either(forged: Taken) -> None:
    options = options_for_copy(forged.base, {})
    assert options["innodb_page_size"] == "16384"
    assert not any("evil" in f"{name}{value}" or "plugin" in name for name, value in options.items())


def test_neither_is_the_tool_that_somebody_runs_by_hand(forged: Taken) -> None:
    script = known_lines(KNOWN, str(forged.base))
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert "innodb_page_size=16384" in said
    assert not any(word in said for word in ("evil", "plugin", "include", "/"))


def _asked(script: str, folder: Path) -> dict[str, str]:
    done = run(confine(Command(("sh", "-c", script), user=worker(), cwd=folder), writable=[folder]), check=False)
    return dict(line.split(":", 1) for line in done.stdout.decode().replace("\t", "").splitlines() if ":" in line)


@pytest.mark.skipif(not is_available(), reason="bubblewrap cannot confine anything on this host")
@pytest.mark.parametrize("way", sandbox.ways())
def test_whatever_runs_there_has_no_power_and_cannot_leave(
    way: sandbox.Way, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "ways", lambda _user=None: (way,))
    short_tmp.chmod(0o777)
    said = _asked(
        "grep -E '^(Cap|NoNewPrivs|Uid)' /proc/self/status; mount -o remount,rw,bind /usr 2>/dev/null && echo left:usr;"
        "touch /usr/local/pwned 2>/dev/null && echo left:touched; ulimit -c | sed s/^/Core:/",
        short_tmp,
    )
    assert {said[name] for name in said if name.startswith("Cap") and name != "CapBnd"} == {"0" * 16}
    assert (said["NoNewPrivs"], said["Core"], "left" in said) == ("1", "0", False)
    if runs_as_root():
        assert said["Uid"].split("\t")[0].strip("0") != ""


@pytest.mark.skipif(not runs_as_root(), reason="only root can run it as root")
def test_where_nothing_can_be_confined_it_is_not_root_either(
    forged: Taken, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "can_confine", lambda _program: False)
    base = forged.copy(short_tmp / "data")
    prepare(the_tool(), base, [], forged.receipts, RunContext(), memory=MEMORY, logs=short_tmp / "logs")
    assert not (base / MARK).exists()
    assert {path.stat().st_uid for path in base.rglob("ib_logfile0")} != {0}


@pytest.mark.skipif(not runs_as_root(), reason="only root can run it as root")
def test_root_prepares_nothing_where_there_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WORKER", "nobody-of-this-name")
    monkeypatch.setattr(sandbox, "DATABASE_USER", "nobody-of-this-name")
    with pytest.raises(RefusedError, match="never run as root"):
        prepare_step(the_tool().tool, "apply", tmp_path, None, memory=MEMORY)
    with pytest.raises(ValueError, match="would run as root"):
        confine(Command(("true",)), writable=())


def test_links_that_appear_in_the_copy_are_not_followed(short_tmp: Path) -> None:
    (short_tmp / "shop").mkdir()
    (short_tmp / "shop/t.isl").symlink_to("/etc/shadow")
    with pytest.raises(DamagedError, match="created links or pipes"):
        refuse_links(short_tmp)
