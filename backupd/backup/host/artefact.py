"""The configuration artefact: everything a bare host needs besides the data.

A tar of the server's option files, of what the policy names, of the server's settings and accounts, and of what was
true of the host. Nearly all of it is secret: it exists in the clear only in memory, and is sealed before it is stored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backupd.backup.host.files import HostFiles
from backupd.backup.host.host import (
    ServerProcess,
    describe_mounts,
    describe_packages,
    describe_system,
    find_process,
    is_local,
    option_files,
)
from backupd.engine.physical.live_datadir import user_behind
from backupd.engine.schema.accounts import read_accounts
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.dialect import dialect_of
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour, ServerInfo
from backupd.process.folders import powers_of

_GONE = frozenset({0, 2003, 2006, 2013})
"""Codes of errors after which there is no server to ask."""

_PLUGINS = """
SELECT PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_STATUS, PLUGIN_TYPE, COALESCE(PLUGIN_LIBRARY, '-')
FROM information_schema.PLUGINS ORDER BY 1
"""

_SAVED = "mysqld-auto.cnf"
"""Where MySQL keeps SET PERSIST: configuration, so not part of a clone."""

_README = """\
The configuration of {name} ({flavour} {version}), kept with its backup.

host/files/...         option files of the server with all that they include, and what the policy's config_files names,
                       each under its whole path
host/mounts.txt        file systems of the data, with a remark when the doublewrite buffer is off
host/os.txt            operating system, limits and command line of the server
host/packages.txt      installed packages
server/variables.txt   SHOW GLOBAL VARIABLES
server/plugins.txt     plugins, components and loadable functions
server/accounts.sql    users, roles and grants, to be replayed on an empty server
server/status.json     what the server was, and whom it replicated from
NOTES.txt              what is not here, and why

A whole restore needs no accounts.sql: the accounts are in the data. Compare host/files with the new host before you
copy them there; paths, memory and server_id may have to differ.
"""


@dataclass(frozen=True, slots=True)
class Artefact:
    """``content``: the tar. ``warnings``: sentences without secrets, for the record of the backup."""

    content: bytes
    warnings: tuple[str, ...]


def collect(connection: Connection, info: ServerInfo, config_files: Iterable[Path] = ()) -> Artefact:
    """Everything that can be had, told or read. Equal input gives equal bytes.

    Never raises because of a file or a missing privilege; raises ServerError when the server cannot be reached.
    """
    files = HostFiles()
    with connection.connect() as session:
        here = is_local(session, info)
        process = find_process(session, info) if here else ServerProcess(0)
        variables = _variables(session, files)
        _plugins(session, info, files)
        _status(session, info, files)
        _accounts(session, info, files)
        named = _named_by_server(session, info) if here else []
        user = user_behind(session)
    if here:
        if not process.pid:
            files.notes.append(
                "the server's process was not found, so its command line is unknown: the option files "
                "are those of the usual places"
            )
        with powers_of(user):  # who names these files is the server
            for path in dict.fromkeys(option_files(process, named)):
                _option_file(files, path)
            if os.path.lexists(saved := Path(info.datadir) / _SAVED):
                files.add(saved)
        for path in config_files:
            files.add(path)
        mounts, warning = describe_mounts(info, variables)
        files.text("host/mounts.txt", mounts)
        files.text("host/os.txt", describe_system(process))
        files.text("host/packages.txt", describe_packages(process))
        files.warnings += [warning] if warning else []
    else:
        files.notes.append(
            f"the server runs on {info.hostname}: its files, mounts and packages are not here, only what it answers"
        )
        files.warnings += [
            f"{path} is not kept: the server runs on another host, {info.hostname}" for path in config_files
        ]
    files.text("README.txt", _README.format(name=info.hostname, flavour=info.flavour, version=info.version))
    files.text("NOTES.txt", "".join(f"{line}\n" for line in (*files.warnings, *files.notes)))
    return Artefact(files.tar(), tuple(f"configuration: {warning}" for warning in files.warnings))


def _option_file(files: HostFiles, path: Path) -> None:
    if path.is_absolute():
        files.option_file(path)
    else:
        files.warnings.append(f"option file {path} is not kept: the server was started with a relative path")


def _variables(session: Session, files: HostFiles) -> Mapping[str, str]:
    variables = {str(name).lower(): str(value) for name, value in session.query("SHOW GLOBAL VARIABLES", shown=True)}
    files.text("server/variables.txt", "".join(f"{name} = {value}\n" for name, value in sorted(variables.items())))
    return variables


def _plugins(session: Session, info: ServerInfo, files: HostFiles) -> None:
    lines = []
    questions = [_PLUGINS, "SELECT 'function', name, dl FROM mysql.func ORDER BY 2"]
    if info.flavour is not Flavour.MARIADB and info.version.major >= 8:
        questions.append("SELECT 'component', component_urn FROM mysql.component ORDER BY 2")
    for question in questions:
        lines += ["\t".join(str(value) for value in row) for row in _ask(session, question, files)]
    files.text("server/plugins.txt", "".join(f"{line}\n" for line in lines))


def _status(session: Session, info: ServerInfo, files: HostFiles) -> None:
    rows = _ask_records(session, dialect_of(info.flavour, info.version).replica_status, files)
    replication = [{name: str(value) for name, value in row.items() if "password" not in name.lower()} for row in rows]
    document = {
        "flavour": str(info.flavour),
        "version": info.version_text,
        "hostname": info.hostname,
        "server_id": info.server_id,
        "server_uuid": info.server_uuid,
        "role": str(info.role),
        "datadir": info.datadir,
        "replication": replication,
    }
    files.text("server/status.json", json.dumps(document, indent=2, sort_keys=True) + "\n")


def _accounts(session: Session, info: ServerInfo, files: HostFiles) -> None:
    try:
        accounts = read_accounts(session, info.flavour, info.version)
    except ServerError as error:
        _tell(error, files)
        return
    files.text("server/accounts.sql", accounts.sql)
    files.warnings += accounts.problems


def _named_by_server(session: Session, info: ServerInfo) -> list[str]:
    """Option files that the server says its variables came from; none when it cannot say, or not to us."""
    question = (
        "SELECT DISTINCT GLOBAL_VALUE_PATH FROM information_schema.SYSTEM_VARIABLES ORDER BY 1"
        if info.flavour is Flavour.MARIADB
        else "SELECT DISTINCT VARIABLE_PATH FROM performance_schema.variables_info ORDER BY 1"
    )
    try:
        return [str(path) for (path,) in session.query(question) if path]
    except ServerError as error:
        if error_code(error) in _GONE:
            raise
        return []


def _ask(session: Session, question: str, files: HostFiles) -> list[tuple[Any, ...]]:
    try:
        return session.query(question, shown=True)
    except ServerError as error:
        _tell(error, files)
        return []


def _ask_records(session: Session, question: str, files: HostFiles) -> list[dict[str, Any]]:
    try:
        return session.records(question, shown=True)
    except ServerError as error:
        _tell(error, files)
        return []


def _tell(error: ServerError, files: HostFiles) -> None:
    if error_code(error) in _GONE:
        raise error
    known = files.warnings if is_denied(error) else files.notes
    known.append(f"the server did not answer: {error.detail}")
