"""The runbook beside a backup: how to restore it by hand, with gpg, zstd, tar, sh and the database's own programs.

It is stored in the clear, so it names no schema, no table and no address; what does is in the sealed ``unpack.sh``.
Its shell blocks are one script that is cut into steps: variables of the first step are used by all of them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from backupd.engine.external import LINK_SUFFIX
from backupd.engine.launch import ServerConfig, option_text, options_for_copy
from backupd.engine.toolset import Row, row_for
from backupd.model.clock import format_time
from backupd.model.manifest import Body, Header
from backupd.model.units import format_size
from backupd.process.command import Command
from restore.memory import MIB, choose_memory
from restore.room import RESERVE
from storage import layout

# Stand for the operator's paths while commands are rendered: nothing in them needs quoting.
_WORK, _DATADIR, _STORE = Path("/BACKUPD-WORK"), Path("/BACKUPD-DATADIR"), Path("/BACKUPD-STORE")
_VARIABLES = {str(_STORE): "$STORE", str(_DATADIR): "$DATADIR", str(_WORK): "$WORK"}
_ASSUMED_FREE = 4096 * MIB
"""Free memory of a host that we do not know yet."""
_KEPT = (
    "innodb_page_size|innodb_data_file_path|innodb_undo_tablespaces|innodb_checksum_algorithm|plugin.load.add|plugin.load"
    "|(loose_)?file.key.management.*"
)


def prepare_command(tool: str, base: Path, memory: int) -> Command:
    """What the engine runs to prepare ``base`` with ``memory`` bytes, with the tool found by its name."""
    return Command(
        (tool, f"--defaults-file={base}/backup-my.cnf", "--prepare", f"--target-dir={base}",
         f"--use-memory={memory // MIB}M"),
        cwd=base)


def render_runbook(header: Header, body: Body, *, destinations: Sequence[str]) -> str:
    """Markdown. ``destinations``: the names of those that hold this backup."""
    facts = body.facts
    info = facts.server
    row = row_for(info.flavour, info.version)
    redo = sum(entry.size for entry in body.entries if entry.path in ("ib_logfile0", "xtrabackup_logfile"))
    memory = choose_memory(redo=redo, available=_ASSUMED_FREE).bytes
    room = header.stats.bytes_source + redo + RESERVE
    outside = any(entry.path.endswith(LINK_SUFFIX) for entry in body.entries)
    steps = [
        _settings(header, info.version.series, facts.tool.name, row),
        _unpack(header),
        _prepare(facts.tool.name, memory),
        *([_outside()] if outside else []),
        _place(),
        _look(row, options_for_copy(_WORK, info.variables)),
    ]
    text = _HEAD.format(
        backup=header.backup_id,
        server=header.server,
        kind=header.kind,
        began=format_time(header.started_at),
        ended=format_time(header.finished_at),
        position=f"{facts.position.file}:{facts.position.pos}" if facts.position.file else "none (no binary log)",
        gtid=facts.position.gtid or "none",
        version=f"{info.flavour} {info.version}",
        series=info.version.series,
        tool=f"{facts.tool.name} {facts.tool.version}",
        size=format_size(header.stats.bytes_source),
        files=header.stats.files,
        room=format_size(room),
        recipients=", ".join(header.recipients),
        destinations=", ".join(destinations),
        encrypted="\nThe source has **encrypted tablespaces**: the key management plugin's key files must be on the "
        "restoring host, under the path that they had.\n" if info.encrypted else "",
    )
    return text + "\n".join(
        f"## {number}. {title}\n\n{why}\n\n```sh\n{script.strip()}\n```\n"
        for number, (title, why, script) in enumerate(steps, start=1)
    ) + _TAIL


_Step = tuple[str, str, str]


def _settings(header: Header, series: str, tool: str, row: Row) -> _Step:
    script = f"""
set -eu
umask 077
BACKUP={header.backup_id}
SERVER={header.server}
: "${{REPOSITORY:?the folder that holds objects and servers}}"
: "${{DATADIR:?the empty or missing data directory to restore into}}"
: "${{WORK:=$DATADIR.by-hand}}"
: "${{STORE:=$DATADIR.external}}"
: "${{OWNER:=mysql}}"

for program in gpg zstd tar sha256sum {tool} {row.server[0]} mariadb mariadb-admin mariadb-check; do
    command -v "$program" > /dev/null || {{ echo "$program is missing" >&2; exit 1; }}
done
{tool} --no-defaults --version 2>&1 | grep -F ' {series}.' || {{ echo 'needs {tool} {series}' >&2; exit 1; }}
{row.server[0]} --no-defaults --version | grep -F ' {series}.' || {{ echo 'needs {row.server[0]} {series}' >&2; exit 1; }}
test -z "$(ls -A "$DATADIR" 2> /dev/null | grep -v -x 'lost+found')" || {{ echo "$DATADIR is not empty" >&2; exit 1; }}
mkdir -m 0711 "$WORK"
"""
    why = (
        "Set `REPOSITORY` and `DATADIR` first, for example with `export REPOSITORY=/srv/backups "
        "DATADIR=/var/lib/mysql`, and `GNUPGHOME` if the private key is not in root's own keyring. Everything is "
        "built in `WORK`, which must be on the same file system as `DATADIR`; nothing is written to `REPOSITORY`."
    )
    return "Settings, and is everything here?", why, script


def _unpack(header: Header) -> _Step:
    folder = layout.backup_folder(header.server, "BACKUP") if False else f"servers/{header.server}"
    script = f"""
gpg --quiet --output "$WORK/unpack.sh.zst" --decrypt "$REPOSITORY/{folder}/$BACKUP/{layout.UNPACK}"
zstd -q -d "$WORK/unpack.sh.zst" -o "$WORK/unpack.sh"
sh "$WORK/unpack.sh" "$REPOSITORY" "$WORK/data"
"""
    why = "`unpack.sh` makes every file of the backup from the sealed objects and compares all of them with their SHA-256."
    return "Decrypt and unpack", why, script
