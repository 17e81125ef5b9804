"""The fork server and what it forks: real processes, streams of a server that never answers."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from backupd.app.context.settings import Settings
from backupd.app.runtime import child_process, fork_server
from backupd.app.runtime.child_process import ChildProcess, Starter
from backupd.app.runtime.fork_server import ForkServer
from backupd.app.runtime.other_process import OtherProcess
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import open_catalog
from backupd.process.command import Command, adopt, adopting, children, kill_family, spawn
from backupd.process.forking import answer_requests, files_state
from backupd.process.runtime import runtime_directory
from tests.support.keys import Keys
from tests.support.service.house import GOLD, Office
from tests.support.service.processes import end_streams_of
from tests.support.stores.gate import until


@dataclass
class Place:
    """Settings of a server that never answers, and a fork server that has not been asked yet. ``listener``: the
    server's socket."""

    settings: Settings
    forks: ForkServer
    log: Path
    listener: socket.socket
    connections: list[socket.socket] = field(default_factory=list)

    def stream(self, start: Starter | None = None, *, of: Settings | None = None) -> ChildProcess:
        """It is connected, and waits for the server."""
        settings = of or self.settings
        found = (start or self.forks.start)(settings, settings.hold(runtime_directory()), "run-stream", "db1")
        self.connections.append(self.listener.accept()[0])
        return found

    def job(self) -> ChildProcess:
        """It ends at once: nobody knows it."""
        held = self.settings.hold(runtime_directory())
        return self.forks.start(
            self.settings, held, "run-job", "20261121T042512Z-7f3a9c01", "--token", "1", log=self.log
        )


@pytest.fixture
def place(short_tmp: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (short_tmp / "gnupg").symlink_to(keys.public_home)
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    monkeypatch.setattr(fork_server, "IMPORTING", 120.0)
    settings = Office(short_tmp, policies={"gold": GOLD + "binlog: {checkpoint: 5s}\n"}).write()
    open_catalog(settings.catalog).close()
    with ForkServer() as forks, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_tmp / "no.sock"))
        listener.listen()
        listener.settimeout(120)
        place = Place(settings, forks, short_tmp / "log", listener)
        yield place
        for one in place.connections:
            one.close()
    end_streams_of(settings.file)


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def exit_code(process: ChildProcess) -> int:
    until(lambda: process.ended() is not None)
    code = process.ended()
    assert code is not None
    return code


def end(process: ChildProcess) -> None:
    kill_family(process.child.pid)
    assert exit_code(process) == -signal.SIGKILL, process.last_words()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_process_is_forked_and_is_a_child_of_who_asked_in_a_session_of_its_own(place: Place) -> None:
    stream = place.stream()
    pid = stream.child.pid
    assert place.forks.pid is not None
    assert pid in children(os.getpid())
    assert place.forks.pid in children(os.getpid())
    assert children(place.forks.pid) == []
    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
    assert command_line(pid)[:6] == [sys.executable, "-P", "-m", "backupd", "run-stream", "db1"]
    assert command_line(place.forks.pid)[2] == "backupd.cli.fork_server"
    end(stream)


def test_its_exit_status_and_what_it_said_are_known(place: Place) -> None:
    job = place.job()
    assert exit_code(job) == 2
    assert "there is no job 20261121T042512Z-7f3a9c01" in job.last_words()
    assert place.log.read_text().startswith("backupd: error: there is no job 20261121T042512Z-7f3a9c01\n")


def test_it_unwinds_when_it_is_asked_to_end_and_is_killed_by_sigkill(place: Place) -> None:
    killed = place.stream()
    os.kill(killed.child.pid, signal.SIGKILL)
    assert exit_code(killed) == -signal.SIGKILL
    polite = place.stream()  # one stream of a server at a time
    polite.child.send(signal.SIGTERM)
    assert (exit_code(polite), polite.last_words().endswith('"message": "bye"}')) == (0, True)


def test_the_fork_server_holds_nothing_but_its_socket_and_has_one_thread(place: Place) -> None:
    assert exit_code(place.job()) == 2
    process = Path(f"/proc/{place.forks.pid}")
    assert len(list((process / "task").iterdir())) == 1
    opened = {str(path.readlink()) for path in (process / "fd").iterdir()}
    assert {name.partition(":")[0] for name in opened} == {"/dev/null", "pipe", "socket"}
    assert len(list((process / "fd").iterdir())) == 4


