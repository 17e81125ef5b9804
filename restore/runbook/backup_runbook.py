"""The steps of a runbook that bring a later moment than the backup's: archived binary logs, chosen, opened, put
together and applied by ``sh`` with gpg, zstd, awk and the database's own programs.

With ``TO`` empty they do nothing. The history is chosen by the clear descriptions beside the logs, as
``backupd.recovery`` does it, and what is not certain stops. The position to stop at is found in the sealed indexes, so
it is right to the microsecond and between two transactions, which a reader's own options are not.

Descriptions are copied before they are looked at, so that nobody who can write there changes them in between. Where a
server is signed they count only with the signature of ``SIGNER``, and only in the folder that they name.

The runbook beside a backup: how to restore it by hand, with gpg, zstd, tar, sh and the database's own programs.

It is stored in the clear, so it names no schema, no table and no address; what does is in the sealed ``unpack.sh``.
Its shell blocks are one script that is cut into steps: variables of the first step are used by all of them.

The runbook beside a logical backup: how to load it by hand, with gpg, zstd, tar, sh and the database's own client.

It is stored in the clear, so it names no schema, no table and no address. Its shell blocks are one script that is cut
into steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from backupd.engine.physical import clone
from backupd.engine.physical.datafiles import LINK_SUFFIX
from backupd.engine.server.backup_files import KNOWN
from backupd.engine.server.launch import OWN_ACCOUNT, Options, global_zone, zone_of
from backupd.engine.sql.dialect import dialect_of
from backupd.engine.toolset import CLIENTS, XTRABACKUP, Row, row_for
from backupd.model.backup_record import BackupRecord
from backupd.model.manifest import Body, Header
from backupd.model.server_facts import Role, ServerInfo, Tool
from backupd.model.table import DumpFacts
from backupd.model.text import format_size, format_time
from backupd.process.command import Command
from restore.datadir.occupancy import MIB, RESERVE, choose_memory
from restore.runbook.shared_steps import (
    DATADIR,
    NOWHERE,
    OWNER,
    WORK,
    begun,
    document,
    first_look,
    known_lines,
    option_file,
    quote,
    render_destinations,
    shell,
    with_variables,
)
from storage import layout
from storage.config import DestinationConfig

_ALWAYS: Options = {
    "innodb_flush_log_at_trx_commit": "0",
    "max_allowed_packet": "1073741824",
    "loose_server_audit": "OFF",
    "loose_audit_log": "OFF",
    "loose_group_replication": "OFF",
}
_ACCOUNT = '--defaults-file="$WORK/run/client.cnf" --socket="$WORK/run/s.sock"'


def choose_logs(header: Header, body: Body, *, signed: bool) -> str:
    """What is needed of the archive, as files in ``$WORK/logs``. ``signed``: only what SIGNER has signed; the step
    before defines what looks at that."""
    position = body.facts.position
    return shell(
        "logs",
        "choose",
        logs=layout.binlogs_folder(header.server).rstrip("/"),
        started=_padded(header.started_at),
        finished=_padded(header.finished_at),
        uuid=quote(body.facts.server.server_uuid),
        gtid=quote("".join(position.gtid.split())),
        file=int(position.file.rpartition(".")[2]),
        pos=position.pos,
        reader=CLIENTS[body.facts.server.flavour].binlog,
        look="\n" + shell("logs", "look") if signed else "",
    )


def apply_logs(header: Header, info: ServerInfo) -> str:
    """The logs, applied to the copy before it is put in place."""
    programs, dialect = CLIENTS[info.flavour], dialect_of(info.flavour, info.version)
    session = [dialect.replay_session] if dialect.replay_session else []
    if zone := global_zone(info.variables):
        session.append(f"SET SESSION time_zone = '{zone}'")
    more = {**_ALWAYS, **dialect.replay_options}
    copy = WORK / "data"
    return shell(
        "logs",
        "apply",
        options=option_file(info, datadir=copy, found=copy, own_account=True, more=more),
        begun=begun(info, _ACCOUNT, environment='env ${ZONE:+TZ="$ZONE"} '),
        zone=zone_of(info.variables, header.finished_at, header.finished_at).name,
        account=OWN_ACCOUNT,
        client=f"{programs.client} {_ACCOUNT}",
        reader=f"{programs.binlog} --no-defaults",
        reading=f" {dialect.replay_reader}" if dialect.replay_reader else "",
        session="\n".join(f"        echo {quote(line + ';')}" for line in session),
    )


def _padded(moment: datetime) -> str:
    """With all digits, so that times compare as text."""
    whole, _, part = format_time(moment).removesuffix("Z").partition(".")
    return f"{whole}.{part:0<6}"


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
    configs: Mapping[str, DestinationConfig] = NOWHERE,
    signed: bool = False,
) -> str:
    """Markdown. ``destinations``: the names of those that hold this backup; ``earlier``: what an increment builds on,
    the full backup first; ``configs``: what is known of the destinations that hold it or will; ``signed``: are the
    manifests signed, so that others are refused?"""
    facts = body.facts
    info = facts.server
    row = row_for(info.flavour, info.version)
    redo = sum(entry.size for entry in body.entries if entry.path in ("ib_logfile0", "xtrabackup_logfile"))
    memory = choose_memory(redo=redo, available=_ASSUMED_FREE)
    chain = (*(record.id for record in earlier), header.backup_id)
    size = header.stats.bytes_source + sum(record.stats.bytes_source for record in earlier)
    applied = size - earlier[0].stats.bytes_source if earlier else 0
    script = {"settings": _settings(header, info, facts.tool, row, chain, signed=signed)}
    if facts.position.file:
        script["choose"] = choose_logs(header, body, signed=signed)
    script["unpack"] = _unpack(chain)
    if not _is_clone(facts.tool):
        script["prepare"] = _prepare(facts.tool.name, memory, len(chain) - 1)
    if any(entry.path.endswith(LINK_SUFFIX) for entry in body.entries):
        script["outside"] = shell("whole", "outside", link=LINK_SUFFIX)
    if facts.position.file:
        script["apply"] = apply_logs(header, info)
    script["place"] = shell("whole", "place")
    script["look"] = _look(info)
    return document(
        "whole",
        **_shared(header, body, destinations, configs, earlier, signed=signed),
        kind=header.kind,
        series=info.version.series,
        tool=facts.tool,
        earlier=", ".join(f"`{name}`" for name in chain[:-1]),
        room=format_size(size + applied + redo + RESERVE),
        encrypted=info.encrypted,
        # Of those that are missing, the tool always leaves out some; the others were lost.
        left_out=header.tables_missing - len(facts.missing),
        missing=[name.shown for name in facts.missing],
        script=script,
        number={name: number for number, name in enumerate(script, start=1)},
        zone=info.variables.get("system_time_zone", "") or "not known",
        service=row.server[0].removesuffix("d"),
        node=info.role is Role.NODE and "prepare" in script,
        config=layout.config_key(header.server, header.backup_id) if header.config else "",
    )


def _shared(
    header: Header,
    body: Body,
    destinations: Sequence[str],
    configs: Mapping[str, DestinationConfig],
    earlier: Sequence[BackupRecord] = (),
    *,
    signed: bool,
) -> dict[str, object]:
    """What every runbook beside a backup says of it."""
    position, info, stats = body.facts.position, body.facts.server, [record.stats for record in earlier]
    chain = (*(record.id for record in earlier), header.backup_id)
    stored = sum(item.size for item in header.objects) + sum(one.bytes_stored for one in stats)
    return {
        "backup": header.backup_id,
        "server": header.server,
        "began": format_time(header.started_at),
        "ended": format_time(header.finished_at),
        "position": f"{position.file}:{position.pos}" if position.file else "none (no binary log)",
        "gtid": position.gtid or "none",
        "version": f"{info.flavour} {info.version}",
        "size": format_size(sum(one.bytes_source for one in (header.stats, *stats))),
        "files": sum(one.files for one in (header.stats, *stats)),
        "recipients": ", ".join(header.recipients),
        "destinations": ", ".join(destinations),
        "places": render_destinations(header.server, chain, configs, stored=stored),
        "signed": signed,
    }


def _is_clone(tool: Tool) -> bool:
    """Was the backup started and stopped when it was made, so that there is nothing to prepare?"""
    return tool.name == clone.NAME


def _settings(header: Header, info: ServerInfo, tool: Tool, row: Row, chain: Sequence[str], *, signed: bool) -> str:
    ours = CLIENTS[info.flavour]
    programs = [*([] if _is_clone(tool) else [tool.name]), row.server[0], ours.client, ours.admin, ours.check]
    return shell(
        "whole",
        "settings",
        backup=header.backup_id,
        server=header.server,
        programs=" ".join(programs),
        tool="" if _is_clone(tool) else shell("whole", "tool", tool=tool.name, series=tool.version.series),
        program=row.server[0],
        series=info.version.series,
        trusted=first_look(header.server, chain, signed=signed),
    )


def _unpack(chain: Sequence[str]) -> str:
    folders = ["data", *(_increment(number) for number in range(1, len(chain)))]
    scripts = [
        shell("whole", "unpack", folder=folder, backup=backup, unpack=layout.UNPACK)
        for folder, backup in zip(folders, chain, strict=True)
    ]
    return "\n\n".join(scripts) + '\nrm -r "$CHECKED"'


def _prepare(tool: str, memory: int, increments: int) -> str:
    is_xtrabackup = tool == XTRABACKUP
    aside = "" if is_xtrabackup or not increments else shell("whole", "aside")
    steps = []
    for number in range(increments + 1):
        command = prepare_command(
            tool,
            WORK / "data",
            memory,
            WORK / _increment(number) if number else None,
            # Without it, no increment fits any more.
            switches=("--apply-log-only",) if is_xtrabackup and number < increments else (),
        )
        steps.append(
            (f'aside "$WORK/{_increment(number)}"\n' if aside and number else "")
            + shell("whole", "prepare_one", command=with_variables(command.render()), number=number)
        )
    folders = ("data", *map(_increment, range(1, increments + 1)))
    return shell(
        "whole",
        "prepare",
        known=known_lines(KNOWN, "$WORK/data"),
        folders=" ".join(f'"$WORK/{name}"' for name in folders),
        aside=aside,
        prepared="\n\n".join(steps),
        type="full-prepared" if is_xtrabackup else "log-applied",
    )


def _increment(number: int) -> str:
    return f"increment-{number}"


def _look(info: ServerInfo) -> str:
    programs, dialect = CLIENTS[info.flavour], dialect_of(info.flavour, info.version)
    options = '--no-defaults --socket="$WORK/run/s.sock"'
    return shell(
        "whole",
        "look",
        options=option_file(info, datadir=DATADIR, found=WORK),
        begun=begun(info, options),
        client=f"{programs.client} {options}",
        check=f"{programs.check} {options}",
        admin=f"{programs.admin} {options}",
        forget="; ".join(filter(None, (dialect.stop_replication, dialect.forget_replication))),
    )


def render_logical_runbook(
    header: Header,
    body: Body,
    *,
    destinations: Sequence[str],
    configs: Mapping[str, DestinationConfig] = NOWHERE,
    signed: bool = False,
) -> str:
    """Markdown. ``destinations``: the names of those that hold this backup; ``configs``: what is known of the
    destinations that hold it or will; ``signed``: are manifests signed, so that others are refused?"""
    facts = body.facts
    dump = facts.dump or DumpFacts(())
    client = CLIENTS[facts.server.flavour].client
    trusted = first_look(header.server, (header.backup_id,), signed=signed)
    return document(
        "logical",
        **_shared(header, body, destinations, configs, signed=signed),
        tool=f"{facts.tool.name} {facts.tool.version}",
        tables=len(dump.dumped),
        missing=header.tables_missing,
        later=sum(1 for table in dump.dumped if table.position is not None),
        client=client,
        set=header.table_set or "all of the policy",
        script={
            "settings": shell("logical", "settings", client=client, trusted=trusted),
            "unpack": shell("logical", "unpack", backup=header.backup_id, unpack=layout.UNPACK),
            **{name: shell("logical", name) for name in ("choose", "load", "rest")},
        },
    )
