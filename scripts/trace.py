"""What a backup, a plan and a restore pass through, and what commands cost; for scripts/figures.py, which starts this.

    PYTHONPATH=ROOT ROOT/.venv/bin/python scripts/trace.py trace|cpu

``trace``: on a private MariaDB, in this process, with the test support of ROOT, and with functions of the product alone
("our" frames; a file counts once). A thread's stack is continued by that of who started it.

backup to commit       the stack in the moment when the manifest gets its name, from `backupd backup` on
restore: asked         from the route of POST /v1/restores (what the framework calls before is not on its stack) to the
                       queued job
restore: done          from `backupd run-job`, which the worker starts, to the statement that lets the copy's server
                       begin with the first event of the archived binary logs
restore, both          files of the two together
plan                   of `backupd plan`: every file of which a function is called, those of restore/ among them, and
                       how often the walk goes from one file of restore/ to another one; the bodies of modules and
                       classes do not count, which run when they are imported

``cpu``: read-only commands over an installation with some weeks in its catalog and no server that answers; and the
process of a job until its work begins: until it first connects to a server, starts a program or opens something at a
destination. Both of a copy of ROOT that is installed as a wheel would be: the finder of an editable one costs 10 to 18
ms. Jobs are forked as the service does it; with what the fork server spends on each, without its own start, which has a
row of its own.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path.cwd()
PACKAGES = ("backupd", "api", "storage", "restore", "policies")
REPLAY = ("START SLAVE", "START REPLICA")
READING = (
    ["--version"],
    ["--help"],
    ["backups"],
    ["jobs"],
    ["alerts"],
    ["token", "list"],
    ["audit"],
    ["timeline", "db1"],
    ["retention", "db1"],
    ["policy", "schema"],
)
JOBS = {"physical-full": {}, "replicate": {"destination": "local"}, "retention": {}}
UNTIL_WORK = """
import os, sys, time
from backupd.cli import fork_server

destination, note = sys.argv[1:3]

def heard(event, arguments):
    if sys.argv[:2] != ["backupd", "run-job"]:
        return  # the fork server itself
    path = arguments[0] if event in ("open", "os.listdir", "os.scandir") else None
    at_destination = isinstance(path, str | bytes) and os.fsdecode(path).startswith(destination)
    if at_destination or event in ("socket.connect", "subprocess.Popen", "os.fork", "os.posix_spawn"):
        seconds = str(time.process_time())
        os.write(os.open(note, os.O_WRONLY | os.O_CREAT, 0o600), seconds.encode())
        os._exit(0)

