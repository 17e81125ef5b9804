"""What a command that only reads does not import: importing it would take longer than the command itself.

docs/decisions/house.md says which modules may import what at their top.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backupd.catalog.session import open_catalog

OF_OTHERS = frozenset({"alembic", "apprise", "fastapi", "jinja2", "prometheus_client", "uvicorn"})
"""Libraries of upgrades, of messages, of the page and of metrics."""
OF_WORK = frozenset({"apscheduler", "boto3", "botocore", "cryptography", "gnupg", "paramiko", "pymysql", "zstandard"})
"""Libraries of the schedule, and of what opens destinations, keys and servers."""
ROOMS = ("backupd.backup", "backupd.binlog", "backupd.engine", "backupd.transfer", "restore", "api")
"""Packages of ours that act."""
VALUES = frozenset({"backupd.backup", "backupd.backup.finding"})
"""What of them is nothing but values."""

_RUN = """
import sys
from backupd.cli.main import main
try:
    main()
finally:
    print("loaded", *sys.modules, file=sys.stderr)
"""


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """Of one server that follows a policy and one destination, with a catalog that knows nothing yet."""
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "gold.yaml").write_text(
        'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\nretention: {local: {keep_fulls: 2}}\n'
    )
    file = tmp_path / "backupd.yaml"
    file.write_text(
        f"""
catalog: sqlite:///{tmp_path}/catalog.db
spool: {tmp_path}/spool
policies: {tmp_path}/policies
servers: {{db1: {{socket: /run/mysqld/mysqld.sock, policy: gold}}}}
destinations:
  local: {{type: filesystem, path: {tmp_path}/backups}}
  offsite: {{type: s3, bucket: acme-backups}}
  vault: {{type: sftp, host: vault, user: b, path: /srv, key_file: {tmp_path}/key, known_hosts: {tmp_path}/known}}
encryption: {{gnupg_home: {tmp_path}/gnupg, recipients: [ops@example.com]}}
"""
    )
    open_catalog(f"sqlite:///{tmp_path}/catalog.db").close()
    return file


def loaded(configuration: Path, *command: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *command, "--config", str(configuration)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    names = next(line for line in done.stderr.splitlines() if line.startswith("loaded ")).split()
    return set(names[1:])


@pytest.mark.parametrize("command", [("backups",), ("jobs",), ("alerts",), ("token", "list"), ("audit",)], ids=" ".join)
def test_a_command_that_asks_the_catalog_alone_imports_nothing_that_acts(
    configuration: Path, command: tuple[str, ...]
) -> None:
    names = loaded(configuration, *command)
    assert sorted((OF_OTHERS | OF_WORK) & names) == []
    assert sorted(name for name in names - VALUES if name.startswith(tuple(f"{room}." for room in ROOMS))) == []


@pytest.mark.parametrize("command", [("timeline", "db1"), ("retention", "db1")], ids=" ".join)
def test_a_command_that_decides_and_only_shows_imports_no_library_of_others(
    configuration: Path, command: tuple[str, ...]
) -> None:
    assert sorted(OF_OTHERS & loaded(configuration, *command)) == []


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (("timeline", "db1"), {"apscheduler"}),  # when the first backup is due
        (
            ("retention", "db1"),
            OF_WORK - {"apscheduler", "gnupg", "pymysql", "zstandard"},
        ),  # every destination is asked for holds
    ],
    ids=["timeline", "retention"],
)
def test_a_command_that_decides_and_only_shows_imports_the_libraries_of_what_it_asks_alone(
    configuration: Path, command: tuple[str, ...], needed: set[str]
) -> None:
    assert sorted(OF_WORK & loaded(configuration, *command) - needed) == []


@pytest.mark.parametrize(
    ("command", "modules", "most"),
    [
        (("backups",), {"backups"}, 70),
        (("jobs",), {"jobs", "backups"}, 57),
        (("alerts",), {"alerts", "backups"}, 57),
        (("token", "list"), {"access"}, 52),
        (("audit",), {"access"}, 52),
        (("timeline", "db1"), {"binlog"}, 100),
        (("retention", "db1"), {"backups"}, 101),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_imports_the_module_of_no_other_one_and_few_of_ours(
    configuration: Path, command: tuple[str, ...], modules: set[str], most: int
) -> None:
    names = loaded(configuration, *command)
    inside = "backupd.cli.commands."
    assert {name.removeprefix(inside) for name in names if name.startswith(inside)} == modules
    ours = [name for name in names if name.partition(".")[0] in ("api", "backupd", "policies", "restore", "storage")]
    assert len(ours) <= most


def test_the_end_of_a_command_does_not_look_for_garbage_in_all_that_it_imported() -> None:
    script = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); import backupd.cli"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