def test_a_killed_fork_server_takes_nobody_with_it_and_is_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = place.stream()
    first = place.forks.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert exit_code(place.job()) == 2, "started as any other program"
    assert place.forks.pid is None
    assert exit_code(place.job()) == 2
    assert place.forks.pid is None, "not before a pause"
    assert stream.ended() is None
    monkeypatch.setattr(place.forks, "_next_start", 0.0)
    assert exit_code(place.job()) == 2
    assert place.forks.pid not in (None, first)
    assert stream.ended() is None
    assert gone(first)
    end(stream)


def test_a_stopped_fork_server_holds_nobody_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "ANSWER", 0.5)
    assert exit_code(place.job()) == 2
    first = place.forks.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    assert exit_code(place.job()) == 2
    assert gone(first)


def test_one_that_cannot_begin_leaves_its_words_and_processes_are_started_without_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.forks = ForkServer(lambda module, *words: child_process.python(module.replace("cli", "none"), *words))
    monkeypatch.setattr(fork_server, "say", lambda _event, message, **_more: said.append(message))
    said: list[str] = []
    assert exit_code(place.job()) == 2
    assert "No module named 'backupd.none'" in "".join(said)


_SERVICE = """
import sys, time
from pathlib import Path
from backupd.app.context.settings import load_settings
from backupd.app.runtime.fork_server import ForkServer
from backupd.process.runtime import runtime_directory
settings = load_settings(Path(sys.argv[1]))
with ForkServer() as forks:
    stream = forks.start(settings, settings.hold(runtime_directory()), "run-stream", "db1")
    print(stream.child.pid, forks.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_service_takes_the_fork_server_and_what_was_forked_with_it(place: Place) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVICE, str(place.settings.file)], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        stream, server = (int(word) for word in service.stdout.readline().split())
        place.connections.append(place.listener.accept()[0])
        assert command_line(stream)[4] == "run-stream"
        service.kill()
    until(lambda: gone(stream) and gone(server))


@pytest.mark.parametrize("forked", [True, False])
def test_one_that_outlives_its_service_is_known_by_its_name_and_number_and_no_other_one_is(
    place: Place, forked: bool
) -> None:
    how = "forks.start" if forked else "start"
    script = _SERVICE.replace("forks.start(", f"{how}(").replace(
        '"db1")', '"db1", outlives=True, log=Path(sys.argv[2]))'
    )
    script = script.replace(
        "import ForkServer", "import ForkServer\nfrom backupd.app.runtime.child_process import start"
    )
    words = [sys.executable, "-c", script, str(place.settings.file), str(place.log)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        stream = int(service.stdout.readline().split()[0])
        place.connections.append(place.listener.accept()[0])
        service.kill()
    note = Spool(place.settings.spool / "binlogs" / "db1").holder()
    assert note is not None
    name = json.loads(note)["owner"]
    assert OtherProcess.of(name[:-1]) is None, "it began at another moment"
    found = OtherProcess.of(name)
    assert found is not None
    assert (found.pid, found.ended()) == (stream, False)
    found.end(1.0, 60.0)
    until(found.ended)
    assert OtherProcess.of(name) is None
    found.end(100.0, 1.0)  # nobody is meant by it any more
    assert '"message": "bye"' in place.log.read_text()


def test_who_asks_and_is_gone_before_the_permission_leaves_no_process_behind() -> None:
    """And so does one that was forked and is not a child of whoever asked."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server == 0:
        ours.close()
        if answer_requests(its, [], files_state([])) is not None:
            os.kill(os.getpid(), signal.SIGSTOP)  # it would stay
        os._exit(0)
    its.close()
    with ours:
        assert ours.recv(100) == b"ready"
        permission, go = os.pipe()
        with adopting():
            socket.send_fds(ours, [b'{"words": [], "shown": [], "outlives": false}'], [2, permission])
            child = int(ours.recv(100).decode().strip('{}" pid:'))
            one = adopt(Command(("true",)), child)
        os.close(permission)
        assert one.poll() is None
        os.close(go)
        assert one.wait(60) == 0
    assert os.waitpid(server, 0)[1] == 0


