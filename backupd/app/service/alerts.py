"""What people may ask about incidents and messages, and do about them."""

from __future__ import annotations

from backupd.app.context.access import Facade, require_all, see, seen
from backupd.catalog.base.pages import EVER, Span
from backupd.model.event import Incident, Message, MessageState, Severity

PAGE = 100
"""Rows of a list when nobody says how many."""


class Alerts(Facade):
    """Incidents and the messages about them."""

    def list(
        self,
        server: str | None = None,
        *,
        is_open: bool | None = True,
        severity: Severity | None = None,
        span: Span = EVER,
        before: str | None = None,
        limit: int = PAGE,
    ) -> tuple[Incident, ...]:
        """Newest first. ``is_open`` None: those that are over, too; ``before``: only those older than the one with this
        id. Raises NotFoundError for a server that the actor may not see, and for one that is neither configured nor in
        the list."""
        found = self._wiring.catalog.incidents.list(
            seen(self._actor, server), is_open=is_open, severity=severity, span=span, before=before, limit=limit
        )
        if not found and server is not None and before is None:
            self._wiring.settings.server(server)
        return found

    def messages(
        self,
        *,
        state: MessageState | None = None,
        incident: str | None = None,
        span: Span = EVER,
        before: str | None = None,
        limit: int = PAGE,
    ) -> tuple[Message, ...]:
        """Newest first. One message may be about many servers, so they are for those who see all. Raises
        ForbiddenError."""
        require_all(self._actor)
        return self._wiring.catalog.messages.list(state=state, incident=incident, span=span, before=before, limit=limit)

    def test(self, *, wait: bool = True) -> tuple[Message, ...]:
        """Send a test by every channel; how each fared. Without ``wait`` the service sends it. Raises ForbiddenError,
        RefusedError without any, DeliveryError."""
        from backupd.app.alerting.service import send_test

        require_all(self._actor)
        with self._audited("alerts-tested") as told:
            sent = send_test(self._wiring, self._actor.name, wait=wait)
            told.detail = ", ".join(f"{one.channel} {one.state}" for one in sent)
            return sent

    def acknowledge(self, incident_id: str) -> Incident:
        """No reminders any more. Raises NotFoundError, RefusedError when it is over or acknowledged."""
        with self._audited("alert-acknowledged", subject=incident_id) as told:
            incident = self._wiring.catalog.incidents.get(incident_id)
            see(self._actor, incident.server, f"incident {incident_id}")
            told.concerns(incident.server)
            return self._wiring.catalog.incidents.acknowledge(incident_id, self._actor.name, self._wiring.clock())
