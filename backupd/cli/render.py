"""How the values of the application look to people, at 80 columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any

from backupd.cli.output import Screen, beside
from backupd.model.backup_record import ERRANT, INCONSISTENT, BackupKind, BackupRecord, BackupState
from backupd.model.proof import Proof
from backupd.model.text import few, format_duration, format_size, format_time

if TYPE_CHECKING:
    from backupd.backup.finding import Finding
    from backupd.model.consistency import ServerConsistency
    from backupd.model.thaw import ThawPlan
    from restore.planning.plan import Plan, Step

_NAMED = 20
_NAMED_SERVERS = 5
_SETTING = re.compile(r"([a-z]+(?:_[a-z]+)+) is ")
"""How a warning of a server's setting begins."""
_FLAGS = {INCONSISTENT: "+differs", ERRANT: "+errant"}
_UNREAD, _ORPHAN, _UNSIGNED = "manifest-intact", "no-orphan-object", "it has no signature"
"""Words of the JSON documents of fsck and of a verification."""
_MARKS = {"error": ("FAIL", "bold red"), "warning": ("warn", "yellow"), "ok": ("ok", "green")}


def backup_row(record: BackupRecord) -> tuple[str, ...]:
    """Of the list. The id starts with the time (UTC) of the backup."""
    return (
        record.id,
        record.server,
        _kind_text(record),
        _state_text(record),
        format_size(record.stats.bytes_source),
        format_size(record.stats.bytes_new),
        _copies_text(record),
    )


def _copies_text(record: BackupRecord) -> str:
    """``local,offsite*``: ``*`` is a copy that was read again, ``!`` one that is damaged or deleted. A backup with as
    many verified copies as its policy wants is ``+protected``."""
    marks = ("!" if copy.state != "complete" else "*" if copy.verified_at is not None else "" for copy in record.copies)
    copies = ",".join(copy.destination + mark for copy, mark in zip(record.copies, marks, strict=True))
    return copies + (" +protected" if record.protected else "")


def _kind_text(record: BackupRecord) -> str:
    """``full``, ``incr``, ``logical``, ``logical/money`` of a set."""
    kind = record.kind.word.removesuffix("emental")
    return f"{kind}/{record.table_set}" if record.table_set else kind


def _state_text(record: BackupRecord) -> str:
    """``complete``, ``damaged``, ``2 missing`` of a complete one without two of its tables; ``+kept``, ``+apart``,
    ``+foreign``; ``+differs`` and ``+errant`` of a replica that was not as its source."""
    lacking = max(record.tables_missing, record.not_dumped)
    state = f"{lacking} missing" if lacking and record.state is BackupState.COMPLETE else str(record.state)
    if record.doubtful and record.state is BackupState.COMPLETE:
        state = "doubtful"
    return (
        state
        + (" +kept" if record.pinned else "")
        + (" +apart" if record.apart else "")
        + (" +foreign" if record.foreign else "")
        + "".join(f" {_FLAGS.get(flag, f'+{flag}')}" for flag in record.flags)
    )


def _missing_text(record: BackupRecord) -> str:
    if record.missing:
        return f"PARTIAL: {len(record.missing)} tables are not in it: {few(record.missing, _NAMED)}"
    if not record.tables_missing:
        return ""
    why = "could not be dumped" if record.kind is BackupKind.LOGICAL else "are not in it: its warnings name them"
    return f"{record.tables_missing} tables {why}"


def _cluster_text(record: BackupRecord) -> str:
    """Where it is in the history of its Galera cluster, and what it did to the node."""
    if record.node is None:
        return ""
    node, load = record.node, record.node.load
    words = str(node.position) if node.position is not None else f"{node.uuid}, seqno unknown until a test restore"
    if load is not None:
        words += (
            f"; {node.node} was desynced for {format_duration(load.desynced_seconds)}, at most {load.recv_queue} write "
            f"sets waited, flow control {format_duration(load.flow_control_seconds)}"
        )
    return words