def test_after_files_were_exchanged_processes_run_what_is_installed_now(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    stream = place.stream()
    first = place.forks.pid
    (tmp_path / "library-2.0.dist-info").mkdir()
    assert exit_code(place.job()) == 2, "started as any other program"
    assert place.forks.pid is None
    assert exit_code(place.job()) == 2
    assert place.forks.pid not in (None, first)
    assert stream.ended() is None
    end(stream)


def test_the_state_of_files_tells_each_exchange(tmp_path: Path) -> None:
    (tmp_path / "inner" / "__pycache__").mkdir(parents=True)
    file = tmp_path / "inner" / "one.py"
    file.write_text("1")
    before = files_state([str(tmp_path)])
    (tmp_path / "inner" / "__pycache__" / "one.pyc").touch()
    assert files_state([str(tmp_path)]) == before
    found = [before]
    file.write_text("12")
    found.append(files_state([str(tmp_path)]))
    (tmp_path / "new.py").write_text("21")
    (tmp_path / "new.py").replace(file)
    found.append(files_state([str(tmp_path)]))
    file.unlink()
    found.append(files_state([str(tmp_path)]))
    assert all(one not in found[:number] for number, one in enumerate(found))


def test_other_kinds_of_destinations_have_another_fork_server_and_other_settings_have_not(place: Place) -> None:
    assert exit_code(place.job()) == 2
    first = place.forks.pid
    again = Office(place.settings.file.parent, policies={"gold": GOLD + "binlog: {checkpoint: 7s}\n"}).write()
    stream = place.stream(of=again)
    assert place.forks.pid == first
    end(stream)
    (bucket,) = (one.model_copy(update={"type": "s3"}) for one in place.settings.destinations.values())
    configuration = place.settings.configuration.model_copy(update={"destinations": {"away": bucket}})
    end(place.stream(of=replace(place.settings, configuration=configuration)))
    assert place.forks.pid not in (None, first)
    assert command_line(place.forks.pid or 0)[3] == "s3"


def test_threads_may_ask_at_once(place: Place) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = list(pool.map(lambda _number: place.job(), range(8)))
    assert len({job.child.pid for job in jobs}) == 8
    assert [exit_code(job) for job in jobs] == [2] * 8


def test_a_forked_process_takes_half_of_the_memory(place: Place) -> None:
    def private(pid: int) -> int:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))

    taken = []
    for start in (place.forks.start, child_process.start):
        stream = place.stream(start)
        taken.append(private(stream.child.pid))
        end(stream)
    assert taken[0] < taken[1] * 2 / 3


def test_where_no_process_can_be_forked_it_is_started(place: Place) -> None:
    assert exit_code(place.job()) == 2
    server = place.forks.pid
    assert server is not None
    resource.prlimit(server, resource.RLIMIT_NOFILE, (4, 4))  # it gets no pipe
    assert exit_code(place.job()) == 2
    assert place.forks.pid is None


def test_orphans_that_nobody_watches_are_reaped() -> None:
    script = "setsid sh -c 'echo $$; exec sleep 600' & wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        with adopting():
            parent.kill()
            parent.wait()
        os.kill(orphan, signal.SIGKILL)
        until(lambda: Path(f"/proc/{orphan}/stat").read_text().split()[2] == "Z")
    with adopting():
        assert gone(orphan)


def test_a_child_whose_end_is_being_read_is_not_reaped_as_an_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have ended well for who waits for it."""
    nothing = subprocess.DEVNULL
    child = spawn(Command(("sh", "-c", "exit 3")), stdin=nothing, stdout=nothing, stderr=nothing)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    wait = child._process.wait

    def meanwhile() -> int:
        thread = threading.Thread(target=lambda: adopting().__enter__(), daemon=True)
        thread.start()
        thread.join(0.5)
        return wait()

    monkeypatch.setattr(child._process, "wait", meanwhile)
    assert child.poll() == 3
    with adopting():
        pass  # the other one is over


def test_one_that_somebody_else_reaped_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    child = adopt(Command(("true",)), pid)
    os.waitpid(pid, 0)
    assert child.poll() == -signal.SIGKILL
    with pytest.raises(ChildProcessError):
        adopt(Command(("true",)), 1)


def test_a_command_line_that_is_too_long_is_cut() -> None:
    script = """from pathlib import Path
from backupd.process.forking import show_as
show_as(['x' * 100000])
print(Path('/proc/self/cmdline').read_text())"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.rstrip("\0\n")) == {"x"}
    assert 100 < len(done.stdout) < 1000
