"""The runbook beside a backup: how to restore it by hand, with gpg, zstd, tar, sh and the database's own programs.

It is stored in the clear, so it names no schema, no table and no address; what does is in the sealed ``unpack.sh``.
Its shell blocks are one script that is cut into steps: variables of the first step are used by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from backupd.engine.instance.backup_files import KNOWN
from backupd.engine.physical import clone
from backupd.engine.physical.external_tablespaces import LINK_SUFFIX
from backupd.engine.sql.dialect import dialect_of
from backupd.engine.toolset import XTRABACKUP, Row, row_for
from backupd.model.backup_record import BackupRecord
from backupd.model.manifest import Body, BodyFacts, Header
from backupd.model.server_facts import Flavour, ServerInfo, Tool
from backupd.model.text import format_size, format_time
from backupd.process.command import Command
from restore.datadir.resources import MIB, RESERVE, choose_memory
from restore.runbook.destinations import NOWHERE, render_places
from restore.runbook.logs import Step, apply_logs, choose_logs
from restore.runbook.shared_steps import (
    DATADIR,
    OWNER,
    SIGNED,
    UNSIGNED,
    WORK,
    begun,
    first_look,
    known_lines,
    option_file,
    programs_of,
    with_variables,
)
from storage.contract import layout
from storage.contract.config import DestinationConfig

_ASSUMED_FREE = 4096 * MIB
"""Free memory of a host that we do not know yet."""


def prepare_command(
    tool: str, base: Path, memory: int, increment: Path | None = None, *, switches: Sequence[str] = ()
) -> Command:
    """What the engine runs to prepare ``base``, or to apply ``increment`` to it, with ``memory`` bytes and the tool
    found by its name; here as the server's user."""
    return Command(
        (
            tool,
            f"--defaults-file={base}/backup-my.cnf",
            "--prepare",
            *switches,
            f"--target-dir={base}",
            f"--use-memory={memory // MIB}M",
            *([f"--incremental-dir={increment}"] if increment else []),
        ),
        cwd=base,
        user=OWNER,
    )


def render_runbook(
    header: Header,
    body: Body,
    *,
    destinations: Sequence[str],
    earlier: Sequence[BackupRecord] = (),
    places: Mapping[str, DestinationConfig] = NOWHERE,
    signed: bool = False,
) -> str:
    """Markdown. ``destinations``: the names of those that hold this backup; ``earlier``: what an increment builds on,
    the full backup first; ``places``: what is known of the destinations that hold it or will; ``signed``: are the
    manifests signed, so that others are refused?"""
    facts = body.facts
    info = facts.server
    row = row_for(info.flavour, info.version)
    redo = sum(entry.size for entry in body.entries if entry.path in ("ib_logfile0", "xtrabackup_logfile"))
    memory = choose_memory(redo=redo, available=_ASSUMED_FREE).bytes
    chain = (*(record.id for record in earlier), header.backup_id)
    size = header.stats.bytes_source + sum(record.stats.bytes_source for record in earlier)
    applied = size - earlier[0].stats.bytes_source if earlier else 0
    room = size + applied + redo + RESERVE
    logged = bool(facts.position.file)
    outside = any(entry.path.endswith(LINK_SUFFIX) for entry in body.entries)
    steps = [
        _settings(header, info, facts.tool, row, chain, signed=signed),
        *([choose_logs(header, body, signed=signed)] if logged else []),
        _unpack(chain),
        *([] if _is_clone(facts.tool) else [_prepare(facts.tool.name, memory, len(chain) - 1)]),
        *([_outside()] if outside else []),
        *([apply_logs(header, info)] if logged else []),
        _place(),
        _look(info),
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
        size=format_size(size),
        files=header.stats.files + sum(record.stats.files for record in earlier),
        chain=_CHAIN.format(chain=", ".join(f"`{name}`" for name in chain[:-1])) if earlier else "",
        room=format_size(room),
        recipients=", ".join(header.recipients),
        destinations=", ".join(destinations),
        encrypted="\nThe source has **encrypted tablespaces**: the key management plugin's key files must be on the "
        "restoring host, under the path that they had.\n"
        if info.encrypted
        else "",
        lost=_lost(header.tables_missing - len(facts.missing), facts),
    )
    return (
        text
        + render_places(
            header.server,
            chain,
            places,
            stored=sum(item.size for item in header.objects) + sum(record.stats.bytes_stored for record in earlier),
        )
        + "\n".join(
            f"## {number}. {title}\n\n{why}\n\n```sh\n{script.strip()}\n```\n"
            for number, (title, why, script) in enumerate(steps, start=1)
        )
        + _TAIL.format(service=row.server[0].removesuffix("d"))
        + (_CONFIG.format(path=layout.config_key(header.server, header.backup_id)) if header.config else "")
    )


