from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from restore.datadir.occupancy import find_occupants, foreign_entries, refuse_non_empty, refuse_occupied
from tests.support.servers.mariadb import PrivateServer


def test_a_running_server_is_found_by_its_locks_and_open_files(shared_server: PrivateServer) -> None:
    with pytest.raises(RefusedError, match="in use") as refused:
        refuse_occupied(shared_server.datadir)
    assert f"ibdata1 is locked by process {shared_server.pid} (mariadbd)" in refused.value.detail
    assert f"process {shared_server.pid} (mariadbd) has its working directory here" in refused.value.detail


def test_a_stopped_server_leaves_no_sign_of_life() -> None:
    with PrivateServer(options={"pid_file": "server.pid"}) as server:
        server.kill()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(server.datadir / "s.sock"))
        (server.datadir / "stale.pid").write_text("999999999\n")
        assert (server.datadir / "ibdata1").exists()
        assert list(find_occupants(server.datadir)) == []


def test_a_socket_that_answers_counts_even_below_a_very_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(folder, os.O_PATH)
        server.bind(f"/proc/self/fd/{descriptor}/mysql.sock")
        os.close(descriptor)
        assert list(find_occupants(folder)) == []
        server.listen()
        assert "answers" in next(find_occupants(folder))


def test_a_process_with_an_open_file_or_its_working_directory_inside_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.ibd").touch()
    script = "import sys; print('ready', flush=True); sys.stdin.read()"
    for folder, output, says in (
        (tmp_path, "/dev/null", "working directory"),
        ("/", tmp_path / "t.ibd", "ibd open"),
    ):
        with (
            Path(output).open("w") as stderr,
            subprocess.Popen(
                [sys.executable, "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=folder,
            ) as process,
        ):
            stderr.close()
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(RefusedError) as refused:
                refuse_occupied(tmp_path)
            assert f"process {process.pid}" in refused.value.detail
            assert says in refused.value.detail
            process.communicate()
    refuse_occupied(tmp_path)


def test_processes_that_we_may_not_look_at_are_told(tmp_path: Path) -> None:
    code = (
        "from restore.datadir.occupancy import find_occupants, not_looked_at; from pathlib import Path; import sys; "
        "print(list(find_occupants(Path(sys.argv[1]))), *not_looked_at(Path(sys.argv[1])))"
    )
    unit = (Path(__file__).parents[4] / "deploy" / "backupd.service").read_text()
    (powers,) = [line for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=")]
    kept = powers.partition("=")[2].split()
    nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "sh",
        "-c",
        f"cd {tmp_path}; echo here; read line",
    ]
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        folder.chmod(folder.stat().st_mode | 0o011)
        if folder.parent == Path("/tmp"):
            break
    with subprocess.Popen(nobody, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"

        def seen(powers: list[str]) -> str:
            bounds = ",".join(["-all", *("+" + word.removeprefix("CAP_").lower() for word in powers)])
            return subprocess.run(
                ["setpriv", "--bounding-set", bounds, "--no-new-privs", sys.executable, "-c", code, str(tmp_path)],
                check=True,
                text=True,
                capture_output=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
            ).stdout

        assert "has its working directory here" in seen(kept)
        assert "cannot determine" not in seen(kept), "root sees all of them"
        blind = seen([power for power in kept if power != "CAP_SYS_PTRACE"])
        assert "working directory" not in blind
        assert "cannot determine whether" in blind
        assert f"uses {tmp_path}:" in blind
        process.communicate("go")


def test_the_shell_that_started_us_may_stand_in_the_directory(tmp_path: Path) -> None:
    code = (
        "from restore.datadir.occupancy import find_occupants; from pathlib import Path; "
        "print(list(find_occupants(Path.cwd())))"
    )
    done = subprocess.run(
        ["sh", "-c", f'cd {tmp_path}; {sys.executable} -c "{code}"; true'],
        check=True,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
    )
    assert done.stdout.strip() == "[]"


def test_a_lock_on_a_file_of_the_server_is_enough(tmp_path: Path) -> None:
    (tmp_path / "aria_log_control").touch()
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('locked', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "aria_log_control")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert f"process {process.pid} " in next(find_occupants(tmp_path))
        process.communicate()
    assert fcntl.F_GETLK  # the same question the kernel answers to servers


def test_an_empty_or_missing_directory_is_free_and_lost_and_found_is_nobodys_data(tmp_path: Path) -> None:
    refuse_non_empty(tmp_path)
    refuse_non_empty(tmp_path / "missing")
    (tmp_path / "lost+found").mkdir()
    refuse_non_empty(tmp_path)
    refuse_occupied(tmp_path / "missing")


def test_what_lies_in_a_directory_is_listed_in_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "ibdata1").touch()
    (tmp_path / "lost+found").touch()  # a file of that name is not the file system's
    assert foreign_entries(tmp_path) == ["ibdata1", "lost+found"]
    with pytest.raises(RefusedError, match="not empty") as refused:
        refuse_non_empty(tmp_path)
    assert refused.value.detail.splitlines() == ["ibdata1", "lost+found"]
    for number in range(40):
        (tmp_path / f"t{number}").touch()
    with pytest.raises(RefusedError, match="42 entries") as refused:
        refuse_non_empty(tmp_path)
    assert "and 22 more" in refused.value.detail
    with pytest.raises(RefusedError, match="not a directory"):
        refuse_non_empty(tmp_path / "ibdata1")
