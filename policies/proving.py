"""What a policy says about proving its backups."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from policies.fields import Cadence, Duration, Section, Target, Words

_PLACEHOLDER = re.compile(r"\{([a-zA-Z_]+)\}")


def _sql(text: str) -> str:
    if strange := sorted(set(_PLACEHOLDER.findall(text)) - {"target"}):
        raise ValueError(f"{{{strange[0]}}} is not known: only {{target}}, the moment restored to, is filled in")
    return text


class SqlCheck(Section):
    """A question to the restored server."""

    name: Words | None = Field(
        None, description="What reports call it; by default the SQL itself.", examples=["orders of the last day"]
    )
    sql: Annotated[Words, AfterValidator(_sql)] = Field(
        description="One statement that gives one value; the check is passed when that is true (not 0, not NULL). "
        "`{target}` becomes the moment restored to, as a quoted time in UTC.",
        examples=["SELECT COUNT(*) > 0 FROM shop.orders WHERE created_at > {target} - INTERVAL 1 DAY"],
    )


class TestRestore(Section):
    """Backups are restored on a private server, looked at, and thrown away again."""

    schedule: Cadence | None = Field(None, description="When a backup is restored for a test.", examples=["0 6 * * *"])
    target: Target = Field(
        "latest",
        description="To where: `latest`, `random` (another moment each time, anywhere that the server can be "
        "recovered to), or any target that `backupd restore --to` takes.",
        examples=["random"],
    )
    checks: tuple[SqlCheck, ...] = Field((), description="Questions to the restored server, besides CHECK TABLE.")


class Witness(Section):
    """Checksums of the source's tables, read in one snapshot, for a test restore to compare with.

    Reading them costs the source one full read of its tables, and purge lag while the snapshot is open.
    """

    enabled: bool = Field(True, description="Read them with each full backup.", examples=[True])
    schedule: Cadence | None = Field(
        None,
        description="When they are read besides, so that test restores compare moments between two backups, too.",
        examples=["0 */6 * * *"],
    )
    max_duration: Duration = Field(
        "10m",
        validate_default=True,
        description="Stop after this time; the tables not read are named in the proof.",
        examples=["10m"],
    )