def show_backup(screen: Screen, record: BackupRecord) -> None:
    """What a finished backup was, and what to watch in it."""
    stats = record.stats
    linked = f"{stats.files_linked} of {stats.files} files unchanged" if stats.files else ""
    screen.facts(
        (
            ("backup", record.id),
            ("server", f"{record.server} ({record.flavour} {record.server_version})"),
            ("kind", str(record.kind)),
            ("set", record.table_set),
            ("builds on", record.parent or ""),
            ("because", record.reason),
            ("member", f"{record.member.name}: {record.member.reason}" if record.member else ""),
            ("state", str(record.state)),
            ("missing", _missing_text(record)),
            ("doubtful", record.doubtful),
            ("flags", ", ".join(record.flags)),
            ("took", format_duration((record.finished_at - record.started_at).total_seconds())),
            (
                "data",
                (
                    f"{format_size(stats.bytes_source)}; stored {format_size(stats.bytes_stored)}, "
                    f"of it new {format_size(stats.bytes_new)}"
                ),
            ),
            ("reused", linked),
            ("position", position_text(record.position.file, record.position.pos, record.position.gtid)),
            ("cluster", _cluster_text(record)),
            ("copies", ", ".join(f"{copy.destination} ({copy.state})" for copy in record.copies)),
            ("protected", "yes: enough verified copies at enough places" if record.protected else ""),
            ("kept", "yes: it is not deleted by any rule" if record.pinned else ""),
        )
    )
    for warning in record.warnings:
        screen.warn(warning)


def show_findings(screen: Screen, findings: Sequence[Finding]) -> None:
    """Problems first, errors before warnings, each with its hint, and once where several servers have the same; then
    what is well: of one server each finding, of several one line for each server."""
    servers = list(dict.fromkeys(one.server for one in findings if one.server))
    problems: dict[tuple[str, str, str, str], list[str]] = {}
    for one in sorted(findings, key=lambda found: str(found.severity)):  # error, ok, warning
        if str(one.severity) != "ok":
            subject = one.subject.removeprefix(f"{one.server}: ")
            problems.setdefault((str(one.severity), subject, one.message, one.hint), []).append(one.server)
    for (severity, subject, message, hint), whose in problems.items():
        mark, style = _MARKS[severity]
        named = [server for server in whose if server] if len(servers) > 1 else []
        where = f"{named[0]}: " if len(named) == 1 else ""
        of_several = f" ({len(named)} servers: {few(named, _NAMED_SERVERS)})" if len(named) > 1 else ""
        screen.line(f"{mark:<5} {where}{subject}: {message}{of_several}", style=style)
        if hint:
            screen.line(f"      -> {hint}")
    if len(servers) <= 1:
        for one in findings:
            if str(one.severity) == "ok":
                screen.line(f"ok    {one.subject}: {one.message}", style="green")
        return
    for server in (*servers, ""):
        counts = Counter(str(one.severity) for one in findings if one.server == server)
        mark, style = _MARKS["error" if counts["error"] else "warning" if counts["warning"] else "ok"]
        words = ", ".join(
            f"{counts[severity]} {word}{'s' if counts[severity] != 1 and severity != 'ok' else ''}"
            for severity, word in (("error", "error"), ("warning", "warning"), ("ok", "ok"))
            if counts[severity]
        )
        if words:
            screen.line(f"{mark:<5} {server or 'all servers together'}: {words}", style=style)


