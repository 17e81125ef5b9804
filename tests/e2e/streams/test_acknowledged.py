"""Commits that wait for a stream under the real service: what it claims, and what it says when that ends."""

from __future__ import annotations

import pytest

from backupd.catalog.session import Catalog
from tests.e2e.streams.test_streaming import state, wait_for, write
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, serving, until

ACKNOWLEDGED = ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s, acknowledge: spool}\n"


@pytest.fixture
def house(own_house: House) -> House:
    """A house whose policy has commits wait."""
    (own_house.base / "policies" / "gold.yaml").write_text(ACKNOWLEDGED)
    return own_house


def holds(house: House) -> bool:
    (one,) = house.ok("binlog", "status", SERVER)
    return bool(one["acknowledgement"] and one["acknowledgement"]["holds"])


def test_rpo_0_is_claimed_while_commits_wait_and_lost_with_an_incident_when_they_do_not(
    house: House, catalog: Catalog
) -> None:
    with serving(house) as service:
        wait_for(catalog, write(house, "first"))
        checked = house.run("check", SERVER).all
        assert "SET GLOBAL rpl_semi_sync_master_enabled = ON" in checked
        assert "SET GLOBAL rpl_semi_sync_master_wait_point = AFTER_SYNC" in checked
        assert not holds(house)
        house.server.execute(
            "SET GLOBAL rpl_semi_sync_master_wait_point = AFTER_SYNC", "SET GLOBAL rpl_semi_sync_master_enabled = ON"
        )
        until(lambda: holds(house), lambda: f"RPO 0: {state(catalog)}")
        write(house, "waits")
        assert "RPO 0 since" in house.run("timeline", SERVER).all
        house.server.execute("SET GLOBAL rpl_semi_sync_master_enabled = OFF")
        until(lambda: bool(catalog.events.list(kind="unacknowledged")), lambda: f"an incident: {state(catalog)}")
        assert not holds(house)
        assert "RPO 0 does not hold" in house.run("timeline", SERVER).all
        assert service.stop() == 0