sys.addaudithook(heard)
sys.exit(fork_server.run(int(sys.argv[3]), sys.argv[4:-1]))
"""
ROUNDS = 3


@dataclass
class Stack:
    """Files of ours, one for each frame, the outermost first."""

    files: list[str] = field(default_factory=list)

    @property
    def distinct(self) -> set[str]:
        return set(self.files)


def ours(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    if not path.startswith(f"{ROOT}/"):
        return None
    inner = path[len(str(ROOT)) + 1 :]
    return inner if inner.partition("/")[0] in PACKAGES else None


def stack_from(frame: FrameType | None) -> Stack:
    files: list[str] = []
    while frame is not None:
        if (name := ours(frame)) is not None:
            files.append(name)
        frame = frame.f_back
    begun: list[str] = getattr(threading.current_thread(), "begun_by", [])
    return Stack(begun + files[::-1])


@contextmanager
def threads_continue() -> Iterator[None]:
    """Every thread knows the stack that it was started from."""
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        thread.begun_by = stack_from(inspect.currentframe()).files  # type: ignore[attr-defined]
        start(thread)

    threading.Thread.start = noted  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


@contextmanager
def calls(seen: Callable[[FrameType], None]) -> Iterator[None]:
    """``seen`` hears of every call of a Python function, in all threads that begin from now on, and in this one."""

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            seen(frame)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def command(*arguments: str) -> None:
    """`backupd ARGUMENTS` here. Raises RuntimeError unless it succeeds."""
    from backupd.cli.main import main

    with redirect_stdout(StringIO()) as out:
        code = main(arguments)
    if code != 0:
        raise RuntimeError(f"backupd {' '.join(arguments)}: exit {code}\n{out.getvalue()}")


def backup_to_commit(server: str) -> Stack:
    found: list[Stack] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.link") and os.fsdecode(arguments[1]).endswith("manifest.json"):
            found.append(stack_from(inspect.currentframe()))

    sys.addaudithook(audit)
    with threads_continue():
        command("backup", server, "--kind", "full")
    return found[0]


def restore_asked(house: Any, server: str) -> tuple[Stack, list[str]]:
    """And the words of the command that does the job."""
    from backupd.app.context.settings import load_settings
    from tests.support.service.rig import rig

    found: list[Stack] = []
    with rig(load_settings(house.config)) as running:
        restores = type(running.catalog.restores)
        queue = restores.queue

        def noted(*arguments: Any, **named: Any) -> Any:
            found.append(stack_from(inspect.currentframe()))
            return queue(*arguments, **named)

        restores.queue = noted  # type: ignore[method-assign]
        answer = running.client("admin").post(
            "/v1/restores", json={"server": server, "target": "latest", "datadir": str(house.base / "restored")}
        )
        if answer.status_code != 202:
            raise RuntimeError(answer.text)
        job = running.catalog.jobs.claim("figures", running.wiring.clock(), runs_on=running.wiring.here)
        if job is None:
            raise RuntimeError("the restore is not in the queue")
        return found[0], ["run-job", job.id, "--token", str(job.token)]


def restore_done(words: list[str]) -> Stack:
    found: list[Stack] = []

    def seen(frame: FrameType) -> None:
        if frame.f_code.co_name == "execute" and not found and ours(frame) is not None:
            said = [value for value in frame.f_locals.values() if isinstance(value, str | tuple)]
            if any("".join(text)[:13].startswith(REPLAY) for text in said if all(isinstance(one, str) for one in text)):
                found.append(stack_from(frame))

    with threads_continue(), calls(seen):
        command(*words)
    return found[0]


def plan_entered(server: str, datadir: Path) -> dict[str, Any]:
    entered: dict[str, None] = {}
    walk: list[str] = []

    def seen(frame: FrameType) -> None:
        name = ours(frame)
        if name is not None and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
            entered.setdefault(name)
            if name.startswith("restore/") and (not walk or walk[-1] != name):
                walk.append(name)

    with calls(seen):
        command("plan", server, "--to", "latest", "--datadir", str(datadir))
    return {
        "plan: files entered": len(entered),
        "plan: files of restore/ entered": sorted(name for name in entered if name.startswith("restore/")),
        "plan: steps between files of restore/": len(walk) - 1,
    }


def trace() -> dict[str, Any]:
    from tests.support import sample
    from tests.support.e2e.archived import Archive
    from tests.support.e2e.house import SERVER, House
    from tests.support.keys import operator_keys
    from tests.support.servers.mariadb import PrivateServer
    from tests.support.stores.folders import short_directory

    with short_directory() as base, operator_keys() as keys, PrivateServer() as server:
        server.create_backup_users()
        sample.create(server)
        house = House(base, server, keys)
        os.environ |= house.environment()
        backup = backup_to_commit(SERVER)
        server.execute("UPDATE shop.order_lines SET amount = amount + 1")
        Archive(house, server).take()
        planned = plan_entered(SERVER, base / "planned")
        asked, words = restore_asked(house, SERVER)
        done = restore_done(words)
    shown = {"backup to commit": backup, "restore: asked": asked, "restore: done": done}
    result: dict[str, Any] = {}
    for name, stack in shown.items():
        result |= {f"{name}: frames": len(stack.files), f"{name}: files": list(dict.fromkeys(stack.files))}
    return result | {"restore, both: files": len(asked.distinct | done.distinct)} | planned


def installed(folder: Path) -> Path:
    """ROOT as it is when it was installed, with the libraries of its environment; gives the folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    for information in (path for entry in sys.path for path in Path(entry).glob("backupd-*.dist-info")):
        shutil.copytree(information, site / information.name, dirs_exist_ok=True)
    libraries = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n")
    program = folder / "bin" / "backupd"
    program.write_text(f"#!{folder}/bin/python\nimport sys\nfrom backupd.cli.main import main\nsys.exit(main())\n")
    program.chmod(0o755)
    return program.parent


