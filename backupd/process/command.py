"""A program call as a value: built by the engine, compared by tests, rendered for logs and runbooks.

Starting programs so that none outlives us unless it is meant to, and ending them and everything below them so that none
is left.

Every child but those is wrapped in ``setpriv --pdeathsig KILL``: the kernel kills it when its parent dies, even by
SIGKILL. That "parent" is the *thread* that started it, so a child started by a worker thread would be killed when that
thread ends, in the middle of its work. Therefore one thread, which lives as long as the process, starts all of them.

A process that a fork server made (``backupd.process.forking``) becomes a child of ours without having been started
here: ``adopting`` and ``adopt``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import queue
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from backupd.model.errors import ConfigurationError, Problem, ToolError, ToolMissingError

_HIDDEN = "[hidden]"
_SECRET_OPTION = re.compile(
    r"(?P<name>--?[a-z0-9_-]*(?:password|passwd|pwd|passphrase|secret|secret-key|access-key|token|encrypt-key|encryption-key))"
    r"(?P<value>=.*)?",
    re.IGNORECASE | re.DOTALL,
)
_SECRET_VARIABLE = re.compile(r"PASSWORD|PASSWD|PWD$|PASSPHRASE|SECRET|TOKEN|ACCESS_KEY", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<head>[a-z][a-z0-9+.-]*://[^/@:\s]*:)[^/@\s]+@", re.IGNORECASE)
_SHORT_PASSWORD = re.compile(r"-p.+", re.DOTALL)
_SHORT_PASSWORD_PROGRAMS = ("mysql", "mariadb", "mariabackup", "xtrabackup", "mydumper", "myloader", "pt-")

_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""All that a program gets of our environment. The rest may hold credentials, or settings (MYSQL_HOME,
MYSQL_PWD, GNUPGHOME ...) that would make a tool do something else than its argv says."""

_MYSQL_CLIENT = "the MySQL or Percona client of the server's series, from the server's own repository"
_XTRABACKUP = "percona-xtrabackup-24 (servers 5.5 to 5.7), -80 (8.0) or -84 (8.4), from Percona's repository"
_DEBIAN_PACKAGES = {
    "gpg": "gpg",
    "gpgconf": "gpgconf",
    "gpg-agent": "gpg-agent",
    "zstd": "zstd",
    "tar": "tar",
    "bwrap": "bubblewrap",
    "setpriv": "util-linux",
    "mariadb": "mariadb-client",
    "mysql": _MYSQL_CLIENT,
    "mariadb-backup": "mariadb-backup",
    "mariabackup": "mariadb-backup",
    "mbstream": "mariadb-backup",
    "mariadbd": "mariadb-server-core",
    "mysqld": "the MySQL or Percona server of the same series, from the server's own repository",
    "mariadb-install-db": "mariadb-server-core",
    "mariadb-binlog": "mariadb-client",
    "mysqlbinlog": _MYSQL_CLIENT,
    "mysqladmin": _MYSQL_CLIENT,
    "mydumper": "mydumper",
    "myloader": "mydumper",
    "my_print_defaults": "mariadb-server-core",
    "pt-table-checksum": "percona-toolkit",
    "xtrabackup": _XTRABACKUP,
    "xbstream": _XTRABACKUP,
}


