from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from backupd.engine.server.sandbox import confine, is_available, worker
from backupd.model.errors import ToolError
from backupd.process.command import Command
from backupd.process.pipeline import run
from tests.support.servers.backups import give_to_worker
from tests.support.stores.folders import runs_as_root

pytestmark = pytest.mark.skipif(not is_available(), reason="bubblewrap cannot confine anything on this host")


def _run(script: str, *writable: Path, readable: tuple[Path, ...] = (), user: str | None = None) -> str:
    user = user or worker()
    give_to_worker(*writable)
    command = Command(("sh", "-c", script), user=user, cwd=writable[0])
    return run(confine(command, writable=writable, readable=readable)).stdout.decode()


def test_only_its_own_folder_is_writable_and_other_folders_are_not_there(short_tmp: Path) -> None:
    inside, outside = short_tmp / "in", short_tmp / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "file").write_text("text")
    said = _run(
        f"pwd; echo new > {inside}/new; cat {outside}/file 2>/dev/null || echo hidden;"
        f" echo x > /etc/x 2>/dev/null || echo readonly; ls {short_tmp}",
        inside,
    )
    assert said.split() == [str(inside), "hidden", "readonly", "in"]
    assert (inside / "new").read_text() == "new\n"


def test_what_is_readable_cannot_be_written_even_inside_a_writable_folder(short_tmp: Path) -> None:
    keys = short_tmp / "keys"
    keys.mkdir()
    (keys / "key").write_text("secret")
    said = _run(f"cat {keys}/key; echo x > {keys}/key 2>/dev/null || echo ' readonly'", short_tmp, readable=(keys,))
    assert said == "secret readonly\n"


def test_there_is_no_network_and_no_socket_of_others(short_tmp: Path) -> None:
    inside = short_tmp / "in"
    inside.mkdir()
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(short_tmp / "s.sock"))
        unix.listen()
        port = tcp.getsockname()[1]
        script = (
            "import socket, sys\n"
            f"for family, where in ((socket.AF_UNIX, {str(short_tmp / 's.sock')!r}),"
            f" (socket.AF_INET, ('127.0.0.1', {port}))):\n"
            " try: socket.socket(family).connect(where); print('connected')\n"
            " except OSError as e: print(type(e).__name__)\n"
        )
        (inside / "try.py").write_text(script)
        assert _run("/usr/bin/python3 try.py", inside).split() == ["FileNotFoundError", "ConnectionRefusedError"]


@pytest.mark.skipif(not runs_as_root(), reason="only root can become somebody else")
def test_the_user_is_dropped_inside_even_below_folders_closed_to_it(short_tmp: Path) -> None:
    closed = short_tmp / "closed"
    inside = closed / "in"
    inside.mkdir(parents=True)
    closed.chmod(0o700)
    os.chown(closed, 0, 0)
    inside.chmod(0o777)
    assert _run("id -un; touch mine; grep NoNewPrivs /proc/self/status", inside, user="mysql").split() == [
        "mysql",
        "NoNewPrivs:",
        "1",
    ]
    assert (inside / "mine").stat().st_uid != 0


def test_a_signal_that_ends_what_is_in_it_is_told_as_one(short_tmp: Path) -> None:
    command = confine(Command(("sh", "-c", "kill -9 $$"), user=worker()), writable=())
    with pytest.raises(ToolError, match="sh was killed by SIGKILL"):
        run(command)
