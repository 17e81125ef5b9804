"""Configuration files written for a test."""

from __future__ import annotations

from pathlib import Path

from backupd.model.errors import ConfigurationError
from policies.load import load
from policies.reference import example

CONFIGURATION = """\
servers:
  db1: {policy: gold}
destinations:
  local: {type: filesystem, path: /srv/backups}
encryption: {gnupg_home: gnupg, recipients: [ops@example.com]}
"""

POLICY = """\
physical: {full: "0 2 * * *"}
destinations: {required: [local]}
"""


def write(folder: Path, configuration: str = CONFIGURATION, **policies: str) -> Path:
    """A configuration file and its policies; without any, one called gold."""
    (folder / "policies").mkdir(exist_ok=True)
    for name, text in (policies or {"gold": POLICY}).items():
        (folder / "policies" / f"{name}.yaml").write_text(text, encoding="utf-8")
    path = folder / "backupd.yaml"
    path.write_text(configuration, encoding="utf-8")
    return path


def problems(path: Path) -> list[tuple[str, int | None, str, str]]:
    """(file name, line, field, message) of everything wrong; none when it loads."""
    try:
        load(path)
    except ConfigurationError as error:
        return [(Path(p.file).name, p.line, p.field, p.message) for p in error.problems]
    return []


def example_configuration(policies: Path) -> str:
    """The example, but for where its policies are."""
    return example("backupd").replace("/etc/backupd/policies", str(policies))
