"""The whole application behind one door: what the command line, the REST interface and the page may ask for.

Each part is an object of its room, made when it is asked for, and what its methods need they import themselves: a
command that only lists backups need not load what restores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.app.context.access import scoped
from backupd.app.context.audit import command_line
from backupd.app.context.settings import held_settings, load_settings
from backupd.app.context.wiring import Opening, Wiring, catalog_of
from backupd.catalog.base.database import WANTED
from backupd.catalog.session import open_catalog, upgrade
from backupd.model.access import Actor

if TYPE_CHECKING:
    from backupd.app.context.access import Access
    from backupd.app.service.alerts import Alerts
    from backupd.app.service.backups import Backups, Binlogs, Retention
    from backupd.app.service.dispatch import Foreground
    from backupd.app.service.maintenance import Keys, Maintenance
    from backupd.app.service.requests import Jobs, Requests
    from backupd.app.service.restores import Restores
    from backupd.app.service.servers import Installation, Servers
    from backupd.app.views.listing import Listings


class Service:
    """Use as ``with Service.open(path) as service``. Methods of its parts raise errors of backupd.model.errors."""

    def __init__(self, wiring: Wiring, revision: str, actor: Actor | None = None) -> None:
        """``actor``: who asks; without one it is whoever calls this program.
        ``revision``: of the catalog's tables, which opening the service brought there."""
        self.actor = actor or command_line()
        self._wiring = scoped(wiring, self.actor)
        self.revision = revision

    @classmethod
    @contextmanager
    def open(
        cls, config_path: Path, held: Path | None = None, opening: Opening = Opening.MAKES, *, new_catalog: bool = False
    ) -> Iterator[Service]:
        """Read the configuration and open the catalog. ``held``: the settings that a service has in force, which then
        count in place of the files. ``opening``: what becomes of a catalog that is not there; ``new_catalog``: as
        ``new`` of ``catalog_of``.

        Raises ConfigurationError with every problem at once. A policy that is broken keeps from work only what needs
        it: whoever has to pause, cancel or restore at night must not have to mend it first.
        """
        if held is None:
            settings = load_settings(config_path, strict=False)
            with catalog_of(settings, opening, new=new_catalog) as catalog:
                yield cls(Wiring(settings, catalog), WANTED)
            return
        settings = held_settings(held)
        # A service has its catalog open: where it is gone, an empty one must not take its place.
        _before, revision = upgrade(settings.catalog, make=False)
        with open_catalog(settings.catalog, make=False) as catalog:
            yield cls(Wiring(settings, catalog), revision)

    def acting(self, actor: Actor) -> Service:
        """The same for ``actor``: what it asks for and changes is recorded under its name, and servers that it may not
        see are not there."""
        return Service(self._wiring, self.revision, actor)

    @property
    def access(self) -> Access:
        """Tokens and the audit."""
        from backupd.app.context.access import Access

        return Access(self._wiring, self.actor)

    @property
    def alerts(self) -> Alerts:
        """Incidents, and the messages about them."""
        from backupd.app.service.alerts import Alerts

        return Alerts(self._wiring, self.actor)

    @property
    def backups(self) -> Backups:
        """Stored backups."""
        from backupd.app.service.backups import Backups

        return Backups(self._wiring, self.actor)

    @property
    def binlogs(self) -> Binlogs:
        """Archived binary logs."""
        from backupd.app.service.backups import Binlogs

        return Binlogs(self._wiring, self.actor)

    @property
    def foreground(self) -> Foreground:
        """Work that this process does itself, while somebody waits."""
        from backupd.app.service.dispatch import Foreground

        return Foreground(self._wiring, self.actor)

    @property
    def installation(self) -> Installation:
        """What concerns all servers together."""
        from backupd.app.service.servers import Installation

        return Installation(self._wiring, self.actor)

    @property
    def jobs(self) -> Jobs:
        """Jobs of every state."""
        from backupd.app.service.requests import Jobs

        return Jobs(self._wiring, self.actor)

    @property
    def keys(self) -> Keys:
        """Keys that open backups, and those that sign them."""
        from backupd.app.service.maintenance import Keys

        return Keys(self._wiring, self.actor)

    @property
    def listings(self) -> Listings:
        """Long lists by pages, and policies."""
        from backupd.app.views.listing import Listings

        return Listings(self._wiring, self.actor)

    @property
    def maintenance(self) -> Maintenance:
        """Looking after the catalog, its copies, and what is at the destinations."""
        from backupd.app.service.maintenance import Maintenance

        return Maintenance(self._wiring, self.actor)

    @property
    def requests(self) -> Requests:
        """Work to be queued, plans to be started by their id, and restores by jobs."""
        from backupd.app.service.requests import Requests

        return Requests(self._wiring, self.actor)

    @property
    def restores(self) -> Restores:
        """Plans without a row, thaws, and what unfinished restores left."""
        from backupd.app.service.restores import Restores

        return Restores(self._wiring, self.actor)

    @property
    def retention(self) -> Retention:
        """What the rules and holds keep."""
        from backupd.app.service.backups import Retention

        return Retention(self._wiring, self.actor)

    @property
    def servers(self) -> Servers:
        """The configured servers."""
        from backupd.app.service.servers import Servers

        return Servers(self._wiring, self.actor)
