"""From configuration values to open destinations."""

from __future__ import annotations

import hashlib

from backupd.process.throttle import SharedBucket
from storage.config import DestinationConfig, FilesystemConfig, S3Config
from storage.destination import Destination
from storage.filesystem import FilesystemDestination
from storage.throttle_and_breaker import BreakerDestination, throttled


def open_destination(name: str, config: DestinationConfig) -> Destination:
    """The destination that ``config`` describes, no faster than its limits for all its users on this host. Touches
    nothing: see ``is_initialised`` and ``initialise``."""
    destination = _open(name, config)
    if config.max_upload is None and config.max_download is None:
        return destination
    address = config.model_dump_json(exclude={"max_upload", "max_download"})
    mark = hashlib.sha256(f"{name} {address}".encode()).hexdigest()[:32]
    return throttled(
        destination,
        put=SharedBucket(config.max_upload, f"{mark}-put") if config.max_upload else None,
        get=SharedBucket(config.max_download, f"{mark}-get") if config.max_download else None,
    )


def _open(name: str, config: DestinationConfig) -> Destination:
    """Drivers over the network load their libraries here: every command would wait for them otherwise."""
    if isinstance(config, FilesystemConfig):
        return FilesystemDestination(name, config.path)
    if isinstance(config, S3Config):
        from storage.s3.destination import S3Destination

        return BreakerDestination(S3Destination(name, config))
    from storage.sftp.destination import SftpDestination

    return BreakerDestination(SftpDestination(name, config))
