"""Examples of answers for the reference, made of the shapes: a value for each key, the same one wherever it occurs.

Requests, and what problems say, have examples beside their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_REFERENCE = "#/components/schemas/"
_BACKUP, _BRANCH, _GTID = "20261121T020000Z-7f3a9c01", "20261101T000000Z-11223344", "0-1-1099"
_KEY = "6D2A9C1E4B7F00112233445566778899AABBCCDD"
_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

_KNOWN: Mapping[str, Any] = {
    "action": "backup-deleted",
    "actor": "anna",
    "address": "192.0.2.7",
    "backup": _BACKUP,
    "backups": 7,
    "base": _BACKUP,
    "branch": _BRANCH,
    "by": "anna",
    "bytes": 734003200,
    "bytes_free": 500000000000,
    "bytes_new": 52428800,
    "bytes_source": 2147483648,
    "bytes_stored": 734003200,
    "bytes_total": 1000000000000,
    "chain": [_BACKUP],
    "channel": "email",
    "class": "DEEP_ARCHIVE",
    "codec": "zstd",
    "configured": True,
    "count": 1,
    "created_by": "anna",
    "currency": "USD",
    "datadir": "/srv/restored",
    "days": 7,
    "destination": "local",
    "digest": _DIGEST,
    "end": 92110,
    "file": "mysql-bin.000042",
    "files": 412,
    "files_linked": 377,
    "fingerprint": _KEY,
    "finished_at": "2026-11-21T02:07:12Z",
    "flavour": "mariadb",
    "from": "2026-11-14T02:07:12Z",
    "forecast": "full in about 200 days",
    "gtid": _GTID,
    "held": None,
    "id": _BACKUP,
    "incident": "20261121T020712Z-c0ffee01",
    "initialised": True,
    "keep": True,
    "kept": True,
    "latest": "2026-11-21T09:41:03Z",
    "leg": "physical.full",
    "line": 2,
    "log": "2026-11-21T02:00:01Z job-started ...\n",
    "made_by": "anna",
    "method": "applier",
    "name": "shop-db1",
    "needed": None,
    "number": 4711,
    "objective": 7200.0,
    "objects": 431,
    "of": _BACKUP,
    "older": None,
    "only_this_key": 42,
    "paused": None,
    "phase": "copy",
    "pinned": True,
    "policy": "gold",
    "pos": 4711,
    "precise": True,
    "predicted_rto": 340.0,
    "present": True,
    "prices_of": "2026-11-01",
    "protected": True,
    "queued_at": "2026-11-21T02:00:00Z",
    "reachable": True,
    "ready": True,
    "recipients": ["dba@example.com"],
    "released": True,
    "requested_by": "anna",
    "restore_before": f"before-gtid:{_GTID}",
    "role": "admin",
    "rows": 4112,
    "rpo": 60.0,
    "rpo_kept": True,
    "rpo_objective_seconds": 60.0,
    "rpo_seconds": 7.0,
    "rto_kept": True,
    "rto_objective_seconds": 7200.0,
    "rto_seconds": 340.0,
    "rules": ["keep_fulls"],
    "runbook": "# Restoring shop-db1 by hand\n",
    "runbook_sha256": _DIGEST,
    "schema": "shop",
    "seconds": 61.2,
    "seconds_left": 12.5,
    "segments": 3,
    "server": "shop-db1",
    "server_id": 1,
    "servers": 1,
    "server_version": "10.11.19",
    "severity": "error",
    "spool_bytes": 4096,
    "spool_limit": 10737418240,
    "started_at": "2026-11-21T02:00:00Z",
    "subject": "physical.full",
    "table": "orders",
    "tables_compared": 37,
    "target": "2026-11-21T09:41:03.250000Z",
    "thaw": None,
    "tier": "bulk",
    "token": "20261121T120000Z-0badcafe",
    "tool_version": "10.11.19",
    "transactions": 81,
    "undeleted": [_BACKUP],
    "user_ids": ["Operations <ops@example.com>"],
    "uuid": "8nG7mZ2r5yHkq0xWcVvP1sTzJ4E=",
    # what a key means in one shape only
    "Alive.status": "ok",
    "AuditEntry.outcome": "done",
    "BackupDetail.recipients": [_KEY],
    "BackupState": "complete",
    "Behind.backups": 0,
    "Behind.bytes": 0,
    "Branch.reason": "first",
    "Check.detail": "37 tables are equal to the source's",
    "Check.name": "checksums",
    "Copy.state": "complete",
    "Decisions.keep": 1,
    "Destination.name": "local",
    "Destination.reasons": [],
    "Destination.type": "filesystem",
    "Event.kind": "job-failed",
    "Event.message": "mariadb-backup ended with 1",
    "FileProblem.field": "physical.ful",
    "FileProblem.file": "gold.yaml",
    "FileProblem.message": "is not known here",
    "Gap.destination": "",
    "Gap.reason": "the server had purged it",
    "Held.reason": "audit until March",
    "Hold.reason": "audit until March",
    "Incident.kind": "job-failed",
    "Incident.message": "mariadb-backup ended with 1",
    "Job.finished_at": None,
    "JobState": "running",
    "KeptRequest.sql": "",
    "KeptRequest.triggers": "backup",
    "Key.name": "ops@example.com",
    "LastProof.outcome": "proved",
    "LogDecision.name": "mysql-bin.000001 .. mysql-bin.000042",
    "LogDecision.reasons": ["a kept backup can be rolled forward with it"],
    "Member.log_server": "8nG7mZ2r5yHkq0xWcVvP1sTzJ4E=",
    "Member.reason": "a replica, 0 ms behind",
    "NewToken.name": "grafana",
    "NewToken.role": "viewer",
    "NewToken.token": "bkd_...",
    "Paused.kind": "pause",
    "Phase.name": "fetch",
    "Plan.reason": "the newest backup before the target",
    "Plan.tables": None,
    "Policy.file": "/etc/backupd/policies/gold.yaml",
    "Policy.in_force": True,
    "Policy.name": "gold",
    "Policy.servers": ["shop-db1"],
    "Progress.bytes_total": 2147483648,
    "Reach.name": "local",
    "Released.kind": "hold",
    "Restore.finished_at": None,
    "RestorePhase.name": "fetched",
    "Server.incidents": [],
    "Server.protected": 6,
    "Server.reasons": [],
    "Server.running": [],
    "Server.windows": 1,
    "Step.name": "fetch",
    "Step.title": "fetch and unpack",
    "Stream.state": "streaming",
    "TableGoal.source": "shop.orders",
    "TableGoal.target": "shop.orders_restored",
    "Token.name": "grafana",
    "Token.role": "viewer",
    "WhoAmI.name": "grafana",
    "WhoAmI.role": "viewer",
    "Window.reason_end": "the newest that is there",
}
"""By key, or by shape and key, or by the name of an enumeration."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", type(None): "null"}