def show_plan(screen: Screen, plan: Plan, zone: tzinfo | None = None, as_of: datetime | None = None) -> None:
    """``zone``: in which its moments are shown beside UTC; ``as_of``: when its backup ended, where that is the
    target."""
    screen.facts(
        (
            ("target", beside(plan.target, zone)),
            ("data as of", beside(format_time(as_of), zone) if as_of is not None else ""),
            ("backup", beside(f"{plan.backup_id}: {plan.reason}", zone)),
            ("chain", " -> ".join(plan.chain) if len(plan.chain) > 1 else ""),
            ("position", position_text(plan.position.file, plan.position.pos, plan.position.gtid)),
            ("until", beside(until_text(plan), zone)),
            ("replay", f"{plan.replay.method}: {plan.replay.reason}" if plan.replay else ""),
            ("replica", _replica_text(plan)),
            ("read from", ", ".join(plan.destinations)),
            (
                "to fetch",
                f"{format_size(plan.bytes_stored)} stored, {format_size(plan.bytes_source)} of data",
            ),
            ("estimate", format_duration(plan.seconds) + _promise_text(plan)),
        )
    )
    show_steps(screen, plan.steps, plan.thaw)
    for step in plan.steps:
        for command in step.commands:
            screen.line(f"  {step.name}$ {command}")
    show_plan_warnings(screen, plan.chain, plan.warnings)


def show_plan_warnings(screen: Screen, chain: Sequence[str], warnings: Sequence[str]) -> None:
    """What a plan has to say. Settings of the source that its backups warned of when they were taken are only named:
    they must not hide what concerns this plan."""
    settings: dict[str, list[str]] = {}
    for text in warnings:
        backup, _, said = text.partition(": ")
        if backup in chain and (found := _SETTING.match(said)):
            settings.setdefault(backup, []).append(found[1])
        else:
            screen.warn(text)
    for backup, names in settings.items():
        screen.warn(f"settings of the source: {', '.join(names)}; what they mean: backupd backups show {backup}")


def _replica_text(plan: Plan) -> str:
    replica = plan.replica
    if replica is None:
        return ""
    start = position_text(replica.position.file, replica.position.pos, replica.position.gtid)
    delay = f", {format_duration(replica.delay)} behind" if replica.delay else ""
    compared = f"compared before it is handed over: {replica.compared_by.words}"
    return f"of {replica.source}, server_id {replica.server_id}{delay}, {replica.reason}, from {start}; {compared}"


def show_steps(screen: Screen, steps: Sequence[Step], thaw: ThawPlan | None) -> None:
    """The steps of a plan; ``thaw``: what it has to wait for."""
    screen.line()
    screen.table(
        ("STEP", "WHAT", "BYTES", "TIME", "ESTIMATED FROM"),
        (
            (step.name, step.title, format_size(step.bytes), format_duration(step.seconds), step.estimate)
            for step in steps
        ),
        right=("BYTES", "TIME"),
    )
    if thaw is not None:
        screen.line()
        show_thaw(screen, thaw)
        screen.line()


def show_thaw(screen: Screen, thaw: ThawPlan) -> None:
    """What has to be thawed, and what each tier takes."""
    screen.table(
        ("CLASS", "OBJECTS", "BYTES", "THAWING"),
        (
            (
                name,
                str(len(objects)),
                format_size(sum(one.size for one in objects)),
                str(sum(one.thawing for one in objects)) if any(one.thawing for one in objects) else "",
            )
            for name, objects in thaw.classes().items()
        ),
        right=("OBJECTS", "BYTES", "THAWING"),
    )
    currency = thaw.prices.currency
    screen.table(
        ("TIER", "AT MOST", "COST", ""),
        (
            (
                offer.tier,
                f"{offer.hours:g} h",
                "" if offer.cost is None else f"{offer.cost:.2f} {currency}",
                "<- this one" if offer.tier == thaw.tier else "",
            )
            for offer in thaw.offers
        ),
        right=("AT MOST", "COST"),
    )
    screen.line(
        f"at {thaw.destinations}, readable for {thaw.days} days; prices of {thaw.prices.dated.isoformat()}, without "
        "the transfer to here"
    )


