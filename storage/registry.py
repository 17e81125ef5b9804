"""From configuration values to open destinations."""

from __future__ import annotations

from collections.abc import Mapping

from backupd.model.errors import RefusedError
from storage.config import DestinationConfig, FilesystemConfig
from storage.destination import Destination
from storage.filesystem import FilesystemDestination


def open_destination(name: str, config: DestinationConfig) -> Destination:
    """The destination that ``config`` describes. Touches nothing: see ``is_initialised`` and ``initialise``."""
    if isinstance(config, FilesystemConfig):
        return FilesystemDestination(name, config.path)
    raise RefusedError(f"destination {name} is of type {config.type}, which this version cannot open",
                       hint="use a destination of type filesystem")


def open_destinations(configs: Mapping[str, DestinationConfig]) -> dict[str, Destination]:
    return {name: open_destination(name, config) for name, config in configs.items()}
