"""The database's user, who owns folders that root writes in, and whoever looks at what root leaves running."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.server.launch import LaunchedServer, ServerConfig
from backupd.engine.toolset import find_tool
from backupd.model.errors import BackupdError, RefusedError
from backupd.process.folders import give, open_to_append, write_anew
from backupd.process.run_context import RunContext
from restore.datadir.occupancy import find_account, find_occupants, hand_over
from restore.datadir.staging import (
    INSIDE,
    MARKER,
    Site,
    State,
    read_marker,
    refuse_foreign_staging,
    write_marker,
    write_state,
)
from restore.datadir.start import server_config, start_for_good
from tests.support.keys import make_home, make_key, stop_agent
from tests.support.servers.datadir import initialise

MYSQL = pwd.getpwnam("mysql")
SECRET = "root's own"
NAMES = ("my.cnf", "error.log", "tmp", "s.sock", "pid", "init.sql")


def _links(folder: Path, victim: Path) -> None:
    """As the database's user: its folder, full of links to a file of root's."""
    folder.mkdir(exist_ok=True)
    os.chown(folder, MYSQL.pw_uid, MYSQL.pw_gid)
    commands = "; ".join(f"ln -s {victim} {folder / name}" for name in NAMES)
    subprocess.run(["sh", "-c", commands], check=True, user="mysql", group="mysql", cwd="/")


@pytest.fixture
def victim(short_tmp: Path) -> Path:
    path = short_tmp / "victim"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def _assert_untouched(victim: Path) -> None:
    found = victim.stat()
    assert (victim.read_text(), found.st_uid, found.st_mode & 0o777) == (SECRET, 0, 0o600)


def test_a_server_is_not_started_through_links_of_its_user(short_tmp: Path, victim: Path) -> None:
    initialise(short_tmp / "data")
    _links(short_tmp / "run", victim)
    config = ServerConfig(
        program=find_tool(("mariadbd",)).path,
        datadir=short_tmp / "data",
        directory=short_tmp / "run",
        memory=64 << 20,
        own_account=True,
        skip_grants=False,
    )
    with pytest.raises((OSError, BackupdError)), LaunchedServer(config):
        pass
    _assert_untouched(victim)


def test_a_server_that_stays_is_not_laid_out_through_links_either(short_tmp: Path, victim: Path) -> None:
    initialise(short_tmp / "data")
    _links(short_tmp / "run", victim)
    config = server_config(
        "/nonexistent/mariadbd",
        short_tmp / "data",
        short_tmp / "run",
        {},
        RunContext(),
        account=find_account("mysql"),
        store=short_tmp / "none",
        memory=64 << 20,
    )
    with pytest.raises((OSError, BackupdError)):
        start_for_good(config, seconds=5)
    _assert_untouched(victim)


def test_nothing_is_written_or_given_away_through_a_link(short_tmp: Path, victim: Path) -> None:
    folder, owner = short_tmp / "theirs", (MYSQL.pw_uid, MYSQL.pw_gid)
    _links(folder, victim)
    write_anew(folder / "my.cnf", b"ours", owner=owner)
    assert ((folder / "my.cnf").read_bytes(), (folder / "my.cnf").is_symlink()) == (b"ours", False)
    with pytest.raises(OSError, match="symbolic"):
        open_to_append(folder / "error.log", owner=owner)
    os.link(victim, folder / "hard.log")
    with pytest.raises(OSError, match="is not a regular file"):
        open_to_append(folder / "hard.log", owner=owner)
    give(folder / "pid", owner, 0o666)
    (folder / "hard.log").unlink()
    hand_over(folder, find_account("mysql"), folder_mode=0o700)
    _assert_untouched(victim)
    (short_tmp / "to").symlink_to(folder)
    with pytest.raises(NotADirectoryError):
        write_anew(short_tmp / "to" / "my.cnf", b"through the folder")


_OPEN = """
import sys
from pathlib import Path
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.encryption import Unsealer
home, key = Path(sys.argv[1]), sys.argv[2]
assert Unsealer(home).unseal(Sealer([key], home).seal(b"content"), limit=100) == b"content"
"""


def _agents(place: Path) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "gpg-agent" in line and str(place) in line]


def test_an_agent_that_holds_the_opened_key_ends_with_the_command(short_tmp: Path) -> None:
    home = make_home(short_tmp / "keys")
    key = make_key(home)
    stop_agent(home)
    (short_tmp / "run").mkdir()
    subprocess.run(
        [sys.executable, "-c", _OPEN, str(home), key],
        check=True,
        env={**os.environ, "BACKUPD_RUNTIME": str(short_tmp / "run")},
    )
    deadline = time.monotonic() + 300
    while _agents(short_tmp) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _agents(short_tmp) == []


_LOOKED_AT = """
import ctypes, os, pwd
from pathlib import Path
from backupd.cli import main as module

