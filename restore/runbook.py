"""The runbook beside a backup: how to restore it by hand, with gpg, zstd, tar, sh and the database's own programs.

It is stored in the clear, so it names no schema, no table and no address; what does is in the sealed ``unpack.sh``.
Its shell blocks are one script that is cut into steps: variables of the first step are used by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        (
            tool,
            f"--defaults-file={base}/backup-my.cnf",
            "--prepare",
            f"--target-dir={base}",
            f"--use-memory={memory // MIB}M",
        ),
        cwd=base,
    )


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
        "restoring host, under the path that they had.\n"
        if info.encrypted
        else "",
    )
    return (
        text
        + "\n".join(
            f"## {number}. {title}\n\n{why}\n\n```sh\n{script.strip()}\n```\n"
            for number, (title, why, script) in enumerate(steps, start=1)
        )
        + _TAIL
    )


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
{row.server[0]} --no-defaults --version | grep -F ' {series}.' || {{ echo 'needs the server {series}' >&2; exit 1; }}
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
    folder = layout.backup_folder(header.server, header.backup_id).rstrip("/")
    script = f"""
gpg --quiet --output "$WORK/unpack.sh.zst" --decrypt "$REPOSITORY/{folder}/{layout.UNPACK}"
zstd -q -d "$WORK/unpack.sh.zst" -o "$WORK/unpack.sh"
sh "$WORK/unpack.sh" "$REPOSITORY" "$WORK/data"
"""
    why = "`unpack.sh` makes every file from the sealed objects and compares each one with its SHA-256."
    return "Decrypt and unpack", why, script


def _prepare(tool: str, memory: int) -> _Step:
    script = f"""
({_shown(prepare_command(tool, _WORK / "data", memory))}) 2> "$WORK/prepare.log" ||
    {{ tail "$WORK/prepare.log" >&2; exit 1; }}
tail -n 1 "$WORK/prepare.log" | grep 'completed OK!'
if grep -E '{_BAD_PREPARE}' "$WORK/prepare.log" >&2; then exit 1; fi
grep -h 'backup_type = log-applied' "$WORK"/data/*_checkpoints
"""
    why = (
        "Applies the redo log that was copied with the data. The tool says `completed OK!` over damaged files, too, so "
        "its log is searched. More memory (`--use-memory`) makes it faster."
    )
    return "Prepare", why, script


def _outside() -> _Step:
    script = f"""
mkdir -p "$STORE/1"
find "$WORK/data" -mindepth 2 -maxdepth 2 -name '*{LINK_SUFFIX}' | while IFS= read -r link; do
    schema=$(basename "$(dirname "$link")")
    table=$(basename "$link" {LINK_SUFFIX})
    mkdir -p "$STORE/1/$schema"
    mv "$WORK/data/$schema/$table.ibd" "$STORE/1/$schema/$table.ibd"
    printf %s "$STORE/1/$schema/$table.ibd" > "$link"
done
chown -R "$OWNER:" "$STORE"
"""
    why = (
        "Some tables lay outside the source's data directory, and small files name their places there. A server on the "
        "source's host would open the live files, so they get a new place beside the new data directory, and the small "
        "files name that."
    )
    return "Tables from outside the data directory", why, script


def _place() -> _Step:
    script = """
find "$WORK/data" -maxdepth 1 -type f \\( -name backup-my.cnf -o -name 'xtrabackup_*' -o -name 'mariadb_backup_*' \\) \\
    -exec mv -t "$WORK" -- {} +
chown -R "$OWNER:" "$WORK/data"
find "$WORK/data" -type d -exec chmod 0700 {} +
find "$WORK/data" -type f -exec chmod 0660 {} +
mkdir -p "$DATADIR"
find "$WORK/data" -mindepth 1 -maxdepth 1 ! -name 'ibdata*' -exec mv -t "$DATADIR" -- {} +
mv -t "$DATADIR" -- "$WORK"/data/ibdata*
chown "$OWNER:" "$DATADIR"
chmod 0750 "$DATADIR"
"""
    why = (
        "The tool's own files stay behind, everything belongs to the server's user, and the system tablespace is moved "
        "last: without it a server does not start on what is only half there."
    )
    return "Put the files in place", why, script


def _look(row: Row, options: Mapping[str, str | None]) -> _Step:
    config = ServerConfig(program=row.server[0], datadir=_DATADIR, directory=_WORK / "run", options=options)
    text = option_text(config).removeprefix("[mysqld]\n")
    for letter in "\\$`":
        text = text.replace(letter, "\\" + letter)
    client = '--no-defaults --socket="$WORK/run/s.sock"'
    script = f"""
mkdir -p "$WORK/run/tmp"
{{
    echo '[mysqld]'
    sed -n -E '/^({_KEPT})[ =]/p' "$WORK/backup-my.cnf"
    cat << END_OF_OPTIONS
{_with_variables(text).rstrip()}
END_OF_OPTIONS
}} > "$WORK/run/my.cnf"
chown -R "$OWNER:" "$WORK/run"
{row.server[0]} --defaults-file="$WORK/run/my.cnf" --user="$OWNER" &
server=$!
until mariadb-admin {client} ping 2> /dev/null; do
    kill -0 "$server" || {{ tail -n 20 "$WORK/run/error.log" >&2; exit 1; }}
    sleep 1
done
mariadb {client} -e 'STOP ALL SLAVES; RESET SLAVE ALL'
mariadb-check {client} --all-databases --check --silent
mariadb-admin {client} shutdown
wait "$server"
rm -rf "$WORK"
"""
    why = (
        "A server that nobody can reach and that reaches nobody: no network, no replication, no events. It forgets "
        "whom its source replicated from (leave that line out to build a replica), checks every table and stops."
    )
    return "Look at it", why, script


def _shown(command: Command) -> str:
    return _with_variables(command.render())


def _with_variables(text: str) -> str:
    """The operator's variables in place of our stand-ins, quoted for the shell unless they are within a document."""
    for path, variable in _VARIABLES.items():
        text = text.replace(path, variable)
    return text


_BAD_PREPARE = "only scanned up to|when restoring a \\(partial|\\[ERROR\\]|FATAL ERROR|not applied to the intended LSN"

_HEAD = """\
# Restoring {server} from backup {backup}, by hand

| | |
|---|---|
| backup | `{backup}`, {kind}, of server `{server}` |
| taken | from {began} to {ended} |
| position | `{position}`, GTID `{gtid}` |
| server | {version}: restore with a {series} server only |
| made with | {tool} |
| size | {files} files, {size}; free space needed: {room} |
| sealed for | {recipients} |
| stored at | {destinations} |
{encrypted}
You need the private key for one of these fingerprints, `gpg`, `zstd`, `tar`, a POSIX `sh` with the usual tools, and the
database's own programs of series {series}. Nothing here needs backupd, and nothing changes the repository.

Work as root in a shell of its own (type `sh`): the first step makes it stop at the first error. The steps follow each
other in that one shell.

"""

_TAIL = """
## Afterwards

Start the real service (`systemctl start mariadb`) with its own configuration. It must agree with the source's in
`lower_case_table_names`, `innodb_page_size`, `innodb_data_file_path` and `innodb_undo_tablespaces`. Where SELinux is
active: `restorecon -R` on the data directory first. Then take a new backup.
"""
