"""Fixtures: servers that store objects, one of each for the session. Use a bucket or folder of your own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stores import s3_server as s3server
from tests.support.stores.moto_server import MotoServer
from tests.support.stores.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    if why := s3server.why_not():
        pytest.skip(why)
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server
