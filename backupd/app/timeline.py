"""The timeline of a server, from what the catalog holds. Reads no destination."""

from __future__ import annotations

from datetime import timedelta

from backupd.app.restores import measured_rates, within_reach
from backupd.app.targets import history
from backupd.app.wiring import Wiring
from backupd.model.errors import NotFoundError, RefusedError
from backupd.recovery.timeline import Objectives, Timeline
from backupd.recovery.timeline import timeline as made
from restore.planner import Preferences, make_plan
from restore.target import Latest, Target


def timeline(wiring: Wiring, server_name: str) -> Timeline:
    """Raises NotFoundError for a server that is not configured."""
    server = wiring.settings.server(server_name)
    promised = server.policy.objectives if server.usable else None  # a broken policy must not hide what is there
    records = within_reach(wiring, wiring.catalog.backups.list(server_name))
    archived = history(wiring, server, exact=False)
    now = wiring.clock()
    preferences = Preferences(destinations=(*server.required, *server.others),
                              rates=measured_rates(wiring, server_name), start=True)
    try:
        plan = make_plan(server_name, records, Target(Latest()), preferences, now=now, history=archived)
    except (NotFoundError, RefusedError):
        plan = None  # the windows say why
    return made(
        server_name, records, archived.branches if archived else (), archived.runs if archived else (),
        archived.gaps if archived else (), now=now, proofs=wiring.catalog.proofs.list(server_name, limit=1),
        predicted_rto=timedelta(seconds=plan.seconds) if plan else None,
        objectives=Objectives(promised.rpo, promised.rto) if promised else None)
