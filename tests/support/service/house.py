"""Settings and a catalog of their own, without any database server, and a clock that a test moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.app.context.settings import Settings, load_settings

GOLD = """\
physical: {full: "0 2 * * sun", incremental: "0 2 * * mon-sat"}
destinations: {required: [local]}
timing: {timezone: Europe/Berlin}
"""


@dataclass
class Clock:
    """Says what it is told; ``sleep`` passes time on all three clocks."""

    now: datetime
    seconds: float = 0.0
    asleep: float = 0.0

    def __call__(self) -> datetime:
        return self.now

    def sleep(self, time: timedelta) -> None:
        self.now += time
        self.seconds += time.total_seconds()

    def running(self) -> float:
        return self.seconds - self.asleep

    def passing(self) -> float:
        return self.seconds


@dataclass
class Office:
    """A folder with a configuration: servers with the policy that each follows."""

    base: Path
    servers: dict[str, str] = field(default_factory=lambda: {"db1": "gold"})
    policies: dict[str, str] = field(default_factory=lambda: {"gold": GOLD})
    catalog: str = ""

    @property
    def file(self) -> Path:
        return self.base / "backupd.yaml"

    def write(self, *, extra: str = "", servers: Mapping[str, str] | None = None, **policies: str) -> Settings:
        """Write everything anew, with these changes, and read it."""
        self.servers = dict(servers) if servers is not None else self.servers
        self.policies |= policies
        (self.base / "policies").mkdir(exist_ok=True)
        for name, text in self.policies.items():
            (self.base / "policies" / f"{name}.yaml").write_text(text)
        known = "".join(
            f"  {name}: {{socket: {self.base}/no.sock, user: nobody, policy: {policy}}}\n"
            for name, policy in self.servers.items()
        )
        catalog = self.catalog or f"sqlite:///{self.base}/catalog.db"
        self.file.write_text(
            f"catalog: {catalog}\nspool: {self.base}/spool\nservers:\n{known}"
            f"destinations:\n  local: {{type: filesystem, path: {self.base}/repository}}\n"
            f"encryption: {{gnupg_home: {self.base}/gnupg, recipients: [ops@example.com]}}\n"
            + ("" if "api:" in extra else "api: {enabled: false}\n")
            + extra
        )
        return load_settings(self.file)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
