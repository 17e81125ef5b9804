"""Destinations in buckets of the servers that tests start."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime

from backupd.model.text import Clock
from backupd.process.run_context import utc_now
from storage.config import S3Config
from storage.s3.destination import S3Destination
from tests.support.stores.moto_server import MotoServer
from tests.support.stores.s3_server import S3Server

_prefixes = itertools.count(1)
NAME = "offsite"
OBJECT = "objects/ab/" + "ab" * 32 + "-" + "01" * 8


def config(server: S3Server | MotoServer, bucket: str = "shared", **fields: object) -> S3Config:
    """A prefix of its own in ``bucket``, which exists; ``fields``: what is to be different."""
    return S3Config.model_validate({**server.bucket(bucket), "prefix": f"p{next(_prefixes)}", **fields})


@contextlib.contextmanager
def opened(
    config: S3Config,
    *,
    initialise: bool = True,
    clock: Clock = utc_now,
    read_seconds: float = 60.0,
    begin_seconds: float = 5.0,
) -> Iterator[S3Destination]:
    """What ``config`` describes, ready for use. Who wants a server that hangs given up says how soon: a busy one may
    take its time."""
    destination = S3Destination(NAME, config, clock=clock, read_seconds=read_seconds, begin_seconds=begin_seconds)
    with contextlib.closing(destination):
        if initialise:
            destination.initialise(datetime.now(UTC))
        yield destination
