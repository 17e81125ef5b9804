"""Empty systems of new servers, made by the servers' own programs, and kept for the next time."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from backupd.engine.server.launch import START_SECONDS, Options, give
from backupd.engine.server.sandbox import DATABASE_USER, confine, is_available, server_options
from backupd.engine.toolset import NO_PATHS, row_for
from backupd.model.server_facts import Flavour, ServerInfo
from backupd.process.command import Command, locate
from backupd.process.pipeline import run

NO_OPTIONS: Options = {}


def initialise(
    datadir: Path, *, program: str = "mariadb-install-db", options: Options = NO_OPTIONS, user: str = DATABASE_USER
) -> None:
    """Make ``datadir`` the empty system of a new server: root@localhost without a password, no test schema.

    ``program``: MariaDB's installer, or the server program itself for MySQL from 5.7 on. The folder is made if needed
    and given to ``user``. Raises ToolError, ToolMissingError.
    """
    datadir.mkdir(parents=True, exist_ok=True)
    give(datadir, user, 0o700)
    own = {**server_options(program), **options}
    arguments = [f"--{name.replace('_', '-')}" + ("" if value is None else f"={value}") for name, value in own.items()]
    if "install" in Path(program).name:
        arguments = ["--skip-test-db", "--skip-name-resolve", "--auth-root-authentication-method=normal", *arguments]
    else:
        arguments = ["--initialize-insecure", *arguments]
    # Any server that starts removes what it takes for left over by a crash from the temporary folder that it shares. It
    # is beside the datadir, where we may write for certain: /tmp is read-only for the service.
    temporary = datadir.with_name(f"{datadir.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        give(temporary, user)
        plain = Command(
            (program, "--no-defaults", f"--datadir={datadir}", *arguments),
            cwd=datadir,
            env={"TMPDIR": str(temporary)},
            user=user if os.geteuid() == 0 else None,
        )
        run(confine(plain, writable=[datadir, temporary]) if is_available(plain.user) else plain, timeout=START_SECONDS)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def installer_of(program: str, info: ServerInfo, *, paths: Mapping[str, str] = NO_PATHS) -> str:
    """What makes an empty system for the server ``program``: MySQL's does it itself. ``paths``: of programs that are
    not searched. Raises ToolMissingError."""
    server = Path(program)
    if info.flavour is not Flavour.MARIADB:
        return program
    names = row_for(info.flavour, info.version).install
    beside = [
        str(folder / name)
        for name in names
        for folder in (server.parent, server.parent.parent / "bin", server.parent.parent / "scripts")
    ]
    named = [paths[name] for name in names if paths.get(name)]
    return next((path for path in [*named, *beside] if os.access(path, os.X_OK)), locate(names[0]))


def empty_system(
    data: Path,
    program: str,
    *,
    installer: str,
    user: str = DATABASE_USER,
    templates: Path | None = None,
    options: Options = NO_OPTIONS,
) -> None:
    """Make ``data`` the empty system of the server ``program``, without an identity of its own; as ``initialise``.

    ``templates``: a folder where empty systems are kept for the next time, None to make it anew.
    """
    make = functools.partial(initialise, data, program=installer, options=options, user=user)
    if templates is None:
        make()
    else:
        status = Path(locate(program)).stat()
        mark = (
            f"{program} {status.st_size} {status.st_mtime_ns} {user}{f' {sorted(options.items())}' if options else ''}"
        )
        _from_template(data, templates / f"empty-{hashlib.sha256(mark.encode()).hexdigest()[:16]}", make)
    for name in ("auto.cnf", "binlog.index"):
        (data / name).unlink(missing_ok=True)


def _from_template(data: Path, template: Path, make: Callable[[], None]) -> None:
    """From that of this very program, kept by whoever comes first. It is made in ``data``, so that the server's
    user need not reach the folder of ``template``."""
    template.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    gate = os.open(template.with_name(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        if not template.is_dir():
            making = template.with_name(f"{template.name}.making")
            shutil.rmtree(making, ignore_errors=True)
            make()
            for left in (*data.glob("*.pem"), data / "auto.cnf"):
                left.unlink(missing_ok=True)
            _copy(data, making)
            making.rename(template)
            return
    finally:
        os.close(gate)
    _copy(template, data)


def _copy(source: Path, target: Path) -> None:
    run(Command(("cp", "-a", "--reflink=auto", "--sparse=always", f"{source}/.", str(target))), timeout=600)
