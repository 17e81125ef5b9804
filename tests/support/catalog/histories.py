"""Backups as values, for solving."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from backupd.app.retention.rules import Decision, Decisions, Stored, View
from backupd.model.backup_record import BackupKind
from policies.policy import Keep

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def stored(
    name: str, finished_at: datetime, *, parent: str | None = None, kind: BackupKind | None = None, **changes: Any
) -> Stored:
    """A full one, or an increment where it has a parent."""
    kind = kind or (BackupKind.PHYSICAL_INCREMENTAL if parent else BackupKind.PHYSICAL_FULL)
    return Stored(name, kind, parent, finished_at - timedelta(minutes=10), finished_at, bytes=100, **changes)


def days_ago(days: float) -> datetime:
    return NOW - timedelta(days=days)


def view(backups: Iterable[Stored], **changes: Any) -> View:
    return View("shop", "local", tuple(backups), **changes)


def rules(**values: Any) -> Keep:
    return Keep.model_validate(values)


def kept(decisions: Decisions) -> set[str]:
    return {decision.backup.id for decision in decisions.kept}


def of(decisions: Decisions, backup_id: str) -> Decision:
    return next(decision for decision in decisions.backups if decision.backup.id == backup_id)


def grounds(decisions: Decisions, backup_id: str) -> list[str]:
    return [ground.rule for ground in of(decisions, backup_id).grounds]


def applied(one: View, decisions: Decisions) -> View:
    """As it is once the decisions were carried out: what expired is marked, binary logs are gone."""
    gone = {decision.backup.id for decision in decisions.expired}
    return replace(
        one,
        backups=tuple(replace(b, marked=b.marked or b.id in gone) for b in one.backups),
        runs=tuple(item.run for item in decisions.runs if item.keep),
    )
