"""What every runbook shares: its text blocks, the check before anything is opened, and how copies get to this machine.

The texts lie in files beside this one: ``NAME.md.j2`` (Markdown, Jinja) and ``NAME.sh`` (POSIX shell). Shell is cut
into blocks, each under a line ``# --- BLOCK``. ``@word@`` stands for a value, so that shellcheck can read the file as
it is; alone at the left margin it stands for lines, for none where the value is empty. Directives to shellcheck
(``# shellcheck ...``) are left out of every runbook.

The check: a sealed file proves nothing about who made it, because everybody who has the public key can seal one. So the
description of each backup has to be signed by a key whose fingerprint the reader brings along, and every file beside it
has to be the one that the description names by its SHA-256. ``unpack.sh`` is run as root: it is never opened before
that. A signature holds wherever the file is, so a description counts only in the folder that it names.

``unpack.sh`` makes a backup's files from its objects with sh, gpg, zstd, tar and sha256sum alone. It names every file
of the backup, so it is stored sealed; the runbook in the clear says how to open it. Whoever can write to the
destination can seal other objects: so it opens no object that is not, byte for byte, the one that was stored.

Copies at other destinations are fetched with ``aws`` or ``sftp``. Each destination has shell blocks of its own
(``shell``, where the steps of the restore are ``sh``): the reader chooses one destination and follows every step. The
blocks name endpoint, bucket, host and folder, and no secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

from backupd.engine.server.backup_files import KEY_PLUGIN, PLAIN_VALUE, PLUGIN_DIR
from backupd.engine.server.launch import FROM_BACKUP, Options, ServerConfig, option_text, options_for_copy
from backupd.engine.toolset import CLIENTS, row_for
from backupd.model.manifest import Entry, StoredObject
from backupd.model.server_facts import ServerInfo
from backupd.model.text import format_size
from storage import layout
from storage.config import DestinationConfig, S3Config, SftpConfig

_HERE = Path(__file__).parent
_DIRECTIVE = re.compile(r"^ *# shellcheck .*\n", re.MULTILINE)
_BLOCK = re.compile(r"^# --- ([a-z0-9_]+)\n", re.MULTILINE)
_LINE = re.compile(r"^@([a-z_]+)@\n", re.MULTILINE)
_VALUE = re.compile(r"@([a-z_]+)@")


@cache
def _blocks(name: str) -> dict[str, str]:
    """By their names; what is before the first one is ""."""
    head, *parts = _BLOCK.split(_DIRECTIVE.sub("", (_HERE / f"{name}.sh").read_text(encoding="utf-8")))
    return {"": head, **dict(zip(parts[::2], parts[1::2], strict=True))}


def shell(name: str, block: str = "", **values: object) -> str:
    """A block of ``NAME.sh`` with its ``values``, without line ends around it. What a value holds stays as it is."""
    text = _LINE.sub(lambda found: found[0] if values[found[1]] else "", _blocks(name)[block].strip("\n"))
    return _filled(text, values)


def sql(name: str, **values: object) -> str:
    """The whole of ``NAME.sql`` with its ``values``, written in the same way."""
    return _filled((_HERE / f"{name}.sql").read_text(encoding="utf-8"), values)


def _filled(text: str, values: Mapping[str, object]) -> str:
    return _VALUE.sub(lambda found: str(values[found[1]]), text)


def document(name: str, **values: object) -> str:
    """The Markdown of ``NAME.md.j2``. Raises jinja2.UndefinedError where it names a value that is not given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    texts = Environment(  # noqa: S701 - Markdown for people, nothing that a browser reads
        loader=FileSystemLoader(_HERE),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return texts.get_template(f"{name}.md.j2").render(values)


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
    """The script for ``entries``, which are in the objects ``stored``. Names may hold any byte but NUL; they stay the
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
    server = row_for(info.flavour, info.version).server[0]
    config = ServerConfig(
        program=server,
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
    return shell("server", "option_file", server=server, known=known, options=with_variables(text).rstrip())


def begun(info: ServerInfo, client: str, *, environment: str = "") -> str:
    """Shell that starts the server of ``option_file`` as ``$server``; ``client``: options with which it is asked."""
    server, admin = row_for(info.flavour, info.version).server[0], CLIENTS[info.flavour].admin
    return shell("server", "begun", environment=environment, server=server, admin=admin, client=client)


NOWHERE: Mapping[str, DestinationConfig] = MappingProxyType({})

_ARCHIVE_HOURS = {
    "GLACIER": "`Expedited` 5 minutes (where it is to be had), `Standard` 5 hours, `Bulk` 12 hours",
    "DEEP_ARCHIVE": "`Standard` 12 hours, `Bulk` 48 hours; `Expedited` is not to be had",
}
"""Classes that have to be thawed, and how long that takes."""


def render_destinations(
    server: str, chain: Sequence[str], configs: Mapping[str, DestinationConfig], *, stored: int
) -> str:
    """Markdown; empty where all ``configs`` are folders. ``chain``: the backups that are needed; ``stored``: bytes that
    are fetched for them, at most."""
    away = {name: config for name, config in configs.items() if isinstance(config, (S3Config, SftpConfig))}
    if not away:
        return ""
    return document(
        "destinations",
        places=[
            {
                "name": name,
                "config": config,
                **(_s3(config, server, chain) if isinstance(config, S3Config) else _sftp(config, server, chain)),
            }
            for name, config in away.items()
        ],
        folders=[name for name in configs if name not in away],
        size=format_size(stored),
        hours=_ARCHIVE_HOURS,
    )


def _s3(config: S3Config, server: str, chain: Sequence[str]) -> dict[str, str]:
    """The blocks of shell."""
    folder = f"{config.prefix}/" if config.prefix else ""
    settings = [f"export AWS_DEFAULT_REGION={quote(config.region)}"] if config.region else []
    if config.addressing != "auto":
        settings.append(shell("destinations", "s3_addressing", addressing=config.addressing))
    values = {
        "chain": " ".join(chain),
        "server": server,
        "servers": layout.SERVERS,
        "logs": layout.binlogs_folder(server),
        "settings": "\n".join(settings),
        "endpoint": f" --endpoint-url {quote(config.endpoint_url)}" if config.endpoint_url else "",
        "from": quote(f"s3://{config.bucket}/{folder}".rstrip("/")),
        "bucket": quote(config.bucket),
        "prefix": quote(folder),
    }

    def block(name: str, **more: str) -> str:
        return shell("destinations", name, **values, **more)

    def force(storage_class: str) -> str:
        return " --force-glacier-transfer" if storage_class in _ARCHIVE_HOURS else ""

    thaw, frozen = block("s3_thaw_one"), block("s3_frozen_one")
    fetch = block("s3_fetch_folder", force=force(config.storage_class))
    return {
        "lists": block("s3_lists", names=block("names")),
        "thaw": block("s3_thaw", thaw_one=thaw, keys="objects-keys.txt"),
        "frozen": block("s3_frozen", frozen_one=frozen, keys="objects-keys.txt"),
        "fetch": block("s3_fetch", fetch_folder=fetch, check=block("check")),
        "log_keys": block("s3_log_keys"),
        "thaw_logs": block("s3_thaw", thaw_one=thaw, keys="log-keys.txt"),
        "frozen_logs": block("s3_frozen", frozen_one=frozen, keys="log-keys.txt"),
        "logs": block("s3_logs", force=force(config.binlog_storage_class)),
    }


def _sftp(config: SftpConfig, server: str, chain: Sequence[str]) -> dict[str, str]:
    """The blocks of shell."""
    enter = f"cd {_batch_word(config.path)}"
    folders = [layout.backup_folder(server, backup).rstrip("/") for backup in chain]
    values = {
        "port": config.port,
        "account": quote(f"{config.user}@{config.host}"),
        "enter": enter,
        "enter_word": quote(enter),
        "gets": "\n".join(f"get -r {folder} {layout.SERVERS}{server}" for folder in folders),
        "server": server,
        "servers": layout.SERVERS,
        "chain": " ".join(chain),
        "logs": layout.binlogs_folder(server).rstrip("/"),
        "binlogs": layout.BINLOGS.rstrip("/"),
    }
    names, check = shell("destinations", "names", **values), shell("destinations", "check")
    return {
        "fetch": shell("destinations", "sftp_fetch", names=names, check=check, **values),
        "logs": shell("destinations", "sftp_logs", **values),
    }


def _batch_word(text: str) -> str:
    """``text`` as one word of sftp's own commands."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