def until_text(plan: Plan) -> str:
    """Where the restored copy will stand, and what is the first that it will not hold."""
    stop = plan.until
    if stop is None:
        return ""
    at = f", last commit {stop.at:%Y-%m-%d %H:%M:%S.%f}Z" if stop.at else ""
    following = f"; first transaction not replayed: {stop.next_gtid or 'the next one'}" if stop.next_at else ""
    after = f" of {stop.next_at:%Y-%m-%d %H:%M:%S.%f}Z" if stop.next_at else ""
    return position_text(stop.file, stop.pos, stop.gtids) + f" on branch {stop.branch}{at}{following}{after}"


def _promise_text(plan: Plan) -> str:
    if plan.rto is None:
        return ""
    return f"; objectives.rto is {format_duration(plan.rto)}: {'kept' if plan.seconds <= plan.rto else 'NOT KEPT'}"


def show_restore(screen: Screen, outcome: Mapping[str, Any]) -> None:
    """A finished restore: its JSON document."""
    server = outcome["started"]
    screen.facts(
        (
            ("restore", outcome["id"]),
            ("backup", outcome["backup"]),
            ("datadir", outcome["datadir"]),
            ("old datadir", outcome.get("aside", "")),
            ("position", "{uuid}:{seqno}".format_map(outcome["node"]) if outcome.get("node") else ""),
            ("joined by", outcome["join"]["outcome"] if outcome.get("join") else ""),
            ("server", f"runs as process {server['pid']}, socket {server['socket']}" if server else ""),
            ("replica", _made_replica_text(outcome.get("replica"))),
        )
    )
    if replica := outcome.get("replica"):
        screen.line()
        screen.line("its service needs, in the group [mysqld] of its option file:")
        for name, value in replica["options"].items():
            screen.line(f"  {name} = {value}")
        if replica["events"]:
            screen.line(f"disabled events: {', '.join(replica['events'])}")
    screen.line()
    show_phases(screen, outcome["phases"])
    for check in outcome.get("checks", ()):
        style = {"passed": "green", "failed": "bold red"}.get(check["outcome"], "yellow")
        screen.line(f"{check['outcome']}: {check['name']}: {check['detail']}", style=style)
    for warning in outcome.get("warnings", ()):
        screen.line(f"note: {warning}", style="yellow")


def _made_replica_text(replica: Mapping[str, Any] | None) -> str:
    if replica is None:
        return ""
    if not replica["caught_up"]:
        return f"of {replica['source']}: set up; replication begins when its service starts"
    behind = f", {format_duration(replica['delay'])} behind on purpose" if replica["delay"] else ""
    unchecked = "; NOT (ALL) COMPARED with its source" if replica.get("not_compared") else ""
    return f"of {replica['source']}: caught up (lag {replica['lag']:.1f} s){behind}, read-only{unchecked}"


def show_phases(screen: Screen, phases: Iterable[Mapping[str, Any]]) -> None:
    """Phases as in JSON: ``name``, ``seconds``, ``bytes``."""
    screen.table(
        ("PHASE", "TIME", "BYTES"),
        (
            (
                phase["name"],
                format_duration(phase["seconds"]),
                format_size(phase["bytes"]) if phase["bytes"] else "",
            )
            for phase in phases
        ),
        right=("TIME", "BYTES"),
    )


