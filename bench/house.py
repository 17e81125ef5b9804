"""A configuration of backupd for a bench: one source server, one destination, one key, all else in one folder."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.measure import Run, timed
from tests.support.keys import Keys
from tests.support.servers.server import Server
from tests.support.stores.folders import DATABASE_USER

BACKUPD = Path(sys.executable).with_name("backupd")
SOURCE = "bench"
POLICY = 'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\nwitness: {enabled: false}\n'


class House:
    """``servers``: more than the source, by their names in the configuration. ``destination``: what the configuration
    says about it, where it is not the folder ``repository``. ``program``: of which checkout."""

    def __init__(
        self,
        base: Path,
        server: Server,
        keys: Keys,
        servers: Mapping[str, Server] | None = None,
        destination: Mapping[str, Any] | None = None,
        *,
        policy: str = POLICY,
        program: Path = BACKUPD,
    ) -> None:
        self.base, self.server, self.keys, self.program = base, server, keys, program
        self.repository = base / "repository"
        self.config = base / "backupd.yaml"
        place = destination or {"type": "filesystem", "path": self.repository}
        policies = base / "policies"
        policies.mkdir()
        (policies / "bench.yaml").write_text(policy)
        lines = [
            f"  {name}: {{socket: {one.socket}, defaults_file: {one.client_file()}, policy: bench}}\n"
            for name, one in ({SOURCE: server} | dict(servers or {})).items()
        ]
        self.config.write_text(
            f"catalog: sqlite:///{base}/catalog.db\nspool: {base}/spool\npolicies: {policies}\n"
            f"servers:\n{''.join(lines)}"
            f"destinations:\n  local: {json.dumps(place, default=str)}\n"
            f"encryption: {{gnupg_home: {keys.public_home}, recipients: [{keys.user_id}]}}\n"
            f"restore: {{gnupg_home: {keys.secret_home}, scratch: {{path: {base}/scratch}}}}\n"
        )

    def command(self, *args: str) -> list[str]:
        return [str(self.program), "--config", str(self.config), *args, "--json"]

    def backupd(self, *args: str) -> Run:
        """Run it; its answer is JSON."""
        return timed(self.command(*args))

    def fresh_repository(self) -> None:
        for path in (self.repository, self.base / "spool"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.base.glob("catalog.db*"):
            path.unlink()

    def restore_whole(self, to: str) -> tuple[Run, dict[str, Any]]:
        """To a started server, which is ended and removed again; gives what backupd told, too."""
        target = self.base / "whole"
        try:
            run = self.backupd("restore", SOURCE, "--to", to, "--datadir", str(target), "--start")
            outcome: dict[str, Any] = json.loads(run.stdout)
            timed(["mariadb-admin", "--no-defaults", f"--socket={outcome['started']['socket']}", "shutdown"])
            return run, outcome
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def seal(self, level: int, threads: int) -> str:
        """What a careful administrator pipes a backup through, as words of a shell."""
        return (
            f"zstd -q -{level} -T{threads} | gpg --homedir {self.keys.public_home} --batch --no-tty --quiet "
            f"--trust-model always --compress-algo none -e -r {self.keys.fingerprint}"
        )

    def unseal(self, path: str) -> str:
        return f"gpg --homedir {self.keys.secret_home} --batch --no-tty --quiet -d {path} | zstd -q -d"

    def restore_by_hand(self, opened: str) -> Run:
        """What an administrator types: ``opened`` (words of a shell) gives the stream of mariadb-backup, which is
        unpacked, prepared, handed over and started; until the server answers."""
        target, socket = self.base / "plain", self.base / "plain.sock"
        script = (
            f"( mkdir {target} && {opened} | mbstream -x -C {target} && "
            f"mariadb-backup --prepare --use-memory=1G --target-dir={target} && "
            f"chown -R {DATABASE_USER}: {target} && "
            f"setpriv --reuid {DATABASE_USER} --regid {DATABASE_USER} --init-groups mariadbd --no-defaults "
            f"--datadir={target} --socket={socket} --skip-networking --pid-file={target}/pid "
            f") >{self.base}/plain.log 2>&1 & "
            f"until mariadb-admin --no-defaults --socket={socket} ping >/dev/null 2>&1; "
            "do kill -0 $! || exit 1; sleep 0.02; done"
        )
        try:
            return timed(["bash", "-o", "pipefail", "-c", script])
        finally:
            timed(["mariadb-admin", "--no-defaults", f"--socket={socket}", "shutdown"])
            shutil.rmtree(target, ignore_errors=True)
