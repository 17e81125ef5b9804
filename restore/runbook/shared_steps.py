"""Shell that several runbooks have: the check before anything is opened, ``unpack.sh``, and private servers.

Before anything is opened: is what lies here what was stored? A sealed file proves nothing about who made it: everybody
who has the public key can seal one. So the description of each backup has to be signed by a key whose fingerprint the
reader brings along, and every file beside it has to be the one that the description names by its SHA-256. ``unpack.sh``
is run as root: it is never opened before that. What is signed is signed wherever it lies, so a description counts only
in the folder that it tells of.

``unpack.sh`` makes a backup's files from its objects with sh, gpg, zstd, tar and sha256sum alone. It names every file
of the backup, so it is stored sealed; the runbook in the clear says how to open it. Whoever can write to the
destination can seal other objects: so it opens no object that is not, byte for byte, the one that was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from backupd.engine.instance.backup_files import KEY_PLUGIN, PLAIN_VALUE, PLUGIN_DIR
from backupd.engine.instance.launch import FROM_BACKUP, Options, ServerConfig, option_text, options_for_copy
from backupd.engine.toolset import CLIENTS, row_for
from backupd.model.manifest import Entry, StoredObject
from backupd.model.server_facts import ServerInfo
from restore.runbook.texts import shell
from storage.contract import layout

# -- is it what was stored?


def signature_check() -> str:
    """Shell that defines ``signed_by_signer``, which needs SIGNER."""
    return shell("trust", "signed_by_signer") + "\n"


def first_look(server: str, chain: Sequence[str], *, signed: bool) -> str:
    """Shell that stops where a backup of ``chain`` is not what was stored; ``$CHECKED/ID`` holds its ``unpack.sh``."""
    look = shell("trust", "look").strip() if signed else 'echo "$1 is not signed" >&2'
    folders = [f'unaltered "$REPOSITORY/{layout.backup_folder(server, backup).rstrip("/")}"' for backup in chain]
    check = signature_check() if signed else ""
    return check + "\n".join((shell("trust", "unaltered", signed=look), *folders, ""))


# -- unpack.sh

_END = "END_OF_THE_LIST_OF_FILES"
_PARTS_IN_A_LINE = 8
_TOLD = 16
"""Digits of its SHA-256 with which an object's name ends."""


def render_unpack(backup_id: str, entries: Iterable[Entry], stored: Iterable[StoredObject]) -> bytes:
    """The script for ``entries``, which lie in the objects ``stored``. Names may hold any byte but NUL; they stay the
    bytes that they were."""
    listed = sorted(entries, key=lambda entry: entry.path)
    known = {item.name: f"{item.name[:-_TOLD]}{item.sha256}" for item in stored}
    lines = [
        *_folders(listed),
        *(f"b {known[name]}" for name in dict.fromkeys(entry.bundle for entry in listed if entry.bundle)),
        *(line for entry in listed for line in _file(entry, known)),
        f"cat > \"$work/sums\" << '{_END}'",
        *(_sum(entry) for entry in listed),
        _END,
    ]
    script = shell(
        "unpack",
        backup=backup_id,
        lines="\n".join(lines),
        files=len(listed),
        size=sum(entry.size for entry in listed),
    )
    return f"{script}\n".encode("utf-8", "surrogateescape")


def quote(text: str) -> str:
    """``text`` as one word of a POSIX shell, whatever is in it."""
    return "'" + text.replace("'", "'\\''") + "'"


def _folders(entries: Iterable[Entry]) -> Iterator[str]:
    folders = {entry.path.rpartition("/")[0] for entry in entries}
    return (f"mkdir -p ./{quote(folder)}" for folder in sorted(folders) if folder)


def _file(entry: Entry, known: Mapping[str, str]) -> Iterator[str]:
    if entry.bundle:
        return
    yield f"n {quote(entry.path)}"
    names = [known[part.object] for part in entry.parts]
    for first in range(0, len(names), _PARTS_IN_A_LINE):
        yield f"p {' '.join(names[first : first + _PARTS_IN_A_LINE])}"
    if entry.sparse:
        yield "h"


def _sum(entry: Entry) -> str:
    """A line for ``sha256sum -c``: a leading backslash says that backslashes and line ends in the name are
    escaped."""
    escaped = entry.path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == entry.path else chr(92)}{entry.sha256}  ./{escaped}"


# -- private servers

# Stand for the operator's paths while commands are rendered: nothing in them needs quoting.
WORK, DATADIR, STORE = Path("/BACKUPD-WORK"), Path("/BACKUPD-DATADIR"), Path("/BACKUPD-STORE")
OWNER = "BACKUPD-OWNER"
_VARIABLES = {str(STORE): "$STORE", str(DATADIR): "$DATADIR", str(WORK): "$WORK", OWNER: "$OWNER"}
_NONE: Options = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Programs:
    """Names: of the server, and of what runs a statement, administrates, checks tables and prints a binary log."""

    server: str
    client: str
    admin: str
    check: str
    reader: str


def programs_of(info: ServerInfo) -> Programs:
    """The programs of the source's flavour and series, as they are called where they are installed."""
    clients = CLIENTS[info.flavour]
    server = row_for(info.flavour, info.version).server[0]
    return Programs(server, clients.client, clients.admin, clients.check, clients.binlog)


def with_variables(text: str) -> str:
    """The operator's variables in place of our stand-ins, quoted for the shell unless they are within a document."""
    for path, variable in _VARIABLES.items():
        text = text.replace(path, variable)
    return text


def known_lines(names: Sequence[str], folder: str) -> str:
    """Shell that prints what is believed of the option file in a backup, as ``backup_files.known_options`` does."""
    known = "|".join(name.replace("-", "[-_]") for name in names)
    return shell(
        "server", "known", known=known, plain=PLAIN_VALUE, plugin=KEY_PLUGIN, folders=PLUGIN_DIR, folder=folder
    )


def option_file(
    programs: Programs,
    info: ServerInfo,
    *,
    datadir: Path,
    found: Path,
    own_account: bool = False,
    more: Mapping[str, str | None] = _NONE,
) -> str:
    """Shell that writes ``$WORK/run/my.cnf`` of a server on ``datadir`` that nobody can reach and that reaches nobody.

    ``found``: the folder with the tool's own option file; ``own_account``: with accounts and events, and an init file,
    instead of letting everybody in; ``more``: options that win over those of the source."""
    config = ServerConfig(
        program=programs.server,
        datadir=datadir,
        directory=WORK / "run",
        skip_grants=not own_account,
        own_account=own_account,
        options={**options_for_copy(WORK, info.variables), **more},
    )
    text = option_text(config).removeprefix("[mysqld]\n")
    for letter in "\\$`":
        text = text.replace(letter, "\\" + letter)
    known = known_lines(FROM_BACKUP, with_variables(str(found)))
    return shell("server", "option_file", server=programs.server, known=known, options=with_variables(text).rstrip())


def begun(programs: Programs, client: str, *, environment: str = "") -> str:
    """Shell that starts the server of ``option_file`` as ``$server``; ``client``: options with which it is asked."""
    return shell(
        "server", "begun", environment=environment, server=programs.server, admin=programs.admin, client=client
    )
