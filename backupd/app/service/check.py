"""`backupd check`: the preflight of each server, what its policy asks for that is not done, and how the programs that
work on backups run here.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from backupd.app.alerting import sender
from backupd.app.backup_records import STRANGE_HINT
from backupd.app.binlogs.status import acknowledged
from backupd.app.binlogs.stream_report import SILENT, STOPPED
from backupd.app.context import api_address, destination_identity, file_rights, keys, trust
from backupd.app.context import settings_problems as transport
from backupd.app.context.members import (
    members_away,
    members_compared,
    none_left,
    refuse_left_history,
    rules_of,
    sure_candidates,
)
from backupd.app.context.server_identity import accept_hint, finding_of, meet
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring, absent_hint, is_bare, stored_already
from backupd.app.copies import missing_copies as replicating
from backupd.app.jobs import admission as queuewatch
from backupd.app.retention import holds
from backupd.app.verify import consistency
from backupd.app.views.capacity import room
from backupd.backup.acknowledgement_checks import ACKNOWLEDGEMENT
from backupd.backup.cluster_checks import NodeLook, examine_cluster, look_at_node
from backupd.backup.finding import Finding, Severity, error, fine, from_error, warning
from backupd.backup.preflight import PreflightSpec, preflight
from backupd.backup.server_checks import BINLOG, Streaming
from backupd.binlog.acknowledgement import OFF
from backupd.catalog.session import catalog_name, is_there
from backupd.engine.server.accounts import read_grants
from backupd.engine.server.backup_files import SETTING
from backupd.engine.server.probe import examine
from backupd.engine.server.sandbox import MAKE_WORKER, WORKER, Way, obstacle, ways, worker
from backupd.engine.server.service_account import account_for_restores, grant_for_restores, lacks_for_restores
from backupd.engine.sql.client import Connection
from backupd.model.backup_record import BackupKind
from backupd.model.errors import BackupdError, RefusedError, ServerError
from backupd.model.text import format_time
from backupd.recovery.chains import strangers
from backupd.recovery.members import choose
from policies.lint import advice, crowds, distances, not_yet_active, streams
from policies.policy import Policy
from storage.destination import Destination

_SEVERITIES = ("error", "warning", "ok")
_MOST_ASKED = 20
"""Servers that are asked whether they are nodes of the same cluster."""
_NO_STREAM = "check that the service runs (backupd serve) and that the server is not paused (backupd hold)"


def check(wiring: Wiring, server_name: str | None, some: Sequence[str] | None = None) -> list[Finding]:
    """Everything that would make a backup fail or be worthless, of one server, of ``some``, or of all, the worst first.

    With several servers each subject begins with the server's name.
    """
    names = [server_name] if server_name is not None else sorted(wiring.settings.servers if some is None else some)
    found: list[Finding] = [
        warning("policy", f"{problem} (no server follows it)") for problem in wiring.settings.unused()
    ]
    for name in names:
        server = wiring.settings.server(name)
        if server.usable:
            findings = (_check_group if server.is_group else _check_server)(wiring, server)
        else:
            hint = f"nothing that needs policy {server.policy_name} works for {name}; other servers are not affected"
            findings = [error("policy", str(problem), hint) for problem in server.problems]
        several = len(names) > 1
        found += [
            replace(one, subject=f"{name}: {one.subject}" if several else one.subject, server=name) for one in findings
        ]
    found += _clusters(wiring, names)
    found += _catalog(wiring)
    found += file_rights.findings(wiring.settings)
    found += keys.findings(wiring)
    found += trust.findings(wiring.settings)
    found += confinement_findings(wiring.settings)
    found += holds.findings(wiring, names)
    found += destination_identity.findings(wiring)
    found += queuewatch.findings(wiring)
    found += sender.findings(wiring)
    found += api_address.findings(wiring.settings, wiring.clock())
    configuration = wiring.settings.configuration
    usable = [server for server in map(wiring.settings.server, names) if server.usable]
    for name in sorted({destination for server in usable for destination in server.required}):
        found += room(wiring, name)
    found += [warning("policy", text) for text in crowds(configuration, wiring.settings.policies)]
    return sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity))


def _check_group(wiring: Wiring, server: ServerSettings) -> list[Finding]:
    """Every member, and all else through the one that a backup would be taken from now."""
    physical = server.policy.physical is not None
    try:
        refuse_left_history(wiring.catalog, server)
    except RefusedError as refused:
        return [from_error("member", refused)]
    asked = sure_candidates(server, members_away(wiring, server), members_compared(wiring, server))
    found = choose(asked, rules_of(server, here=physical))
    findings = [
        (warning if one.left else fine)(
            "member", f"{one.name} {'is left' if one.left else 'can be taken'}: {one.reason}"
        )
        for one in found
    ]
    taken = next((one.name for one in found if not one.left), None)
    if taken is None:
        return [from_error("member", none_left(server, found)), *findings]
    findings += [
        replace(one, subject=f"{name}: {one.subject}")
        for name in server.ways
        for one in _transport(server.through(name))
    ]
    return [*findings, *_check_server(wiring, server.through(taken))]


def _transport(server: ServerSettings) -> list[Finding]:
    try:
        return transport.findings(server.connection())
    except BackupdError as error:
        return [from_error("server", error)]


def _check_server(wiring: Wiring, server: ServerSettings) -> list[Finding]:
    found = [warning("policy", text) for text in advice(server.policy, wiring.settings.configuration)]
    found += [warning("policy", text) for text in not_yet_active(server.policy)]
    destinations: list[Destination] = []
    for name in server.required:
        try:
            destinations.append(wiring.destination(name))
        except BackupdError as error:
            found.append(from_error(f"destination {name}", error))
    try:
        connection = server.connection()
    except BackupdError as error:
        return [from_error("server", error), *found]
    settings = wiring.settings
    recent = wiring.catalog.backups.list(server.name, kind=BackupKind.PHYSICAL_FULL, limit=3)
    spec = PreflightSpec(
        server=server.name,
        connection=connection,
        destinations=tuple(destinations),
        gnupg_home=settings.encryption.gnupg_home,
        recipients=settings.encryption.recipients,
        spool=settings.spool,
        new_destinations=frozenset(d.name for d in destinations if not wiring.holds_backups(d.name)),
        restore_gnupg_home=settings.restore.gnupg_home if settings.restore else None,
        key_files=settings.restore.key_files if settings.restore else None,
        secret_files=_secret_files(server),
        programs=settings.programs,
        streaming=_streaming(server.policy),
        expected_new_bytes=max((record.stats.bytes_new for record in recent), default=None),
        physical=server.policy.physical is not None,
        logical=server.policy.logical,
    )
    looked = preflight(spec, now=wiring.clock())
    away = any(one.subject == "server" and one.severity is Severity.ERROR for one in looked)
    return (
        looked
        + ([] if away else list(_restores_into(server)))
        + ([] if server.member else transport.findings(connection))
        + stream_findings(wiring, server)
        + found
        + replicating.findings(wiring, server)
        + list(consistency.findings(wiring, server))
        + _identity(wiring, server, connection)
        + _foreign(wiring, server.name)
    )


def _restores_into(server: ServerSettings) -> Iterator[Finding]:
    """May tables be restored into it? Only its own account for that has to; one that it has not got is said."""
    subject, configured = "table restores", server.config.restore_defaults_file
    try:
        with server.restore_connection().connect() as session:
            grants = read_grants(session)
    except BackupdError as error:
        if configured is not None:
            yield from_error(subject, error)
        return
    lacks = lacks_for_restores(grants)
    if not lacks:
        yield fine(subject, f"{grants.account} may restore tables into {server.name}, by its grants")
    elif configured is not None:
        yield warning(
            subject,
            f"{grants.account}, the account of {configured}, may not restore tables into {server.name}: it lacks "
            f"{', '.join(lacks)}",
            grant_for_restores(grants.account),
        )
    else:
        yield fine(
            subject,
            f"--into {server.name} needs an account that may write, named by servers.{server.name}."
            f"restore_defaults_file. To make one: {account_for_restores()}",
        )


def _identity(wiring: Wiring, server: ServerSettings, connection: Connection) -> list[Finding]:
    """Is the server that answers the one whose backups there are? One that does not answer is reported elsewhere."""
    try:
        with connection.connect() as session:
            info = examine(session, tolerant=True).info
            met = meet(wiring, server.name, session, info, adopt=False, member=server.member)
            return finding_of(met, server.name)
    except ServerError:
        return []
    except RefusedError as refused:
        return [error("identity", f"{refused.message}: {refused.detail}", refused.hint)]


def _clusters(wiring: Wiring, names: Sequence[str]) -> Iterator[Finding]:
    """Of each Galera cluster that one of ``names`` is a node of. Others report a server that does not answer."""
    asked = [name for name in names if (node := _node(wiring, name)) is not None]
    if not asked:
        return
    known = wiring.catalog.nodes.servers() if not is_bare(wiring.catalog) else ()
    candidates = dict.fromkeys([*asked, *known, *wiring.settings.servers])
    nodes: dict[str, list[NodeLook]] = {}
    for name in list(candidates)[:_MOST_ASKED]:
        if (node := _node(wiring, name)) is not None:
            nodes.setdefault(node.state.position.uuid, []).append(node)
    for found in nodes.values():
        if any(node.server in asked for node in found):
            yield from examine_cluster(sorted(found, key=lambda node: node.server))


def _node(wiring: Wiring, name: str) -> NodeLook | None:
    if name not in wiring.settings.servers:
        return None
    server = wiring.settings.server(name)
    physical = server.usable and server.policy.physical is not None
    hooks = server.policy.hooks is not None if physical else None
    try:
        with server.connection().connect() as session:
            return look_at_node(session, name, hooks)
    except BackupdError:
        return None


def _catalog(wiring: Wiring) -> list[Finding]:
    """Is there one, and is it the one that belongs to what is stored?"""
    settings = wiring.settings
    there, name = is_there(settings.catalog), catalog_name(settings.catalog)
    if there and not is_bare(wiring.catalog):
        return []
    if (found := stored_already(settings)) is not None:
        return [
            error(
                "catalog",
                f"destination {found[0]} holds {found[1]} backups of {found[2]}, and the catalog {name} knows none",
                absent_hint(settings),
            )
        ]
    if there:
        return []
    return [fine("catalog", f"there is no catalog at {name} yet: the first backup or the service makes it")]


def _foreign(wiring: Wiring, server: str) -> list[Finding]:
    """Backups of another server under the same name."""
    return [
        warning(
            "backups",
            f"{one.words(server)}, and all of those are older: check whether the server was replaced",
            "no rule deletes them; to delete one: backupd backups delete ID",
        )
        if one.former
        else warning(
            "backups",
            f"{one.words(server)}: they are kept separate",
            f"{accept_hint(server)}; else `backupd backups delete ID` removes them",
        )
        if one.apart
        else error("backups", one.words(server), STRANGE_HINT)
        for one in strangers(wiring.catalog.backups.list(server, foreign=True))
    ]


def stream_findings(wiring: Wiring, server: ServerSettings) -> list[Finding]:
    """Is the binary log that the policy asks for streamed now?"""
    if not streams(server.policy):
        return []
    found = wiring.catalog.binlogs.stream_state(server.name)
    if found is None:
        return [warning(BINLOG, f"the binary log of {server.name} has never been streamed", _NO_STREAM)]
    row, at = found
    if row["state"] == STOPPED or wiring.clock() - at > SILENT:
        return [
            warning(
                BINLOG, f"the binary log of {server.name} has not been streamed since {format_time(at)}", _NO_STREAM
            )
        ]
    troubles = [
        str(row["error"]),
        str(row["trouble"]),
        *(f"{name}: {one['error']}" for name, one in sorted(row["destinations"].items()) if one["error"]),
    ]
    found_troubles = [
        warning(
            BINLOG,
            f"the stream of {server.name} is {row['state']}: {text}",
            "backupd retries continuously, and continues where it stopped",
        )
        for text in troubles
        if text
    ]
    said = acknowledged(found, wiring.clock())
    if said is None:
        return found_troubles
    words = said.words(server.name)
    if said.holds:
        return [*found_troubles, fine(ACKNOWLEDGEMENT, f"{words} (by the server's counters; not probed)")]
    return [*found_troubles, warning(ACKNOWLEDGEMENT, words)]


def _streaming(policy: Policy) -> Streaming | None:
    if not streams(policy):
        return None
    return Streaming(
        distances(policy.physical.full)[1] if policy.physical is not None else None,
        acknowledges=policy.binlog is not None and policy.binlog.acknowledge != OFF,
    )


def _secret_files(server: ServerSettings) -> tuple[Path, ...]:
    named = (server.config.defaults_file, server.config.password_file)
    return tuple(path for path in named if path is not None)


# -- the programs that work on backups

_GUIDE = 'docs/installing.md, "What works where"'
_SWITCHES = (
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "an AppArmor profile with `userns,` for bwrap"),
)
"""What forbids user namespaces, where it has this value, and what to do."""


def confinement_findings(settings: Settings, *, kernel: Path = Path("/proc/sys")) -> Iterator[Finding]:
    """As whom programs that work on backups run here, how they are confined, with which key files. ``kernel``: the
    folder of its settings."""
    try:
        user = worker()
    except RefusedError as problem:
        yield from_error("sandbox", problem)
        return
    name = user or getpass.getuser()
    if user is None:
        yield fine("sandbox", f"programs that work on backups run as {name}, as backupd itself")
    elif user == WORKER:
        yield fine("sandbox", f"programs that work on backups run as {name}, not as root")
    else:
        yield warning(
            "sandbox",
            f"there is no user {WORKER}: programs that work on backups run as {name}, and a "
            "running server of that user could read and change what they work on",
            MAKE_WORKER,
        )
    yield _confinement(name, ways(user), obstacle(Way.USER, user), kernel)
    yield from _key_files(settings)


def _confinement(name: str, found: tuple[Way, ...], why: str, kernel: Path) -> Finding:
    if Way.USER in found:
        return fine(
            "confinement",
            "a user namespace confines programs that work on backups: no capabilities, no network, their own folders "
            f"only, as {name}",
        )
    if found:
        return fine(
            "confinement",
            "programs that work on backups are confined by root, which drops every capability before they start (no "
            f"user namespaces for {name}: {why})",
        )
    switched = [remedy for path, value, remedy in _SWITCHES if _reads(kernel / path) == value]
    hint = next(iter(switched), "allow user namespaces in this container or service")
    if "bwrap" in why and "missing" in why:
        hint = "apt-get install bubblewrap"
    return warning(
        "confinement",
        f"programs that work on backups are not sandboxed: they run as {name} and reach what "
        f"that user reaches, the network included, and each other ({why})",
        f"{hint}; {_GUIDE}",
    )


def _reads(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _key_files(settings: Settings) -> Iterator[Finding]:
    for path in settings.restore.key_files if settings.restore else ():
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as problem:
            yield error(
                "key files",
                f"{path} cannot be read: {problem.strerror}: restores and proofs of encrypted tables fail",
                f"put it there, or correct {SETTING}",
            )
        else:
            yield fine("key files", f"{path} can be read: key plugins of prepared copies get a copy of it")
