"""Everything that forbids a restore, asked before the first byte moves."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.physical.capture import PhysicalTool
from backupd.engine.physical.external_tablespaces import LINK_SUFFIX
from backupd.engine.toolset import NO_PATHS, physical_tool, server_program
from backupd.model.errors import RefusedError, ToolError, ToolMissingError
from backupd.model.manifest import BodyFacts
from backupd.model.server_facts import ServerInfo, Tool
from backupd.model.text import format_size
from restore.datadir.occupancy import refuse_non_empty
from restore.datadir.resources import Need, measure, refuse_too_small
from restore.datadir.staging import Site
from restore.fetch.sources import Loaded, check_collisions

_REDO = ("ib_logfile*", "xtrabackup_logfile")


@dataclass(frozen=True, slots=True)
class Programs:
    """What this host has for the backup's server. ``server`` is None when nothing has to be started and no server
    program is installed."""

    tool: PhysicalTool
    server: Tool | None


def find_programs(facts: BodyFacts, *, start: bool, paths: Mapping[str, str] = NO_PATHS) -> Programs:
    """The kind of tool that made the backup, and the server program, of the backup's own series.

    Raises ToolMissingError, and RefusedError where a program of another series is installed: it would not
    understand the files, or silently upgrade them.
    """
    info = facts.server
    try:
        tool = physical_tool(info, paths=paths, made_by=facts.tool)
        try:
            server = server_program(info.flavour, info.version, paths=paths)
        except ToolMissingError:
            if start:
                raise
            server = None
    except ToolMissingError:
        raise
    except ToolError as error:
        raise RefusedError(error.message, detail=error.detail, hint=error.hint) from error
    return Programs(tool, server)


def need_of(chain: Sequence[Loaded]) -> Need:
    """The room that restoring ``chain`` takes."""
    info = chain[-1].body.facts.server
    redo_applied = sum(
        entry.size
        for loaded in chain
        for entry in loaded.body.entries
        if any(fnmatch.fnmatchcase(entry.path, pattern) for pattern in _REDO)
    )
    stored = [{item.name: item for item in loaded.header.objects} for loaded in chain]
    return measure(
        [(loaded.body.entries, objects) for loaded, objects in zip(chain, stored, strict=True)],
        redo_applied=redo_applied,
        redo_log=_redo_log(info.variables),
    )


def _redo_log(variables: Mapping[str, str]) -> int:
    """Bytes of redo log that a server with these settings makes at its first start."""

    def number(name: str, default: int) -> int:
        text = variables.get(name, "")
        return int(text) if text.isdigit() else default

    if "innodb_redo_log_capacity" in variables:
        return number("innodb_redo_log_capacity", 0)
    return number("innodb_log_file_size", 96 * 1024 * 1024) * number("innodb_log_files_in_group", 1)


def refuse_no_room(chain: Sequence[Loaded], site: Site) -> tuple[str, ...]:
    """Raises RefusedError for too little room or names that collide there; gives warnings.

    What an earlier attempt has fetched already is not needed again.
    """
    folder = next(f for f in (site.folder, *site.folder.parents) if f.exists())
    for loaded in chain:
        check_collisions(loaded.body.entries, folder)
    warnings = refuse_too_small(need_of(chain), folder, there=present(site.folder))
    outside = _outside_bytes(chain)
    if outside and not site.store.is_dir():
        refuse_non_empty(site.final_store)
    room = os.statvfs(site.datadir.parent) if site.inside else None
    if room is not None and room.f_bavail * room.f_frsize < outside:
        raise RefusedError(
            f"too little room beside {site.datadir}: {outside:,} bytes of tablespaces with a DATA DIRECTORY go to "
            f"{site.final_store}",
            hint="free some space there: a server allows no DATA DIRECTORY inside its data directory",
        )
    return warnings


def _outside_bytes(chain: Sequence[Loaded]) -> int:
    """Most bytes of the tablespaces that lay outside the source's data directory: those with a link file."""
    whole: dict[str, int] = {}
    changed = 0
    for loaded in chain:
        sizes = {entry.path: entry.size for entry in loaded.body.entries}
        for link in (path.removesuffix(LINK_SUFFIX) for path in sizes if path.endswith(LINK_SUFFIX)):
            size = sizes.get(f"{link}.ibd", 0) + sizes.get(f"{link}.new", 0)
            whole[link] = max(whole.get(link, 0), size)
            changed += sizes.get(f"{link}.ibd.delta", 0)
    return sum(whole.values()) + changed


def refuse_over_limit(chain: Sequence[Loaded], limit: int) -> None:
    """Raises RefusedError when a throw-away copy would take more than ``limit`` bytes."""
    need = need_of(chain)
    if need.least_bytes > limit:
        raise RefusedError(
            f"a test restore of this backup needs {format_size(need.bytes)}; allowed are {format_size(limit)}",
            detail=need.describe(),
            hint="raise restore.scratch.max_bytes in the configuration",
        )


def present(folder: Path) -> tuple[int, int]:
    """Bytes and inodes that the files below ``folder`` take."""
    size = files = 0
    for root, _folders, names in os.walk(folder):
        for name in names:
            size += Path(root, name).lstat().st_blocks * 512
            files += 1
    return size, files


def remarks(info: ServerInfo) -> tuple[str, ...]:
    """What an operator should know about a server before it is restored."""
    found: list[str] = []
    if info.encrypted:
        found.append(
            f"{len(info.encrypted)} encrypted tablespaces: without the source's key management plugin and its "
            "keys on this host neither prepare nor the server can open them"
        )
    if info.external:
        inside = sorted({path.kind for path in info.external if path.kind != "tablespace"})
        beside = sum(path.kind == "tablespace" for path in info.external)
        places = [f"{beside} tablespaces go to <datadir>.external beside the new one"] if beside else []
        if inside:
            places.append(f"what is {', '.join(inside)} goes inside the new one")
        found.append(f"{len(info.external)} paths of the source lay outside its data directory: " + "; ".join(places))
    return tuple(found)
