"""Names that we give, and the names that users may give."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BACKUP_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")


def new_id(now: datetime) -> str:
    """``20261121T042512Z-7f3a9c01``: sorts by time, unique by 32 random bits within one second."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def is_id(text: str) -> bool:
    return _BACKUP_ID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """May ``text`` name a server, destination or policy? It becomes part of paths and keys, so: plain characters."""
    return _NAME.fullmatch(text) is not None and ".." not in text