def show_proof(screen: Screen, proof: Proof) -> None:
    verdict = {
        "proved": "proved: restored, checked and equal to the source's witness",
        "restored": "restored and checked, "
        + (
            "but not all tables of the source's witness could be compared"
            if proof.not_looked_at
            else "but not compared with a witness of the source"
        ),
        "withdrawn": f"WITHDRAWN: {proof.withdrawn}",
        "undecided": "NOT TESTED: the test restore did not complete; whether the backup can be restored is unknown",
        "inexact": "INEXACT: restored, but rows may differ from the source",
    }.get(proof.outcome, "FAILED")
    if proof.older:
        verdict = f"{verdict.partition(';')[0]}; NOT THE NEWEST DATA"
    screen.line(f"{proof.backup_id}: {verdict}", style="green" if proof.is_current else "bold red")
    for warning in proof.warnings:
        screen.line(f"warning: {warning}", style="yellow")
    if proof.error:
        screen.line(proof.error)
    screen.facts(
        (
            ("server", proof.server),
            ("target", proof.target),
            ("flags", ", ".join(proof.flags)),
            ("took", format_duration(proof.seconds)),
            ("compared", str(proof.tally)),
            ("proof", proof.id),
        )
    )
    screen.line()
    show_phases(screen, [phase.as_json() for phase in proof.phases])
    for check in proof.checks:
        mark, style = _MARKS[{"passed": "ok", "failed": "error"}.get(check.outcome, "warning")]
        screen.line(f"{mark:<5} {check.name}" + (f": {check.detail}" if check.detail else ""), style=style)


def show_consistency(screen: Screen, found: ServerConsistency) -> None:
    """What is known of each replica, then the newest check."""
    for one in found.replicas:
        style = "green" if one.verdict == "clean" else "bold red" if one.different else "yellow"
        screen.line(one.words, style=style)
        for name, how in one.different.items():
            screen.line(f"  {name} {how}")
        for name, why in one.unchecked.items():
            screen.line(f"  {name} unchecked: {why}")
    for check in [one for one in found.checks if not one.trouble][:1]:
        screen.facts(
            (
                ("last check", f"{check.id} of {check.replica} with {check.source}, by {check.tool}"),
                ("took", format_duration(check.seconds)),
                ("tables", f"{check.tables}, {check.tables_equal} of them equal"),
                ("errant", check.errant_unchecked or "none" if not check.errant else ""),
            )
        )
        for line in check.errant:
            screen.line(f"  errant: {line}", style="yellow")


def show_damages(screen: Screen, outcome: Mapping[str, Any]) -> None:
    """The JSON document of a verification."""
    aged = [damage for damage in outcome["damages"] if damage.get("aged") and damage["repaired_from"]]
    damages = [damage for damage in outcome["damages"] if damage["key"] and damage not in aged]
    unread = [damage for damage in outcome["damages"] if not damage["key"]]
    left = [damage for damage in damages if not damage["repaired_from"]]
    screen.line(
        f"{outcome['objects']} objects, {format_size(outcome['bytes'])} read, {len(damages)} damaged"
        + (f", {len(damages) - len(left)} of them repaired" if len(left) < len(damages) else "")
        + (f"; NOT READ: {', '.join(destination['destination'] for destination in unread)}" if unread else ""),
        style="bold red" if left or unread else "yellow" if damages else "green",
    )
    for one in outcome.get("lacking", ()):
        names = ", ".join(one["tables"][:_NAMED]) + (" ..." if len(one["tables"]) > _NAMED else "")
        what = "; ".join(
            filter(
                None, (f"{len(one['tables'])} tables are not in it: {names}" if one["tables"] else "", one["doubtful"])
            )
        )
        screen.line(f"PARTIAL {one['backup']} of {one['server']}: {what}", style="bold red")
    if outcome["cold"]:
        unseen = f"; {outcome['unseen']} of them have none" if outcome["unseen"] else ""
        screen.line(
            f"{outcome['cold']} archived files were compared by the checksum that the destination stores{unseen}"
        )
    for sample in outcome["samples"]:
        screen.line(sample)
    if outcome.get("unbound"):
        screen.line(
            f"{len(outcome['unbound'])} backups are unbound (format 1): nothing in them shows whether their "
            "server, kind, times or sizes were changed; new backups are bound"
        )
    for damage in aged:
        screen.line(f"rewritten (aged, not damaged): {damage['destination']}: {damage['key']}: {damage['problem']}")
    for damage in damages:
        screen.line(f"  {damage['destination']}: {damage['key']}: {damage['problem']}")
        screen.line(f"    needed by {', '.join(damage['backups']) or 'no backup'}")
        if damage["repaired_from"]:
            screen.line(f"    repaired: replaced by the copy of {damage['repaired_from']}", style="green")
        elif damage["trouble"]:
            screen.line(f"    not repaired: {damage['trouble']}")
    if any(damage["problem"].endswith(_UNSIGNED) for damage in left):
        screen.line(
            "-> unsigned documents were stored before a signing key was configured, or by an unauthorized writer. If "
            "they are yours: run `backupd catalog sign DESTINATION`, then `backupd verify` again"
        )
    if any(not damage["problem"].endswith(_UNSIGNED) for damage in left):
        screen.line("-> these backups are marked as damaged; take a full backup now, it stores the data afresh")
    for destination in unread:
        screen.line(f"  {destination['destination']}: {destination['problem']}")
        screen.line(f"    copies there: {', '.join(destination['backups'])}")
    if unread:
        screen.line("-> the state of these copies is unknown. When the destination is reachable: backupd verify")


