"""What the catalog's tables are made of: column types, and columns that several of them have.

Each table is declared beside what reads and writes it. The only other place that knows columns is ``alembic/versions``.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Dialect,
    MetaData,
    Text,
    TypeDecorator,
)

from backupd.model.proof import Phase


class UtcTime(TypeDecorator[datetime]):
    """Aware datetimes in, aware datetimes in UTC out, microseconds kept.

    SQLite has no zones: there the column holds the UTC clock as text, which sorts by time. PostgreSQL returns
    ``timestamptz`` in the zone of the session, so it is brought back to UTC.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Raises ValueError for a moment without a time zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment needs a time zone")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """An aware datetime in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class FreeText(TypeDecorator[str]):
    """Text of programs and file names, which may hold what a database refuses.

    PostgreSQL stores no NUL, and neither database stores the lone surrogates by which Python carries bytes that are
    not UTF-8: both are written out (``\\x00``, ``\\udcff``) instead of failing the record of a failure.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002  the signature is SQLAlchemy's
        """The text with everything written out that a database refuses."""
        if value is None:
            return None
        return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    }
)


def position_fields() -> tuple[Column[Any], ...]:
    """A position in the binary log, of which a server may know the file or the GTIDs or neither."""
    return (
        Column("position_file", FreeText, nullable=False),
        Column("position_pos", BigInteger, nullable=False),
        Column("position_gtid", FreeText, nullable=False),
    )


def phases_json(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Exact, unlike ``Phase.as_json``, which rounds for readers."""
    return [{"name": phase.name, "seconds": phase.seconds, "bytes": phase.bytes} for phase in phases]


def phases_from(column: Iterable[dict[str, Any]]) -> tuple[Phase, ...]:
    """What ``phases_json`` wrote."""
    return tuple(Phase(item["name"], float(item["seconds"]), int(item["bytes"])) for item in column)
