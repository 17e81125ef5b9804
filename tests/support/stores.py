"""Fixtures: servers that store objects, one of each for the session. Use a bucket or folder of your own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import s3server
from tests.support.motoserver import MotoServer
from tests.support.s3server import S3Server


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
