"""What is valid and still deserves a word: missing legs, and what this version does not do yet."""

from __future__ import annotations

from collections.abc import Mapping

from policies.configuration import Configuration, FilesystemDestination
from policies.schema import Policy


def advice(policy: Policy) -> list[str]:
    """Sentences about what a careful operator would add. Each names its field."""
    found = []
    if policy.physical is None:
        found.append("physical: missing; a whole server comes back much faster from its data files than from dumps")
    if policy.logical is None:
        found.append("logical: missing; single tables and other versions are easiest to restore from dumps")
    if policy.binlog is None:
        found.append("binlog: missing; without it only the moments of backups are recoverable, none between them")
    if not policy.config_files:
        found.append("config_files: missing; a bare host needs its configuration back too")
    if len(policy.destinations.required) + len(policy.destinations.others) < 2:
        found.append("destinations: only one; a second place, away from the first, survives its loss")
    if policy.test_restore is None:
        found.append("test_restore: missing; a backup that was never restored is a hope")
    return found


def not_yet_active(policy: Policy, configuration: Configuration | None = None) -> list[str]:
    """Fields of a policy that are accepted and checked, but that this version does not act on. Each names its field.

    With ``configuration`` also required destinations of a type that cannot be opened yet.
    """
    found = []
    if policy.physical is not None:
        found.append("physical.full: its schedule does not start by itself yet; "
                     "run `backupd backup SERVER --kind full` from cron")
        if policy.physical.incremental:
            found.append("physical.incremental: incremental backups are not taken yet")
    if policy.logical is not None:
        found.append("logical: logical backups are not taken yet")
    if policy.binlog is not None:
        found.append("binlog: the binary log is not archived yet")
    if policy.config_files:
        found.append("config_files: not kept with backups yet")
    if policy.destinations.others:
        found.append(f"destinations.others: nothing is copied to {', '.join(policy.destinations.others)} yet")
    if policy.retention:
        found.append("retention: nothing expires by itself yet; `backupd backups delete ID` removes a backup")
    if policy.objectives.rpo:
        found.append("objectives.rpo: not watched yet")
    if policy.test_restore is not None and policy.test_restore.schedule:
        found.append("test_restore.schedule: does not start by itself yet; run `backupd test-restore SERVER` from cron")
    if policy.test_restore is not None and policy.test_restore.target != "latest":
        found.append("test_restore.target: the newest backup is restored, whatever is written here")
    known: Mapping[str, object] = configuration.destinations if configuration else {}
    for name in policy.destinations.required:
        if name in known and not isinstance(known[name], FilesystemDestination):
            kind = getattr(known[name], "type", "?")
            found.append(f"destinations.required: `{name}` is of type {kind}, which this version cannot open")
    return found


def settings_not_yet_active(configuration: Configuration) -> list[str]:
    """The same for the configuration file; only fields that were written there."""
    written = configuration.model_fields_set
    found = []
    if configuration.alerts.email is not None:
        found.append("alerts.email: no mail is sent yet")
    if "api" in written:
        found.append("api: not served yet")
    found += [f"destinations.{name}: type {destination.type} cannot be opened yet"
              for name, destination in configuration.destinations.items()
              if not isinstance(destination, FilesystemDestination)]
    return found
