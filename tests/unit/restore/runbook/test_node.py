"""The runbook beside the backup of a node of a Galera cluster."""

from __future__ import annotations

from backupd.model.server_facts import Role
from restore.runbook.backup_runbook import render_runbook
from tests.support.catalog.samples import server_info
from tests.support.keys import Keys
from tests.support.restores.builder import Builder


def runbook(keys: Keys, role: Role) -> str:
    builder = Builder(keys)
    header, body = builder.manifest(builder.entries({"ibdata1": b"x" * 600}), info=server_info(role=role))
    return render_runbook(header, body, destinations=("local",))


def test_it_says_how_the_node_comes_back_without_a_full_copy(keys: Keys) -> None:
    text = runbook(keys, Role.NODE)
    assert "## A node of a Galera cluster" in text
    for step in ("Recovered WSREP position", "wsrep_local_cached_downto", "safe_to_bootstrap: 0", "--wsrep-recover"):
        assert step in text
    assert "{{" not in text


def test_that_of_another_server_says_nothing_of_clusters(keys: Keys) -> None:
    assert "Galera" not in runbook(keys, Role.SOURCE)
