"""Preflight of the binary log: what keeps it from being streamed, and what makes a replay of it silently incomplete."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from backupd.backup.finding import Finding, error, fine, from_error, warning
from backupd.engine.log_client import BinlogTool, HoldsBackError, binlog_tool, connection_id, tried
from backupd.engine.server.binary_logs import BinlogSource
from backupd.engine.server.probe import kept_for, read_dialect, unlogged
from backupd.engine.sql.client import Session
from backupd.engine.toolset import NO_PATHS
from backupd.model.errors import ServerError, ToolError
from backupd.model.server_facts import ServerInfo
from backupd.model.text import format_duration

SUBJECT = "binlog"
TRANSACTIONAL = frozenset({"InnoDB", "ROCKSDB"})
_NO_ROWS = frozenset({"MRG_MYISAM", "MRG_MyISAM", "BLACKHOLE", "SEQUENCE", "PERFORMANCE_SCHEMA"})
SHORTEST = timedelta(hours=6)
"""A server that keeps its log for less leaves nobody the time to mend a stream that failed in the night."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """What the policy asks of the binary log. ``fulls``: the longest time between two full backups, None without."""

    fulls: timedelta | None = None


def examine_binary_log(
    session: Session,
    info: ServerInfo,
    streaming: Streaming,
    *,
    programs: Mapping[str, str] = NO_PATHS,
    spool: Path | None = None,
) -> Iterator[Finding]:
    """For a server whose binary log is streamed. ``programs``: paths of tools that are not searched; ``spool``: where
    the one that copies is tried, None: it is not."""
    if not info.log_bin:
        yield error(
            SUBJECT,
            "the policy streams the binary log, and this server writes none (log_bin is off)",
            "set log_bin (and server_id) in the server's option file and restart it, or take binlog: out of the policy",
        )
        return
    try:
        yield _copies(session, binlog_tool(info.flavour, paths=programs), spool)
    except (ServerError, ToolError) as problem:
        yield from_error(SUBJECT, problem)
    problems = [*_expiry(info.variables, streaming.fulls), *_engines(info.engines)]
    try:
        problems += [
            warning(SUBJECT, sentence, "let whoever does that write to the log again, or take a backup after it")
            for sentence in unlogged(session, read_dialect(session))
        ]
    except ServerError as problem:
        problems.append(from_error(SUBJECT, problem))
    yield from problems


def _copies(session: Session, program: BinlogTool, spool: Path | None) -> Finding:
    """Raises ServerError, ToolError; HoldsBackError where it keeps what the server has sent."""
    tool = program.tool
    named = f"{tool.name} {tool.version} at {tool.path}"
    if spool is None:
        return fine(SUBJECT, f"{named} copies the binary log (not probed)")
    position = BinlogSource(session.connection).look(files=False).position
    try:
        trial = tried(program, session.connection, position, spool, connection_id("check", secrets.token_hex(8)))
    except OSError as problem:
        return warning(SUBJECT, f"{named}: not probed, since {spool} cannot be written ({problem.strerror})")
    if trial.holds:
        raise HoldsBackError(tool)
    if trial.holds is None:
        return warning(
            SUBJECT,
            f"{named} was to copy the end of the binary log, and did not: {trial.said}",
            "grant REPLICATION SLAVE ON *.* to the account, and see that the server is reached from here",
        )
    return fine(SUBJECT, f"{named} copies the binary log, and holds nothing back")


def _expiry(variables: Mapping[str, str], fulls: timedelta | None) -> Iterator[Finding]:
    kept = kept_for(variables)
    if kept is None:
        return
    hint = "raise binlog_expire_logs_seconds (expire_logs_days on old servers) there"
    if kept < SHORTEST:
        yield warning(
            SUBJECT,
            f"the server removes its binary log after {_span(kept)}: a stream that stands still for "
            "longer leaves a gap",
            hint,
        )
    elif fulls is not None and kept < fulls:
        yield warning(
            SUBJECT,
            f"the server removes its binary log after {_span(kept)}, and full backups are up to "
            f"{_span(fulls)} apart: what is lost from the archive in between cannot be fetched "
            "again, and the gap stays until the next full backup",
            hint,
        )


def _engines(engines: Mapping[str, int]) -> Iterator[Finding]:
    others = {engine: count for engine, count in engines.items() if engine not in TRANSACTIONAL | _NO_ROWS}
    if others:
        shown = ", ".join(f"{count} of {engine}" for engine, count in sorted(others.items()))
        yield warning(
            SUBJECT,
            f"tables of engines without transactions ({shown}): a statement that failed half way "
            "has changed rows there, and a replay that stops there differs from the source",
            "ALTER TABLE ... ENGINE=InnoDB where the application allows",
        )


def _span(span: timedelta) -> str:
    return format_duration(span.total_seconds())
