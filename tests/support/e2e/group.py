"""A house whose server is a group of members, each a database server of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.e2e.house import SERVER, House
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server


@dataclass
class GroupHouse(House):
    """``members``: by their names; ``settings``: of the group, as YAML."""

    members: Mapping[str, Server] = field(default_factory=dict)
    settings: str = ""

    def write(
        self, *, encryption_home: Path | None = None, restore_home: Path | None = None, repository: Path | None = None
    ) -> None:
        super().write(encryption_home=encryption_home, restore_home=restore_home, repository=repository)
        lines = [
            f"  {name}: {{socket: {server.socket}, "
            f"defaults_file: {server.client_file(SERVICE_USER, SERVICE_PASSWORD)}}}\n"
            for name, server in self.members.items()
        ]
        group = f"  {SERVER}: {{members: [{', '.join(self.members)}], policy: gold{self.settings}}}\n"
        text = self.config.read_text().splitlines(keepends=True)
        self.config.write_text(
            "".join(f"{group}{''.join(lines)}" if line.startswith(f"  {SERVER}:") else line for line in text)
        )
