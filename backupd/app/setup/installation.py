"""Carrying out a first installation: folders, keys, the account, files. What fails before all of it is there is undone.

Files are made and never replaced; a folder that was there stays as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from backupd.app.context.settings import load_settings
from backupd.app.setup.request import POLICY, Found, Request, administrator, refusal, refuse_what_is_there, sender
from backupd.engine.server.service_account import ServiceAccount, drop, new_password
from backupd.model.document import Document
from backupd.model.errors import BackupdError, Problem, RefusedError
from backupd.model.text import format_size
from backupd.process.folders import opened
from backupd.transfer.records.authenticity import make_key
from backupd.transfer.records.keyring import import_keys, public_keys

_PRIVATE, _PASSABLE = 0o700, 0o711
_UNQUOTED = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null)\Z)(/|[A-Za-z])[\w./@-]*", re.IGNORECASE)
_LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Installation(Document):
    """``steps``: what is done, in words. ``signing_key``, ``restore_key``: fingerprints, "" before they are made.
    ``backup``, ``proof``: the id of the first backup and the outcome of its test restore; ``left``: what is for people
    to do."""

    server: str
    socket: str
    config: Path
    policy: Path
    account_file: Path
    destination: Path
    steps: tuple[str, ...]
    restore_key: str = ""
    signing_key: str = ""
    backup: str = ""
    proof: str = ""
    left: tuple[str, ...] = field(default=())


def outline(found: Found) -> Installation:
    """What will be done; nothing has been."""
    request = found.request
    return Installation(
        request.name,
        found.socket,
        request.config,
        request.policy,
        request.option_file,
        request.destination,
        tuple(_steps(found)),
    )


def _steps(found: Found) -> Iterator[str]:
    request, info = found.request, found.info
    yield (
        f"{request.name} is {info.flavour} {info.version} at {found.socket}: {info.tables} tables, "
        f"{format_size(info.data_bytes)}; {found.tool} copies it"
    )
    if missing := [path for path, _mode in _folders(found) if not path.exists()]:
        yield f"make the folders {', '.join(map(str, missing))}"
    more = f", and for {len(found.keys)} more" if found.keys else ""
    yield (
        f"make two keys without a passphrase: one in {request.secret_home}, which opens the backups, and one in "
        f"{request.public_home}, which signs them; backups are sealed for the first one{more}"
    )
    if found.account is not None:
        yield f"make the account, with a new password in {request.option_file} (mode 0600):"
        yield from (f"    {statement};" for statement in found.account.statements())
    yield f"write {request.config} and {request.policy}:"
    yield from (f"    {line}" for line in policy_text(found).splitlines() if not line.startswith("#"))
    yield f"take a full backup into {request.destination}, and restore it once on a private server: the proof"


def carry_out(found: Found, report: Callable[[str], None]) -> Installation:
    """Everything but the first backup. ``report``: what is being done. Raises BackupdError; then nothing is left."""
    request = found.request
    with ExitStack() as held, ExitStack() as undo:
        try:
            for folder, mode in _folders(found):
                _make_folder(folder, mode, undo)
            # Only now is what is removed below, should this fail, ours for certain.
            held.enter_context(_alone(request))
            report("keys")
            undo.callback(_empty, request.public_home)
            undo.callback(_empty, request.secret_home)
            restore_key, recipients, signing_key = _keys(found)
            if found.account is not None:
                report("account")
                _make_account(found, found.account, undo)
            report("configuration")
            _write(request.policy, policy_text(found), undo)
            _write(request.config, configuration_text(found, recipients, signing_key), undo)
            load_settings(request.config)
        except OSError as error:
            where = error.filename or request.config
            raise RefusedError(
                f"{where} could not be made: {error.strerror}", hint="nothing was left behind; run the command again"
            ) from error
        undo.pop_all()
    made = outline(found)
    return Installation(
        made.server,
        made.socket,
        made.config,
        made.policy,
        made.account_file,
        made.destination,
        made.steps,
        restore_key,
        signing_key,
        left=tuple(_left(found)),
    )


def _left(found: Found) -> Iterator[str]:
    request = found.request
    yield (
        "copy the private key to a place that is not this host (without it nobody opens the backups): gpg --homedir "
        f"{request.secret_home} --armor --export-secret-keys"
    )
    yield "print the recovery page, and keep it away from the backups: backupd keys page"
    yield (
        f"all copies are in {request.destination}, on this host: add a destination elsewhere to `destinations:` in "
        f"{request.config}, name it under `others:` in {request.policy}, and remove its `protection:` line"
    )
    if not request.mail:
        yield f"nobody is notified of failures: set alerts.email in {request.config}"


def _folders(found: Found) -> Iterator[tuple[Path, int]]:
    """In the order in which they are made, each with its mode."""
    request = found.request
    yield request.config.parent, _PRIVATE
    yield request.policy.parent, _PRIVATE
    yield request.public_home, _PRIVATE
    yield request.secret_home, _PRIVATE
    yield request.state, _PASSABLE
    yield request.restores, _PASSABLE
    yield request.destination.parent, _PRIVATE


def _make_folder(folder: Path, mode: int, undo: ExitStack) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o755)
        undo.callback(_remove_empty, one)
        one.chmod(mode if one == folder else 0o755)  # whatever the umask is: others pass through to what is theirs


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty: somebody else has put something there meanwhile
        folder.rmdir()


@contextmanager
def _alone(request: Request) -> Iterator[None]:
    """No other setup makes the same installation meanwhile, nor has one made it since it was looked for. Raises
    RefusedError, ConfigurationError, OSError."""
    with opened(request.config.parent, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RefusedError(
                f"another `backupd setup` is at work in {request.config.parent}", hint="wait until it has ended"
            ) from error
        refuse_what_is_there(request)
        yield


def _empty(home: Path) -> None:
    """Remove the keys that this run has made, and for which nothing is sealed yet."""
    for path in list(home.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _keys(found: Found) -> tuple[str, tuple[str, ...], str]:
    """The fingerprints of the key that opens, of all that backups are sealed for, and of the one that signs."""
    request = found.request
    host = socket.gethostname()
    opens = make_key(request.secret_home, f"backupd restore {host}", opens=True)
    import_keys(request.public_home, public_keys(request.secret_home, [opens]))
    recipients, problems = [opens], []
    for file, content in found.keys.items():
        added = import_keys(request.public_home, content)
        if not added:
            problems.append(Problem("backupd setup", None, "--recipient", f"{file} holds no public key"))
        recipients += added
    if problems:
        raise refusal(problems)
    return opens, tuple(dict.fromkeys(recipients)), make_key(request.public_home, f"backupd signing {host}")


def _make_account(found: Found, account: ServiceAccount, undo: ExitStack) -> None:
    request = found.request
    password = new_password()
    _write(request.option_file, f'[client]\nuser=backupd\npassword="{password}"\n', undo)
    connection = administrator(found.socket, request.admin_file)
    with connection.connect() as session:
        account.make(session, password)

    def remove() -> None:
        with suppress(BackupdError), connection.connect() as again:
            drop(again)

    undo.callback(remove)


def _write(path: Path, text: str, undo: ExitStack) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    undo.callback(path.unlink, missing_ok=True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _plain(value: object) -> str:
    """As a scalar of YAML, quoted where it has to be."""
    text = str(value)
    return text if _UNQUOTED.fullmatch(text) else json.dumps(text)


def _list(values: Sequence[object]) -> str:
    return f"[{', '.join(map(_plain, values))}]"


def policy_text(found: Found) -> str:
    """The first policy: about it `backupd check` has nothing to say."""
    request = found.request
    physical = 'full: "0 2 * * sun", incremental: "0 2 * * mon-sat"' if found.increments else 'full: "0 2 * * *"'
    lines = [
        "# Written by `backupd setup`; docs/configuration.md has every setting.",
        f"# `backupd policy explain {request.policy}` says what it does.",
        f"physical: {{{physical}}}",
        "# Small tables as dumps, too: the way back for one table, and onto another version.",
        'logical: {schedule: "0 4 * * sun", tables: {include: ["*.*"], max_size: 2GiB}}',
        "# Follow the binary log: every moment can be restored, not only those of backups."
        if found.binlog
        else "# The server writes no binary log, or it is not wanted: only the moments of backups can be restored.",
        "binlog: {checkpoint: 10s}" if found.binlog else "binlog: {stream: false}",
        *([f"config_files: {_list(found.config_files)}"] if found.config_files else []),
        f"destinations: {{required: [{_LOCAL}]}}",
        "# One copy, on this host. With a second destination elsewhere remove this line.",
        "protection: {copies: 1, off_site: 0}",
        f"retention: {{{_LOCAL}: {{{'recovery_window: 14d' if found.binlog else 'daily: 14'}, keep_fulls: 2}}}}",
        *(["objectives: {rpo: 1m}"] if found.binlog else []),
        "# A backup is good when it was restored.",
        f'test_restore: {{schedule: "0 6 * * *", target: {"random" if found.binlog else "latest"}}}',
        'verify: {schedule: "0 12 * * *", period: 30d}',
    ]
    return "\n".join(lines) + "\n"


def configuration_text(found: Found, recipients: Sequence[str], signing_key: str) -> str:
    """The configuration of the service."""
    request = found.request
    server = f"socket: {_plain(found.socket)}, defaults_file: {_plain(request.option_file)}, policy: {POLICY}"
    mail = f"{{smtp: {_plain(request.smtp)}, from: {_plain(sender())}, to: {_list([request.mail])}}}"
    lines = [
        "# Written by `backupd setup`; docs/configuration.md has every setting.",
        f"catalog: {_plain(f'sqlite:///{request.state}/catalog.db')}",
        f"spool: {_plain(request.state / 'spool')}",
        f"policies: {_plain(request.policy.parent)}",
        "servers:",
        f"  {_plain(request.name)}: {{{server}}}",
        "destinations:",
        f"  {_LOCAL}: {{type: filesystem, path: {_plain(request.destination)}}}",
        "encryption:",
        f"  gnupg_home: {_plain(request.public_home)}",
        f"  recipients: {_list(recipients)}",
        f"  signing_key: {_plain(signing_key)}",
        "restore:",
        f"  gnupg_home: {_plain(request.secret_home)}",
        f"  folders: [{_plain(request.restores)}]",
        f"  scratch: {{path: {_plain(request.state / 'scratch')}}}",
        *([f"alerts: {{email: {mail}}}"] if request.mail else []),
    ]
    return "\n".join(lines) + "\n"
