"""The empty system of a new server."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from backupd.engine.installation import server_options
from backupd.engine.launch import DATABASE_USER, START_SECONDS, Options, give
from backupd.process.command import Command
from backupd.process.run import run

NO_OPTIONS: Options = {}


def initialise(
    datadir: Path, *, program: str = "mariadb-install-db", options: Options = NO_OPTIONS, user: str = DATABASE_USER
) -> None:
    """Make ``datadir`` the empty system of a new server: root@localhost without a password, no test schema.

    ``program``: MariaDB's installer, or the server program itself for MySQL from 5.7 on. The folder is made if needed
    and given to ``user``. Raises ToolError, ToolMissingError.
    """
    datadir.mkdir(parents=True, exist_ok=True)
    give(datadir, user)
    datadir.chmod(0o700)
    own = {**server_options(program), **options}
    arguments = [f"--{name.replace('_', '-')}" + ("" if value is None else f"={value}") for name, value in own.items()]
    as_user = [f"--user={user}"] if os.geteuid() == 0 else []
    if "install" in Path(program).name:
        arguments = ["--skip-test-db", "--skip-name-resolve", "--auth-root-authentication-method=normal", *arguments]
    else:
        arguments = ["--initialize-insecure", *arguments]
    # Any server that starts removes what it takes for left over by a crash from the temporary folder that it shares.
    with tempfile.TemporaryDirectory(prefix="backupd-") as temporary:
        give(Path(temporary), user)
        run(Command((program, "--no-defaults", f"--datadir={datadir}", *as_user, *arguments),
                    env={"TMPDIR": temporary}), timeout=START_SECONDS)