def _is_clone(tool: Tool) -> bool:
    """Was the backup started and stopped when it was made, so that there is nothing to prepare?"""
    return tool.name == clone.NAME


def _settings(header: Header, info: ServerInfo, tool: Tool, row: Row, chain: Sequence[str], *, signed: bool) -> Step:
    series = info.version.series
    ours = programs_of(info)
    programs = [*([] if _is_clone(tool) else [tool.name]), ours.server, ours.client, ours.admin, ours.check]
    of_tool = (
        ""
        if _is_clone(tool)
        else (
            f"{tool.name} --no-defaults --version 2>&1 | grep -F ' {tool.version.series}.' ||"
            f" {{ echo 'needs {tool.name} {tool.version.series}' >&2; exit 1; }}\n"
        )
    )
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

for program in gpg zstd tar sha256sum {" ".join(programs)}; do
    command -v "$program" > /dev/null || {{ echo "$program is missing" >&2; exit 1; }}
done
{of_tool}{row.server[0]} --no-defaults --version | grep -F ' {series}.' ||
    {{ echo 'needs the server {series}' >&2; exit 1; }}
test -z "$(ls -A "$DATADIR" 2> /dev/null | grep -v -x 'lost+found')" || {{ echo "$DATADIR is not empty" >&2; exit 1; }}
{first_look(header.server, chain, signed=signed)}
mkdir -m 0711 "$WORK"
"""
    why = (
        "Set `REPOSITORY` and `DATADIR` first, for example with `export REPOSITORY=/srv/backups "
        "DATADIR=/var/lib/mysql`, and `GNUPGHOME` if the private key is not in root's own keyring. Everything is "
        "built in `WORK`, which must be on the same file system as `DATADIR`; nothing is written to `REPOSITORY`."
    ) + (SIGNED if signed else UNSIGNED)
    return "Settings, and is everything here, as it was stored?", why, script


def _unpack(chain: Sequence[str]) -> Step:
    goals = ["data", *(_increment(number) for number in range(1, len(chain)))]
    script = (
        "".join(
            f"""
gpg --quiet --output "$WORK/{goal}.sh.zst" --decrypt "$CHECKED/{backup}/{layout.UNPACK}"
zstd -q -d "$WORK/{goal}.sh.zst" -o "$WORK/{goal}.sh"
sh "$WORK/{goal}.sh" "$REPOSITORY" "$WORK/{goal}"
"""
            for goal, backup in zip(goals, chain, strict=True)
        )
        + 'rm -r "$CHECKED"\n'
    )
    why = "`unpack.sh` makes every file from the sealed objects, and compares each of both with its SHA-256."
    if len(chain) > 1:
        why += " Each backup of the chain has its own, and gets a folder of its own."
    return "Decrypt and unpack", why, script


_ASIDE = """\
aside() {  # tables that were renamed, and whose old name is a new table's: the tool would remove their rows
    find "$1" -mindepth 2 -maxdepth 2 '(' -name '*.new' -o -name '*.del' ')' | while IFS= read -r file; do
        data="$WORK/data${file#"$1"}"
        data="${data%.*}.ibd"
        test -f "$data" || continue
        number=$((0x$(od -An -v -tx1 -j34 -N4 "$data" | tr -d ' ')))
        if grep -rqsx --include='*.ibd.meta' "space_id = $number" "$1"; then
            mv "$data" "${data%/*}/xtrabackup_tmp_#$number.ibd"
        fi
    done
}
"""
"""As ``datafiles.put_aside`` does it."""


def _prepare(tool: str, memory: int, increments: int) -> Step:
    is_xtrabackup = tool == XTRABACKUP
    commands = [
        prepare_command(
            tool,
            WORK / "data",
            memory,
            WORK / _increment(number) if number else None,
            # Without it, no increment fits any more.
            switches=("--apply-log-only",) if is_xtrabackup and number < increments else (),
        )
        for number in range(increments + 1)
    ]
    prepared = "full-prepared" if is_xtrabackup else "log-applied"
    aside = "" if is_xtrabackup or not increments else _ASIDE
    steps = "".join(
        f"""{f'{chr(10)}aside "$WORK/{_increment(number)}"' if aside and number else ""}
