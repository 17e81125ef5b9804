"""A program call as a value: built by the engine, compared by tests, rendered for logs and runbooks."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backupd.model.errors import ConfigurationError, Problem, ToolMissingError

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
