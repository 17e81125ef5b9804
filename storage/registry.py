"""From configuration values to open destinations."""

from __future__ import annotations

from collections.abc import Mapping

from storage.config import DestinationConfig
from storage.destination import Destination
from storage.filesystem import FilesystemDestination


def open_destination(name: str, config: DestinationConfig) -> Destination:
    """The destination that ``config`` describes. Touches nothing: see ``is_initialised`` and ``initialise``."""
    return FilesystemDestination(name, config.path)


def open_destinations(configs: Mapping[str, DestinationConfig]) -> dict[str, Destination]:
    return {name: open_destination(name, config) for name, config in configs.items()}