def cpu() -> dict[str, Any]:
    from backupd.app.context.wiring import Wiring
    from backupd.catalog.session import open_catalog
    from tests.support.service.state import fill, two_servers

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        programs = installed(Path(folder) / "installed")
        settings = two_servers(Path(folder))
        with open_catalog(settings.catalog) as catalog:
            fill(Wiring(settings, catalog))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"BACKUPD_CONFIG": str(settings.file), "BACKUPD_RUNTIME": f"{folder}/run"}
        for words in READING:
            seconds = []
            for _ in range(1 + ROUNDS):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                done = subprocess.run(
                    [str(programs / "backupd"), *words], env=environment, check=False, capture_output=True, text=True
                )
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                if done.returncode not in (0, 1):
                    raise RuntimeError(f"backupd {' '.join(words)}: exit {done.returncode}\n{done.stderr}")
                seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            found[f"CPU s of backupd {' '.join(words)}"] = round(statistics.median(seconds[1:]), 2)
        os.environ["BACKUPD_RUNTIME"] = environment["BACKUPD_RUNTIME"]
        return found | jobs(settings, programs / "python")


def jobs(settings: Any, python: Path) -> dict[str, Any]:
    """The first one of each kind does not count: it compiles modules."""
    from backupd.app.context.wiring import Wiring
    from backupd.app.jobs.jobs import queued
    from backupd.app.runtime import fork_server
    from backupd.catalog.session import open_catalog
    from backupd.model.job import JobKind, JobState
    from backupd.process.command import Command

    found: dict[str, Any] = {}
    folder = settings.file.parent
    held, note = settings.hold(folder), folder / "seconds"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def command(_module: str, *words: str) -> Command:
        first = (str(python), "-P", "-c", UNTIL_WORK, str(folder / "repository"), str(note))
        return Command((*first, *words), env=environment)

    forks = fork_server.ForkServer(command)
    with forks:
        spent = 0.0
        for kind, arguments in JOBS.items():
            seconds, own = [], []
            for _ in range(1 + ROUNDS):
                with open_catalog(settings.catalog) as catalog:
                    wiring = Wiring(settings, catalog)
                    wiring.destination("local").initialise(now := wiring.clock())
                    job = replace(
                        queued(wiring, JobKind(kind), "db1", by="figures", arguments=arguments),
                        state=JobState.RUNNING,
                        started_at=now,
                        heartbeat_at=now,
                        token=1,
                    )
                    catalog.jobs.add(job)
                process = forks.start(settings, held, "run-job", job.id, "--token", "1")
                while process.ended() is None:
                    time.sleep(0.01)
                if not note.exists():
                    raise RuntimeError(f"{kind}: {process.last_words()}")
                seconds.append(float(note.read_text()))
                note.unlink()
                before, spent = spent, _spent(forks.pid)
                found.setdefault("CPU s of the fork server until it is ready", round(spent, 2))
                own.append(spent - before)
            of_all = statistics.median(seconds[1:]) + statistics.mean(own[1:])
            found[f"CPU s of a job until its work begins: {kind}"] = round(of_all, 2)
    return found


def _spent(process: int | None) -> float:
    """CPU seconds of it and of those that it has waited for."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    answered = {"trace": trace, "cpu": cpu}[sys.argv[1]]()
    print(json.dumps(answered))