def show_disagreements(screen: Screen, outcome: Mapping[str, Any], *, repaired: bool) -> None:
    """The JSON document of fsck; ``repaired``: whether it was asked to repair."""
    unread = {one["destination"] for one in outcome["findings"] if one["invariant"] == _UNREAD}
    kept = Counter(one["destination"] for one in outcome["findings"] if _is_kept(one, unread))
    for finding in outcome["findings"]:
        if not _is_kept(finding, unread):
            screen.line(_finding_text(finding), style="yellow" if finding["repairable"] else "bold red")
    for destination, count in sorted(kept.items()):
        screen.line(
            f"{destination}: {count} objects are not referenced by any readable manifest; backupd does not remove them"
        )
    if unread:
        screen.line(
            "-> altered or unsigned manifests: `backupd verify` repairs them from another destination; to sign those "
            "that are only unsigned: `backupd catalog sign DESTINATION`"
        )
    for finding in outcome["repaired"]:
        screen.line(f"repaired: {_finding_text(finding)}", style="green")
    if outcome["ok"]:
        screen.line("everything agrees", style="green")
    elif not repaired and any(finding["repairable"] for finding in outcome["findings"]):
        screen.line("-> to repair the repairable findings: backupd fsck --repair")


def _is_kept(finding: Mapping[str, Any], unread: Collection[str]) -> bool:
    """Is it one of the many objects whose manifest is there, and is reported itself?"""
    return (
        finding["invariant"] == _ORPHAN
        and not finding["repairable"]
        and finding["destination"] in unread
        and finding["subject"].count("/") == 0
    )


def _finding_text(finding: Mapping[str, Any]) -> str:
    return f"{finding['destination']}: {finding['invariant']}: {finding['subject']}: {finding['message']}"


def position_text(file: str, pos: int, gtid: str) -> str:
    """``binlog.000003:4711, GTID 0-1-99``; empty for a server without a binary log."""
    position = f"{file}:{pos}" if file else ""
    return ", ".join(part for part in (position, f"GTID {gtid}" if gtid else "") if part)


def show_mapping(screen: Screen, document: Mapping[str, Any]) -> None:
    """The fields of a JSON document for people: nested ones on one line, sizes and times readable."""
    screen.facts((name.replace("_", " "), _value_text(name, value)) for name, value in document.items())


def _value_text(name: str, value: Any) -> str:
    if value is None or (not value and isinstance(value, str | list | dict)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (name.startswith("bytes") or name.endswith(("bytes", "_size"))):
        return f"{format_size(value)} ({value})"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key} {_value_text(str(key), inner)}" for key, inner in value.items() if inner not in ("", None)
        )
    if isinstance(value, list | tuple):
        return "; ".join(_value_text(name, inner) for inner in value)
    return str(value)