def looked():
    child = os.fork()
    if not child:
        try:
            Path(f"/proc/{os.getppid()}/environ").read_bytes()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

user = pwd.getpwnam("mysql")
os.setgroups([])
os.setgid(user.pw_gid)
os.setuid(user.pw_uid)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after exec
module.app = lambda **_more: None
before = looked()
module.main([])
print(before, looked(), Path("/proc/self/limits").read_text().split("core file size")[1].split()[:2],
      bool(list(Path("/proc/self/fd").iterdir())), bool(os.readlink("/proc/self/ns/pid")))
"""


def test_another_process_of_the_same_user_reads_nothing_of_a_command_and_no_core_is_dumped() -> None:
    said = subprocess.run([sys.executable, "-c", _LOOKED_AT], check=True, capture_output=True, text=True)
    assert said.stdout == "True False ['0', '0'] True True\n", "the last two it needs itself"


_MASKS = """
import os
from pathlib import Path
from backupd.cli import main as module
os.umask(0)
module.app = lambda **_more: Path("made").touch() or Path("folder").mkdir()
module.main(["backups"])
print(oct(os.umask(0)))
"""


def test_what_a_command_makes_is_nobody_elses_whatever_the_umask_is(tmp_path: Path) -> None:
    """Of every command: what is made at the place of one."""
    after = subprocess.run([sys.executable, "-c", _MASKS], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("made", "folder")] == [0o600, 0o700]
    assert after.stdout == "0o0\n", "whose it was gets it back"


@pytest.mark.parametrize("with_state", [False, True])
def test_a_restore_is_not_built_in_a_folder_of_theirs(short_tmp: Path, *, with_state: bool) -> None:
    """Who owns it could have ``data`` lead elsewhere while root unpacks and gives away what lies there."""
    site = Site(short_tmp, short_tmp / INSIDE, inside=True)
    site.folder.mkdir()
    if with_state:
        write_state(site, State("r1", "shop-db1", "latest", ("b1",)))
    refuse_foreign_staging(site)
    os.chown(site.folder, MYSQL.pw_uid, MYSQL.pw_gid)
    with pytest.raises(RefusedError) as caught:
        refuse_foreign_staging(site)
    assert f"belongs to uid {MYSQL.pw_uid}" in caught.value.detail


@pytest.mark.parametrize("made", ["ln -s {victim} {path}", "ln {own} {path}", "mkfifo {path}"])
def test_the_marker_of_a_restore_is_not_written_through_a_link(short_tmp: Path, victim: Path, made: str) -> None:
    """Its server runs when the last one is written. Who owns the old one was given what the link led to."""
    folder = short_tmp / "data"
    folder.mkdir()
    state = State("r1", "shop-db1", "latest", ("b1",))
    write_marker(folder, state)
    for path in (folder, *folder.iterdir()):
        os.chown(path, MYSQL.pw_uid, MYSQL.pw_gid)
    (folder / "own").touch()
    os.chown(folder / "own", MYSQL.pw_uid, MYSQL.pw_gid)
    script = made.format(victim=victim, own=folder / "own", path=f"{folder / MARKER}.new")
    subprocess.run(["sh", "-c", script], check=True, user="mysql", group="mysql", cwd="/")
    write_marker(folder, replace(state, stage="finished"))
    _assert_untouched(victim)
    assert (folder / "own").read_bytes() == b""
    found = read_marker(folder)
    assert (found and found.stage, (folder / MARKER).owner()) == ("finished", "mysql")


def test_a_pipe_in_the_place_of_a_marker_holds_nobody_up(short_tmp: Path) -> None:
    os.mkfifo(short_tmp / MARKER)
    os.mkfifo(short_tmp / "db.pid")
    with pytest.raises(RefusedError, match="cannot read"):
        read_marker(short_tmp)
    assert not [one for one in find_occupants(short_tmp) if "db.pid" in str(one)]
