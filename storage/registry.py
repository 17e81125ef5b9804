"""From configuration values to open destinations."""

from __future__ import annotations

from collections.abc import Mapping

from backupd.process.throttle import TokenBucket
from storage.breaker import BreakerDestination
from storage.config import DestinationConfig, FilesystemConfig, S3Config
from storage.destination import Destination
from storage.filesystem import FilesystemDestination
from storage.throttled import throttled


def open_destination(name: str, config: DestinationConfig) -> Destination:
    """The destination that ``config`` describes, no faster than its limits for all users of it together. Touches
    nothing: see ``is_initialised`` and ``initialise``."""
    destination = _open(name, config)
    if config.max_upload is None and config.max_download is None:
        return destination
    return throttled(destination, put=TokenBucket(config.max_upload) if config.max_upload else None,
                     get=TokenBucket(config.max_download) if config.max_download else None)


def open_destinations(configs: Mapping[str, DestinationConfig]) -> dict[str, Destination]:
    return {name: open_destination(name, config) for name, config in configs.items()}


def _open(name: str, config: DestinationConfig) -> Destination:
    """Drivers over the network load their libraries here: every command would wait for them otherwise."""
    if isinstance(config, FilesystemConfig):
        return FilesystemDestination(name, config.path)
    if isinstance(config, S3Config):
        from storage.s3 import S3Destination

        return BreakerDestination(S3Destination(name, config))
    from storage.sftp import SftpDestination

    return BreakerDestination(SftpDestination(name, config))