({_shown(command)}) 2> "$WORK/prepare-{number}.log" ||
    {{ tail "$WORK/prepare-{number}.log" >&2; exit 1; }}
prepared "$WORK/prepare-{number}.log"
"""
        for number, command in enumerate(commands)
    )
    script = f"""
{{
    echo '[mysqld]'
    {known_lines(KNOWN, "$WORK/data")}
}} > "$WORK/known.cnf"
mv "$WORK/known.cnf" "$WORK/data/backup-my.cnf"
chown -R "$OWNER:" {" ".join(f'"$WORK/{name}"' for name in ("data", *map(_increment, range(1, increments + 1))))}
prepared() {{
    grep '[^[:space:]]' "$1" | tail -n 1 | grep 'completed OK!'
    if grep -E '{_BAD_PREPARE}' "$1" >&2; then exit 1; fi
}}
{aside}{steps}
grep -h 'backup_type = {prepared}' "$WORK"/data/*_checkpoints
"""
    why = (
        "Applies the redo log that was copied with the data. The tool says `completed OK!` over damaged files, too, so "
        "its log is searched. More memory (`--use-memory`) makes it faster. It does not run as root, and gets what is "
        "known of the backup's option file, which may name programs to load."
    )
    if increments:
        why += (
            " Then the increments, each once and in this order: the tool itself does not notice a wrong one. Where a "
            "step was interrupted, remove `WORK` and begin again: an increment cannot be applied twice."
        )
    return "Prepare", why, script


def _increment(number: int) -> str:
    return f"increment-{number}"


def _outside() -> Step:
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


def _place() -> Step:
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


def _look(info: ServerInfo) -> Step:
    programs = programs_of(info)
    forget = dialect_of(info.flavour, info.version).forget_replication
    if info.flavour is Flavour.MARIADB:
        forget = f"STOP ALL SLAVES; {forget}"
    client = '--no-defaults --socket="$WORK/run/s.sock"'
    script = f"""
{option_file(programs, info, datadir=DATADIR, found=WORK).rstrip()}
{begun(programs, client).rstrip()}
{programs.client} {client} -e '{forget}'
{programs.check} {client} --default-character-set=utf8mb4 --all-databases --check --silent
{programs.admin} {client} shutdown
wait "$server"
rm -rf "$WORK"
"""
    why = (
        "A server that nobody can reach and that reaches nobody: no network, no replication, no events. It forgets "
        "whom its source replicated from (leave that line out to build a replica), checks every table and stops."
    )
    return "Look at it", why, script


def _shown(command: Command) -> str:
    return with_variables(command.render())


_CHAIN = "| builds on | {chain}: all of them are needed, each is in `servers/` under its own name |\n"
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
{chain}| sealed for | {recipients} |
| stored at | {destinations} |
{encrypted}{lost}
You need the private key for one of these fingerprints, `gpg`, `zstd`, `tar`, a POSIX `sh` with the usual tools, and the
database's own programs of series {series}. Nothing here needs backupd, and nothing changes the repository.

Work as root in a shell of its own (type `sh`): the first step makes it stop at the first error. The steps follow each
other in that one shell.

"""

_TAIL = """
## Afterwards

Start the real service (`systemctl start {service}`) with its own configuration. It must agree with the source's in
`lower_case_table_names`, `innodb_page_size`, `innodb_data_file_path` and `innodb_undo_tablespaces`. Where SELinux is
active: `restorecon -R` on the data directory first. Then take a new backup.
"""

_CONFIG = """
## The source's configuration

Option files with all that they include, what the policy named, users and grants as SQL, settings, packages and mounts
of the source's host are in one sealed archive. It holds passwords: open it in a folder of your own.

```
mkdir -m 0700 config
gpg --quiet -d "$REPOSITORY/{path}" | zstd -q -d | tar -x -C config
```

Its `README.txt` says what is what. The accounts are in the restored data already; compare `host/files` with the new
host before you copy anything there, and look into `host/mounts.txt` if `innodb_doublewrite` was off.
"""


def _lost(left_out: int, facts: BodyFacts) -> str:
    """What the backup lacks: tables that its tool always leaves out, and those that it lost."""
    text = ""
    if left_out:
        text += (
            f"\n**{left_out} tables come back without rows:** they are of engines that {facts.tool.name} leaves"
            " out, and no logical backup took them.\n"
        )
    if facts.missing:
        text += (
            f"\n**{len(facts.missing)} tables are missing:** they were dropped and made again, or renamed, while"
            f" the backup was taken: {', '.join(name.shown for name in facts.missing)}.\n"
        )
    return text