@dataclass(frozen=True, slots=True)
class Command:
    """One call of an external program.

    ``argv``: program (name or path) and arguments, never with a secret in it. ``env``: added to the few
    variables that a program inherits (see ``environment``). ``cwd``: its working directory. ``user``: name of
    the OS user to run as, or ``UID:GID`` of one who has none here (see ``find_account``), which needs us to be root.
    ``wrapped``: name of the program that ``argv`` runs in a
    sandbox: what fails is that one.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    user: str | None = None
    wrapped: str = ""

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise ValueError("a command needs a program")
        if any("\0" in word for word in self.argv):
            raise ValueError("a NUL byte cannot be part of an argument")

    @property
    def program(self) -> str:
        """The program's name without its folder, as errors and logs call it."""
        return self.wrapped or Path(self.argv[0]).name

    def render(self) -> str:
        """One line that a shell accepts, secrets replaced by ``[hidden]``."""
        words = [
            f"{name}={_HIDDEN if _SECRET_VARIABLE.search(name) else shlex.quote(value)}"
            for name, value in sorted(self.env.items())
        ]
        words += [shlex.quote(word) if word != _HIDDEN else word for word in self._redacted()]
        line = " ".join(words)
        if self.user is not None:
            line = f"runuser -u {shlex.quote(self.user)} -- {'env ' if self.env else ''}{line}"
        return f"cd {shlex.quote(str(self.cwd))} && {line}" if self.cwd is not None else line

    def _redacted(self) -> list[str]:
        shown: list[str] = [self.argv[0]]
        short = self.program.startswith(_SHORT_PASSWORD_PROGRAMS)
        hide_next = False
        for word in self.argv[1:]:
            match = _SECRET_OPTION.fullmatch(word)
            if hide_next and not word.startswith("-"):
                shown.append(_HIDDEN)
                hide_next = False
                continue
            hide_next = match is not None and match.group("value") is None
            if match is not None and match.group("value"):
                shown.append(f"{match.group('name')}={_HIDDEN}")
            elif short and _SHORT_PASSWORD.fullmatch(word):
                shown.append(f"-p{_HIDDEN}")
            else:
                shown.append(_URL_PASSWORD.sub(rf"\g<head>{_HIDDEN}@", word))
        return shown

    def environment(self) -> dict[str, str]:
        """The program's whole environment: a short list of ours, messages in English and UTF-8, then
        ``env``."""
        chosen = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        chosen.setdefault("PATH", os.defpath)
        # Sbin folders are missing from the PATH of cron and of plain users, but hold mariadbd.
        chosen["PATH"] += "".join(
            f":{folder}"
            for folder in ("/usr/local/sbin", "/usr/sbin", "/sbin")
            if folder not in chosen["PATH"].split(":")
        )
        chosen["LC_ALL"] = "C.UTF-8"
        if self.user is not None:
            account = find_account(self.user)
            chosen.update(
                HOME=account.pw_dir, USER=account.pw_name, LOGNAME=account.pw_name, SHELL=account.pw_shell or "/bin/sh"
            )
        chosen.update(self.env)
        return chosen

    def located(self) -> str:
        """Absolute path of the program. Raises ToolMissingError with the Debian package where it is known."""
        return locate(self.argv[0], self.environment()["PATH"])


def locate(program: str, path: str | None = None) -> str:
    """Find ``program`` (a name, or a path) in ``path`` (default: where commands look).

    Raises ToolMissingError, whose hint names the Debian package where it is known.
    """
    if path is None:
        path = Command((program,)).environment()["PATH"]
    found = shutil.which(program, path=path)
    if found is not None:
        return str(Path(found).absolute())
    name = Path(program).name
    if os.sep in program and Path(program).exists():
        raise ToolMissingError(f"{program} is there but cannot be executed", hint=f"chmod +x {shlex.quote(program)}")
    package = _DEBIAN_PACKAGES.get(name)
    if package is None:
        hint = f"install {name}, or put its folder into PATH"
    else:
        hint = f"install {package}" if " " in package else f"apt-get install {package}"
    what = f"{program} does not exist" if os.sep in program else f"{name} is missing"
    raise ToolMissingError(f"the program {what}", hint=hint)


def become(user: str) -> list[str]:
    """Options that make setpriv ``user``, for good."""
    account = find_account(user)
    groups = "--clear-groups" if ":" in user else "--init-groups"
    return ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), groups, "--no-new-privs"]


def find_account(user: str) -> pwd.struct_passwd:
    """The OS account ``user``, a name or ``UID:GID``. Raises ConfigurationError when there is none."""
    uid, is_pair, gid = user.partition(":")
    if is_pair:
        return pwd.struct_passwd((user, "x", int(uid), int(gid), "", "/nonexistent", ""))
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise ConfigurationError(
            [Problem("/etc/passwd", None, "", f"there is no OS user {user!r}")],
            hint="create it, or name the user that runs the database server",
        ) from None