def example_of(schema: Mapping[str, Any], schemas: Mapping[str, Any], shape: str = "", key: str = "") -> Any:
    """A value that fits ``schema``, of the field ``key`` of ``shape``; ``schemas``: what is referred to, by name."""
    choices = [_named(one, schemas) for one in schema.get("anyOf", (schema,))]
    types = [one.get("type") for _name, one in choices]
    name, first = choices[0]
    for known in (f"{shape}.{key}", key, name):
        if known in _KNOWN and _TYPES[type(_KNOWN[known])] in types:
            return _KNOWN[known]
    kind = types[0]
    if kind == "object":
        return {one: example_of(field, schemas, name, one) for one, field in first.get("properties", {}).items()}
    if kind == "array":
        _name, item = _named(first["items"], schemas)
        if item.get("type") == "object":
            return [example_of(first["items"], schemas)]
        return None if "null" in types else []
    alternatives = re.match(r"\^\((\w+)\|", first.get("pattern", ""))
    word, least = alternatives[1] if alternatives else "", int(first.get("minimum", 0))
    plain = {"string": word, "integer": least, "number": float(least), "boolean": False}[str(kind)]
    found = [*first.get("examples", ()), *first.get("enum", ()), plain]
    return None if "null" in types else found[0]


def _named(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A schema itself, and its name where it is referred to by one."""
    name = schema.get("$ref", "").removeprefix(_REFERENCE)
    return name, schemas[name] if name else schema
