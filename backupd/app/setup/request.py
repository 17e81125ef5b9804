"""What somebody asks of `backupd setup`, looked at as a whole: every mistake is reported at once, with the option to
blame, before anything is made."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from backupd.engine.server.local_servers import LocalServer, greeting, local_servers
from backupd.engine.server.probe import examine, has_rocksdb, read_dialect
from backupd.engine.server.service_account import (
    ACCOUNT,
    ServiceAccount,
    account_for,
    dialect_of_greeting,
    is_there,
)
from backupd.engine.sql.client import Connection, Session
from backupd.engine.toolset import physical_tool, refuse_unfit
from backupd.model.errors import BackupdError, ConfigurationError, Problem, RefusedError, ToolError
from backupd.model.server_facts import Role, ServerInfo
from backupd.model.text import is_name
from policies.alerts import Email
from storage.layout import REPOSITORY

POLICY = "first"
CLONE = "clone"
"""The name of the tool where the server copies itself."""
_ADMINISTRATOR = "root"
_WHERE = "backupd setup"
_OPTION_FILES = ("/etc/mysql", "/etc/my.cnf", "/etc/my.cnf.d")


@dataclass(frozen=True, slots=True)
class Request:
    """``server``: its name, by default that of the host; ``socket``: by default that of the one server that runs here;
    ``admin_file``: option file of an account that may make ours, by default root at the socket, without a password;
    ``account_file``: that of an account that is there already; ``recipients``: files of more public keys; ``binlog``:
    False where no moments between backups are wanted."""

    config: Path
    state: Path
    destination: Path
    restores: Path
    server: str = ""
    socket: str = ""
    admin_file: Path | None = None
    account_file: Path | None = None
    recipients: tuple[Path, ...] = ()
    mail: str = ""
    smtp: str = "smtp://localhost:25"
    binlog: bool = True

    @property
    def name(self) -> str:
        """The server's name."""
        return self.server or default_name()

    @property
    def policy(self) -> Path:
        """The file of its policy."""
        return self.config.parent / "policies" / f"{POLICY}.yaml"

    @property
    def option_file(self) -> Path:
        """That with the account's password."""
        return self.account_file or self.config.parent / f"{self.name}.cnf"

    @property
    def public_home(self) -> Path:
        """GnuPG's home with the public keys, and the key that signs."""
        return self.config.parent / "gnupg"

    @property
    def secret_home(self) -> Path:
        """GnuPG's home with the key that opens backups."""
        return self.config.parent / "gnupg-restore"


@dataclass(frozen=True, slots=True)
class Found:
    """A request that can be carried out, and what was found for it. ``account``: to be made; None where it is there.
    ``keys``: more public keys, by their file. ``increments``: does the physical tool take them? ``config_files``: what
    of the host is kept with each backup."""

    request: Request
    socket: str
    info: ServerInfo
    tool: str
    increments: bool
    account: ServiceAccount | None
    keys: Mapping[Path, bytes] = field(default_factory=dict)
    config_files: tuple[str, ...] = ()

    @property
    def binlog(self) -> bool:
        """Is the binary log followed?"""
        return self.info.log_bin and self.request.binlog


def default_name() -> str:
    """What this machine is called, without its domain."""
    name = socket.gethostname().partition(".")[0]
    return name if is_name(name) else "db1"


def administrator(socket_path: str, admin_file: Path | None) -> Connection:
    """Raises ConfigurationError."""
    user = None if admin_file is not None else _ADMINISTRATOR
    return Connection.from_config(socket=socket_path, user=user, defaults_file=admin_file)


def chosen(wanted: str) -> LocalServer:
    """The server at the socket ``wanted``, or the only one that runs here. Raises ConfigurationError."""
    if wanted:
        if version := greeting(wanted):
            return LocalServer(wanted, version)
        raise ConfigurationError([Problem(_WHERE, None, "--socket", f"no server answers at {wanted}")])
    found = local_servers()
    if len(found) == 1:
        return found[0]
    if not found:
        message = "no server was found on this host: start it, or name its socket"
    else:
        message = "several servers run on this host, name one: " + ", ".join(one.socket for one in found)
    raise ConfigurationError([Problem(_WHERE, None, "--socket", message)])


def account_of(wanted: str) -> tuple[LocalServer, ServiceAccount]:
    """The server, and the account that it needs, without a login. Raises ConfigurationError."""
    server = chosen(wanted)
    return server, account_for(dialect_of_greeting(server.version), clones="mariadb" not in server.version.lower())


def look(request: Request, programs: Mapping[str, str]) -> Found:
    """Ask the server, and look at every file and folder. Raises ConfigurationError with every problem at once."""
    problems: list[Problem] = []
    keys: dict[Path, bytes] = {}

    def blame(option: str, message: str) -> None:
        problems.append(Problem(_WHERE, None, option, message))

    _look_at_words(request, blame)
    _look_at_files(request, blame)
    for file in request.recipients:
        if content := _public_key(file, blame):
            keys[file] = content
    found = _look_at_server(request, programs, blame)
    if found is None or problems:
        raise refusal(problems)
    files = tuple(path for path in _OPTION_FILES if Path(path).exists())
    return Found(request, *found, keys=keys, config_files=files)


def refusal(problems: list[Problem]) -> ConfigurationError:
    """What to raise for what is wrong with a request."""
    error = ConfigurationError(problems, hint="nothing was changed; correct these and run the command again")
    count = len(problems)
    error.message = f"setup cannot begin: {count} problem{'s' if count != 1 else ''}"
    return error


