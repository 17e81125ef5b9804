"""What is decided alike about a backup of any kind: names, times, means, and the documents beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from backupd.app.backup_records import behind
from backupd.app.context.settings import ServerSettings
from backupd.app.context.trust import signed_servers
from backupd.app.context.wiring import JobRun, Wiring, worker_count
from backupd.backup.commit import Documents
from backupd.model.manifest import Body, Header
from restore.runbook.shared_steps import render_unpack
from storage.destination import Destination


def shared_fields(
    wiring: Wiring,
    server: ServerSettings,
    run: JobRun,
    destinations: tuple[Destination, ...],
    render: Callable[..., str],
) -> dict[str, Any]:
    """Fields of a ``BackupSpec`` by their names. ``render`` makes the runbook of this kind. Raises RefusedError for an
    identity key that cannot be used, CatalogError."""
    encryption = wiring.settings.encryption
    late = behind(wiring, server.name)

    def documents(body: Body, header: Header) -> Documents:
        runbook = render(
            header,
            body,
            destinations=[d.name for d in destinations],
            places={**server.required, **server.others},
            signed=server.name in signed_servers(wiring.settings),
        )
        return Documents(runbook=runbook.encode(), unpack=render_unpack(header.backup_id, body.entries, header.objects))

    return {
        "backup_id": run.job.id,
        "server": server.name,
        "destinations": destinations,
        "gnupg_home": encryption.gnupg_home,
        "identity_key": wiring.identity_key(),
        "started_at": wiring.clock() + late,
        "documents": documents,
        "behind": late,
        "level": encryption.compression_level,
        "workers": worker_count(),
        "announce": partial(wiring.catalog.backups.announce, run.job.id),
    }
