"""Fresh datadirs: initialised once in a session, copied ever after."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.stores.folders import DATABASE_USER, give_to_database, make_short_directory, runs_as_root

Options = Mapping[str, str | int | None]

_INIT_OPTIONS = frozenset(
    {
        "innodb_page_size",
        "innodb_data_file_path",
        "innodb_data_home_dir",
        "innodb_undo_tablespaces",
        "innodb_undo_directory",
        "innodb_log_group_home_dir",
        "lower_case_table_names",
        "plugin_load_add",
        "innodb_encrypt_log",
        "innodb_encrypt_tables",
        "innodb_file_per_table",
        "aria_encrypt_tables",
    }
)


class ServerDiedError(Exception):
    """A database program did not do its work; the text ends with its log."""


def initialise(datadir: Path, options: Options | None = None) -> None:
    """Fill ``datadir`` with a fresh, empty system: a copy of the session's template, made on first use.

    ``root@localhost`` has no password, there is no anonymous user and no test schema. Options that shape the
    files (page size, undo layout, encryption) make a datadir of their own instead of a copy.
    """
    shaping = {
        name: value
        for name, value in (options or {}).items()
        if name in _INIT_OPTIONS or name.startswith("file_key_management")
    }
    datadir.mkdir(parents=True, exist_ok=True)
    give_to_database(datadir)
    datadir.chmod(0o700)
    if shaping:
        _install(datadir, shaping)
    else:
        subprocess.run(["cp", "-a", "--reflink=auto", "--sparse=always", f"{_template()}/.", str(datadir)], check=True)


@functools.cache
def _template() -> Path:
    base = make_short_directory("bt-template-")
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    datadir = base / "data"
    datadir.mkdir(mode=0o700)
    give_to_database(datadir)
    _install(datadir, {})
    return datadir


def _install(datadir: Path, shaping: Options) -> None:
    base = make_short_directory("bt-init-")
    try:
        conf = base / "init.cnf"
        write_mysqld_group(conf, {"innodb_log_file_size": "64M", "character_set_server": "utf8mb4"} | dict(shaping))
        # Only localhost: an account for root@<this host> is ignored under skip_name_resolve.
        extra = base / "extra.sql"
        extra.write_text(
            "DELETE FROM mysql.global_priv WHERE Host NOT IN ('localhost', '');\n"
            "DELETE FROM mysql.proxies_priv WHERE Host NOT IN ('localhost', '');\n"
        )
        user = [f"--user={DATABASE_USER}"] if runs_as_root() else []
        done = subprocess.run(
            [
                find_program("mariadb-install-db"),
                f"--defaults-file={conf}",
                f"--datadir={datadir}",
                *user,
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
                f"--tmpdir={base}",
                f"--extra-file={extra}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode != 0:
            raise ServerDiedError(f"mariadb-install-db:\n{done.stdout.decode(errors='replace')[-4000:]}")
    finally:
        shutil.rmtree(base, ignore_errors=True)


def write_mysqld_group(path: Path, settings: Options) -> None:
    """An option file; a value of None makes a bare flag."""
    lines = [name if value is None else f"{name}={value}" for name, value in settings.items()]
    path.write_text("\n".join(["[mysqld]", *lines, ""]))
    path.chmod(0o644)


def find_program(program: str) -> str:
    path = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/usr/libexec")
    if path is None:
        raise FileNotFoundError(f"{program} is not installed; run scripts/setup --test")
    return path