def refuse_what_is_there(request: Request) -> None:
    """Raises ConfigurationError where something is there that a setup would replace."""
    problems: list[Problem] = []
    _look_at_files(request, lambda option, message: problems.append(Problem(_WHERE, None, option, message)))
    if problems:
        raise refusal(problems)


Blame = Callable[[str, str], None]


def _look_at_words(request: Request, blame: Blame) -> None:
    if not is_name(request.name):
        blame("--server", f"{request.name!r} is not a name: letters, digits, '.', '_' and '-', at most 63")
    if request.mail:
        try:
            Email.model_validate({"smtp": request.smtp, "from": sender(), "to": [request.mail]})
        except ValidationError as error:
            for one in error.errors():
                blame("--smtp" if one["loc"][:1] == ("smtp",) else "--mail-to", str(one["msg"]).partition(", ")[2])
    for option, path in (
        ("--destination", request.destination),
        ("--state", request.state),
        ("--restores", request.restores),
    ):
        if not path.is_absolute():
            blame(option, f"{path} is not an absolute path")


def sender() -> str:
    """Who mails come from."""
    host = socket.getfqdn()
    return f"backupd@{host if '.' in host else f'{default_name()}.localdomain'}"


def _look_at_files(request: Request, blame: Blame) -> None:
    """Nothing that is there is replaced, and everything can be made."""
    for option, path in (("--config", request.config), ("--config", request.policy), ("--server", request.option_file)):
        if path != request.account_file and os.path.lexists(path):
            blame(option, f"{path} is there already, and setup replaces nothing")
    for home in (request.public_home, request.secret_home):
        if home.is_dir() and any(home.iterdir()):
            blame(
                "--config",
                f"{home} holds keys already, and setup adds none to them: move it away (with --recipient FILE backups "
                "are sealed for keys of yours, too)",
            )
    if (request.destination / REPOSITORY).exists():
        blame("--destination", f"{request.destination} holds backups already: choose an empty folder, or import them")
    elif request.destination.is_dir() and any(request.destination.iterdir()):
        blame("--destination", f"{request.destination} is not empty: name a new folder in it")
    for option, path in (
        ("--config", request.config.parent),
        ("--destination", request.destination),
        ("--state", request.state),
        ("--restores", request.restores),
    ):
        if why := _unwritable(path):
            blame(option, why)


def _unwritable(path: Path) -> str:
    there = next((one for one in (path, *path.parents) if os.path.lexists(one)), path)
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"this user cannot write in {there}: run setup as root"


def _public_key(file: Path, blame: Blame) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        blame("--recipient", f"{file} cannot be read: {error.strerror}")
        return b""
    if b"PRIVATE KEY BLOCK" in content:
        blame("--recipient", f"{file} holds a private key: export the public half (gpg --export), and give that")
        return b""
    return content


def _look_at_server(
    request: Request, programs: Mapping[str, str], blame: Blame
) -> tuple[str, ServerInfo, str, bool, ServiceAccount | None] | None:
    try:
        path = chosen(request.socket).socket
    except ConfigurationError as error:
        for problem in error.problems:
            blame(problem.field, problem.message)
        return None
    ours = request.account_file is not None
    option = "--account-file" if ours else "--admin-file"
    try:
        if ours:
            connection = Connection.from_config(socket=path, defaults_file=request.account_file)
        else:
            connection = administrator(path, request.admin_file)
        with connection.connect() as session:
            return _asked(session, request, path, programs, lambda message: blame(option, message), blame)
    except ConfigurationError as error:
        for problem in error.problems:
            blame(option, str(problem))
    except BackupdError as error:
        hint = f" ({error.hint})" if error.hint else ""
        way = "" if ours else f"; without an administrator's login: {_STATEMENT}"
        blame(option, f"{error.message}: {error.detail or 'it was refused'}{hint}{way}")
    return None


def _asked(
    session: Session,
    request: Request,
    path: str,
    programs: Mapping[str, str],
    blame_account: Callable[[str], None],
    blame: Blame,
) -> tuple[str, ServerInfo, str, bool, ServiceAccount | None] | None:
    """Raises ServerError."""
    info = examine(session, tolerant=True).info
    if not info.log_bin and request.binlog:
        blame(
            "--without-binlog",
            "the server writes no binary log, so only the moments of backups could be restored: set log_bin under "
            "[mysqld] of its option file and restart it, or go on so with --without-binlog",
        )
    ours = request.account_file is not None
    if not ours:
        for problem in _cannot_make(session, info):
            blame_account(problem)
    try:
        physical = physical_tool(info, paths=programs)
        if ours:
            refuse_unfit(session, info, physical.tool)
    except (ToolError, RefusedError) as error:
        blame("programs", " ".join(filter(None, (f"{error.message}.", error.hint))))
        return None
    tool = physical.tool.name
    account = account_for(read_dialect(session), rocksdb=has_rocksdb(session), clones=tool == CLONE)
    return path, info, tool, physical.takes_increments, None if ours else account


_STATEMENT = (
    "`backupd setup --print-sql` prints the statements that make the account; then give its option file as "
    "--account-file"
)


def _cannot_make(session: Session, info: ServerInfo) -> Iterator[str]:
    if is_there(session):
        yield f"the account {ACCOUNT} is there already: give its option file as --account-file"
    if info.role is Role.REPLICA:
        yield (
            "this server is a replica, and an account made here would be a transaction that its source does not have: "
            f"make it there; {_STATEMENT}"
        )
    elif info.read_only:
        yield f"the server is read-only: make the account where it may be written; {_STATEMENT}"
