"""One installation of backupd for one test: configuration, repository, catalog, and the command line to drive it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.dice import size
from tests.support.keys import Keys
from tests.support.oracle import judged
from tests.support.servers import warm
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server

BACKUPD = str(Path(sys.executable).with_name("backupd"))
SERVER = "shop-db1"
LONGEST = size(300, 3000)
"""Seconds that a command may take before it counts as one that hangs."""


@dataclass(frozen=True)
class Done:
    """A finished command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, object_hook=judged)

    @property
    def all(self) -> str:
        return self.out + self.err


@dataclass
class House:
    """``repository`` is the folder of the destination ``local``; ``env`` is added to each command's environment;
    ``under``: words before the program of each."""

    base: Path
    server: Server
    keys: Keys
    catalog: str = ""
    policy_extra: str = ""
    config_extra: str = "api: {enabled: false}\n"
    repository: Path = field(init=False)
    config: Path = field(init=False)
    env: dict[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    under: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.repository = self.base / "repository"
        self.config = self.base / "backupd.yaml"
        self.catalog = self.catalog or f"sqlite:///{self.base}/catalog.db"
        self.write()

    def write(
        self, *, encryption_home: Path | None = None, restore_home: Path | None = None, repository: Path | None = None
    ) -> None:
        """(Re)write the configuration and the policy."""
        self.repository = repository or self.repository
        policies = self.base / "policies"
        policies.mkdir(exist_ok=True)
        (policies / "gold.yaml").write_text(
            'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n' + self.policy_extra
        )
        client = self.server.client_file(SERVICE_USER, SERVICE_PASSWORD)
        self.config.write_text(
            f"catalog: {self.catalog}\nspool: {self.base}/spool\npolicies: {policies}\n"
            f"programs: {json.dumps(dict(self.programs))}\n"
            f"servers:\n  {SERVER}: {{socket: {self.server.socket}, defaults_file: {client}, policy: gold}}\n"
            f"destinations:\n  local: {{type: filesystem, path: {self.repository}}}\n"
            f"encryption: {{gnupg_home: {encryption_home or self.keys.public_home}, "
            f"recipients: [{self.keys.user_id}]}}\n"
            f"restore: {{gnupg_home: {restore_home or self.keys.secret_home}, "
            f"scratch: {{path: {self.base}/scratch, memory: 256MiB}}}}\n" + self.config_extra
        )

    # -- commands

    def environment(self) -> dict[str, str]:
        return {**os.environ, "BACKUPD_CONFIG": str(self.config), "BACKUPD_RUNTIME": str(self.base / "run"), **self.env}

    def popen(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.under, BACKUPD, *args],
            env=self.environment(),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *args: str, timeout: float = LONGEST) -> Done:
        """Run ``backupd ARGS`` whatever it answers; a traceback is always a failure."""
        code, out, err = warm.run([BACKUPD, *args], self.environment(), timeout, self.under)
        assert "Traceback" not in err, err
        return Done(code, out, err)

    def ok(self, *args: str, timeout: float = LONGEST) -> Any:
        """Run with --json, expect success, give the document."""
        done = self.run(*args, "--json", timeout=timeout)
        assert done.code == 0, done.all
        return done.json

    def fails(self, *args: str, code: int = 1, timeout: float = LONGEST) -> Done:
        done = self.run(*args, timeout=timeout)
        assert done.code == code, f"exit {done.code} where {code} was expected\n{done.all}"
        return done

    def refuses(self, name: str, *args: str) -> Done:
        """Run what must be refused with ``name`` (a release, a program) among its words."""
        done = self.fails(*args)
        assert name in done.all, done.all
        return done

    # -- shorthands

    def backup(self) -> dict[str, Any]:
        record: dict[str, Any] = self.ok("backup", SERVER, "--kind", "full")
        return record

    def restore(self, datadir: Path, *, to: str = "latest") -> dict[str, Any]:
        outcome: dict[str, Any] = self.ok("restore", SERVER, "--to", to, "--datadir", str(datadir))
        return outcome

    def backups(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.ok("backups", SERVER)
        return listed

    def fsck(self) -> list[dict[str, Any]]:
        """Findings of a plain ``backupd fsck``, whatever its exit code."""
        done = self.run("fsck", "--json")
        findings: list[dict[str, Any]] = done.json["findings"]
        assert done.code == (1 if findings else 0), done.all
        return findings

    def kill_when(self, ready: Callable[[], bool], *args: str, timeout: float = LONGEST) -> None:
        """Start a command and kill -9 it as soon as ``ready`` says so. Fails when it ended before."""
        with self.popen(*args) as process:
            deadline = time.monotonic() + timeout
            while not ready():
                if process.poll() is not None:
                    out, err = process.communicate()
                    raise AssertionError(f"ended with {process.returncode} before it could be killed\n{out}\n{err}")
                assert time.monotonic() < deadline, "the moment to kill never came"
                time.sleep(0.002)
            process.kill()
            process.communicate()

    # -- looking inside

    def objects(self) -> list[Path]:
        return sorted(path for path in (self.repository / "objects").rglob("*") if path.is_file())

    def manifest(self, backup_id: str) -> Path:
        return self.repository / "servers" / SERVER / backup_id / "manifest.json"

    def tree(self, backup_id: str) -> Iterator[Path]:
        return (path for path in (self.manifest(backup_id).parent / "files").rglob("*") if path.is_file())

    def remove_datadir(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