POLITE_SECONDS = 2.0
"""How long a program has after SIGINT before SIGKILL."""

_unreaped: set[int] = set()
"""Ids of the children that a ``Child`` watches and that have not been reaped yet."""


class _Process(Protocol):
    """What ``Child`` needs of a process that it may wait for, as subprocess.Popen has it."""

    pid: int
    returncode: int | None

    def wait(self) -> int: ...


class _Adopted:
    """A child that this process has not started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody else has waited for it, and knows how it ended
            self.returncode = -signal.SIGKILL
        return self.returncode


class Child:
    """A started program: leader of its own session and process group. All methods may be called from any
    thread."""

    def __init__(self, command: Command, process: _Process) -> None:
        self.command = command
        self.pid = process.pid
        self._process = process
        self._lock = threading.RLock()  # a signal handler may call send() while its thread is in poll()

    @property
    def program(self) -> str:
        """The program that it runs, as its command names it."""
        return self.command.program

    def poll(self) -> int | None:
        """Exit code (negative: the signal's number) once the program has exited, else None.

        On the first call after the exit, whatever it left in its process group is killed: nothing in there
        can still write into a result that we are about to trust.
        """
        with self._lock:
            if self._process.returncode is None and self._has_exited():
                # Before reaping: until then the group's number cannot belong to somebody else.
                self._send(signal.SIGKILL)
                with _spawner.reaping:
                    self._process.wait()
                    _unreaped.discard(self.pid)
            code = self._process.returncode
            # A sandbox reports an end by a signal as a shell does: 128 and its number.
            return 128 - code if self.command.wrapped and code is not None and code > 128 else code

    def wait(self, seconds: float) -> int | None:
        """Like ``poll``, waiting up to ``seconds`` for the exit."""
        deadline = time.monotonic() + seconds
        pause = 0.0002
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 2, 0.05)
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, unless the program has already gone."""
        with self._lock:
            if self._process.returncode is None:
                self._send(number)

    def _has_exited(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def stop(children: Sequence[Child], *, polite_seconds: float = POLITE_SECONDS) -> None:
    """End all ``children`` and their process groups, and return when they are gone.

    First SIGINT, because mariadb-backup blocks SIGTERM, SIGHUP and SIGQUIT and would run on to "completed
    OK!"; after ``polite_seconds`` SIGKILL.
    """
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.send(signal.SIGINT)
    deadline = time.monotonic() + polite_seconds
    for child in running:
        child.wait(max(0.0, deadline - time.monotonic()))
    for child in running:
        child.send(signal.SIGKILL)
    for child in running:
        while child.wait(5.0) is None:  # stuck in the kernel (dead NFS): SIGKILL takes effect when it returns
            child.send(signal.SIGKILL)


def spawn(
    command: Command, *, stdin: int, stdout: int, stderr: int, pass_fds: Sequence[int] = (), outlives: bool = False
) -> Child:
    """Start ``command`` with these descriptors, which stay the caller's to close. ``outlives``: it goes on when this
    process ends.

    Raises ToolMissingError, ToolError when the program cannot be started at all, ConfigurationError for an
    unknown user.
    """
    options = [] if outlives else ["--pdeathsig", "KILL"]
    if command.user is not None and find_account(command.user).pw_uid != os.geteuid():
        options += become(command.user)
    wrapper = [locate("setpriv"), *options, "--"] if options else []
    argv = [*wrapper, command.located(), *command.argv[1:]]
    environment = command.environment()

    def start() -> Child:
        popen = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            env=environment,
            cwd=command.cwd,
            start_new_session=True,
            close_fds=True,
        )
        with _spawner.reaping:
            _unreaped.add(popen.pid)
        return Child(command, popen)

    try:
        return _spawner.call(start, unwanted=_kill)
    except OSError as error:
        raise ToolError(
            f"{command.program} cannot be started: {error.strerror or error}", detail=command.render()
        ) from error


def _kill(child: Child) -> None:
    stop([child], polite_seconds=0.0)


_SET_SUBREAPER = 36
"""The operation of prctl(2)."""


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """In the block, processes below this one whose parent ends become children of this one, and not of process 1.

    That holds for all of them. Those that end without a ``Child`` are reaped at the beginning of the next block.
    """
    _spawner.call(_reap_strangers)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def adopt(command: Command, pid: int) -> Child:
    """The process ``pid``, which runs ``command`` and leads its own session, as a child of ours. Raises
    ChildProcessError when it is none."""

    def register() -> Child:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        with _spawner.reaping:
            _unreaped.add(pid)
        return Child(command, _Adopted(pid))

    return _spawner.call(register)


def _reap_strangers() -> None:
    """Children that have exited, that nobody here watches, and that lead or belong to another session than this
    process: a library that starts a program leaves it in ours, and reaps it. Runs in the thread that starts all
    children: none is in between its start and being watched."""
    with contextlib.suppress(ChildProcessError):  # there is no child at all
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    for pid in children(os.getpid()):
        with _spawner.reaping, contextlib.suppress(OSError):  # it is gone
            if pid not in _unreaped and os.getsid(pid) != os.getsid(0):
                os.waitpid(pid, os.WNOHANG)


T = TypeVar("T")
_Request = tuple[Callable[[], Any], Future[Any]]
"""What to do, and where the answer to it goes."""


class _Spawner:
    """The thread that is every child's parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reaping = threading.Lock()
        """Held by who reaps. Of a child that another thread has reaped, subprocess says that it ended well."""
        self._requests: queue.SimpleQueue[_Request] | None = None

    def call(self, work: Callable[[], T], *, unwanted: Callable[[T], None] = lambda _answer: None) -> T:
        """What ``work`` gives in that thread. ``unwanted``: what to do with it when Ctrl-C came while it was waited
        for."""
        answer: Future[T] = Future()

        def end(late: Future[T]) -> None:
            if late.exception() is None:
                unwanted(late.result())

        self._queue().put((work, answer))
        try:
            return answer.result()
        except KeyboardInterrupt:
            answer.add_done_callback(end)
            raise

    def forget(self) -> None:
        """After a fork the child has no such thread, and no children: begin anew there."""
        self._lock = threading.Lock()
        self.reaping = threading.Lock()
        self._requests = None
        _unreaped.clear()

    def _queue(self) -> queue.SimpleQueue[_Request]:
        with self._lock:
            if self._requests is None:
                requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
                # A daemon thread: it never ends, and must not keep the process from ending.
                threading.Thread(target=self._serve, args=(requests,), name="spawner", daemon=True).start()
                # Only now: had the system refused the thread, nobody would ever answer.
                self._requests = requests
            return self._requests

    @staticmethod
    def _serve(requests: queue.SimpleQueue[_Request]) -> None:
        while True:
            work, answer = requests.get()
            try:
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001  not hidden: the caller's result() raises it
                answer.set_exception(error)
            del work, answer


_spawner = _Spawner()
os.register_at_fork(after_in_child=_spawner.forget)


def children(pid: int) -> list[int]:
    """Processes that ``pid`` or one of its threads is the parent of."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text(encoding="ascii").split()]
    return found


def family(pid: int) -> list[int]:
    """``pid`` and all processes below it."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += children(one)
    return found


def kill_family(pid: int) -> None:
    """SIGKILL for a child of ours, which nobody has reaped yet, and for all below it.

    The child is stopped first, so that it starts nothing while it is being looked at.
    """
    ends: list[int] = []
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for one in family(pid):
        with contextlib.suppress(ProcessLookupError):
            ends.append(os.pidfd_open(one))
    for end in ends:
        # By descriptor: the number may already belong to somebody else.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)
