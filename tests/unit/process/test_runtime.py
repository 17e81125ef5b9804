from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from backupd.process.runtime import runtime_directory

_PRINT = "from backupd.process.runtime import runtime_directory; print(runtime_directory(), flush=True)"


@contextlib.contextmanager
def _lingering(environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    script = _PRINT + "\nimport time; time.sleep(300)"
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_it_is_private_short_and_always_the_same(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    path = runtime_directory()
    assert path.parent == short_tmp / "run"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert len(str(path)) < 80
    assert runtime_directory() == path


def test_two_processes_have_two_and_both_are_gone_with_them(short_tmp: Path) -> None:
    environment = {**os.environ, "BACKUPD_RUNTIME": str(short_tmp / "run")}
    paths = {
        subprocess.run(
            [sys.executable, "-c", _PRINT], env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert len(paths) == 2
    assert not any(Path(path).exists() for path in paths)


def test_leftovers_of_the_killed_are_removed_and_the_living_are_left_alone(short_tmp: Path) -> None:
    environment = {**os.environ, "BACKUPD_RUNTIME": str(short_tmp / "run")}
    with _lingering(environment) as (victim, dead), _lingering(environment) as (_, living):
        (dead / "secret.cnf").write_text("password")
        victim.kill()
        victim.wait()
        assert dead.exists()
        subprocess.run([sys.executable, "-c", _PRINT], env=environment, check=True, capture_output=True)
        assert not dead.exists()
        assert living.exists()


def test_a_forked_process_gets_its_own(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    ours = runtime_directory()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if runtime_directory() != ours else 1
        finally:
            os._exit(code)  # whatever happened: no second run of the tests goes on in here
    assert os.waitpid(child, 0)[1] == 0
    assert ours.exists()


def test_a_place_that_others_can_write_to_is_refused(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = short_tmp / "open"
    place.mkdir()
    place.chmod(0o777)
    monkeypatch.setenv("BACKUPD_RUNTIME", str(place))
    with pytest.raises(RefusedError, match="not private"):
        runtime_directory()


def test_a_link_is_refused(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short_tmp / "real").mkdir()
    (short_tmp / "link").symlink_to(short_tmp / "real")
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "link"))
    with pytest.raises(RefusedError, match="not private"):
        runtime_directory()


def test_a_path_too_long_for_sockets_is_refused(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / ("x" * 70)))
    with pytest.raises(RefusedError, match="too long"):
        runtime_directory()
