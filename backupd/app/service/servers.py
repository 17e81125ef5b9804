"""Servers: checked, accepted, and shown at a glance with their destinations and policies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.app.context.access import Facade

if TYPE_CHECKING:
    from backupd.app.views.destinations import DestinationView
    from backupd.app.views.policy_explanation import Explanation
    from backupd.app.views.server import ServerOverview
    from backupd.backup.checks.finding import Finding
    from backupd.metrics import Values
    from backupd.model.server_facts import Identity
    from backupd.recovery.timeline import Timeline


class Servers(Facade):
    """The configured servers."""

    def check(self, server: str | None) -> Sequence[Finding]:
        """What would make backups fail or worthless, the worst first; of every server without ``server``."""
        from backupd.app.service.check import check

        return check(self._wiring, server)

    def accept(self, server: str) -> Identity:
        """The other server that answers under the name of ``server`` is the right one from now on."""
        from backupd.app.context import server_identity as identity

        with self._audited("server-accepted", server=server) as told:
            self._see_server(server)
            found = identity.accept(self._wiring, server, self._actor.name)
            told.subject = found.uuid
            return found

    def overview(self, servers: Collection[str] | None = None) -> tuple[ServerOverview, ...]:
        """Every server at a glance, or those of ``servers``. Raises NotFoundError."""
        from backupd.app.views.overview import overview

        return overview(self._wiring, self._wiring.clock(), servers)

    def timeline(self, server: str) -> Timeline:
        """Which moments are recoverable, by branch, with gaps. Raises NotFoundError."""
        from backupd.app.views.timeline import timeline

        self._see_server(server)
        return timeline(self._wiring, server)

    def explain(self, policy: Path, server: str | None) -> Explanation:
        """What a policy file, in use or not yet, does to a server of this installation."""
        from backupd.app.views.policy_explanation import explain_here

        return explain_here(self._wiring, policy, server)


class Installation(Facade):
    """What concerns all servers together."""

    def destinations(self) -> tuple[DestinationView, ...]:
        """Every destination at a glance; waits for none."""
        from backupd.app.views.destinations import places

        return places(self._wiring, self._wiring.clock())

    def measure(self) -> Values:
        """Everything that is measured of what the actor sees."""
        from backupd.app.views.metrics import measure

        return measure(self._wiring, self._wiring.clock(), everything=self._actor.servers is None)
