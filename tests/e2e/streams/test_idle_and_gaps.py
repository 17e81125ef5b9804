"""What the timeline says of a server that nobody writes to, and of binary logs that were purged before they were
copied."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.model.text import format_time, parse_time
from tests.e2e.restores.test_every_second import confirmed
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, serving, until
from tests.support.servers.mariadb import PrivateServer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

POLICY = ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s}\nobjectives: {rpo: 20s}\n"


def gtid_of(house: House, statement: str) -> str:
    with house.server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        cursor.execute("SELECT @@last_gtid")
        return str(cursor.fetchone()[0])


def purged(house: House, oldest: str) -> bool:
    house.server.execute(f"PURGE BINARY LOGS TO '{oldest}'")
    return [str(row[0]) for row in house.server.query("SHOW BINARY LOGS")] == [oldest]


def test_an_idle_server_stays_recoverable_and_a_gap_is_named_with_both_ends(own_house: House, short_tmp: Path) -> None:
    house, server = own_house, own_house.server
    (house.base / "policies" / "gold.yaml").write_text(POLICY)
    house.backup()
    with catalog_of(house) as catalog:
        # Nobody writes, and the latest moment moves on all the same.
        with serving(house) as service:
            confirmed(catalog, datetime.now(UTC))
            first = house.ok("timeline", SERVER)
            confirmed(catalog, datetime.now(UTC))
            second = house.ok("timeline", SERVER)
            assert parse_time(first["latest"]) < parse_time(second["latest"]) <= parse_time(second["at"])
            assert second["gaps"] == []
            promised = second["objectives"]
            lost = (parse_time(second["at"]) - parse_time(second["latest"])).total_seconds()
            assert promised["achieved_rpo"] == pytest.approx(lost)
            assert (promised["rpo"], promised["rpo_kept"], promised["kept"]) == (20, lost <= 20, lost <= 20)
            kept = gtid_of(house, "INSERT INTO shop.order_log (order_id, what) VALUES (1, 'kept')")
            before = datetime.now(UTC)
            confirmed(catalog, before)
            assert service.stop() == 0
        # Written and purged while nobody streams.
        time.sleep(1.1)  # the stamps of the log are whole seconds
        server.execute("FLUSH BINARY LOGS")
        lost_gtid = gtid_of(house, "INSERT INTO shop.order_log (order_id, what) VALUES (2, 'lost')")
        inside = datetime.now(UTC)
        server.execute("FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
        oldest = str(server.query("SHOW BINARY LOGS")[-1][0])
        lost_file = str(server.query("SHOW BINARY LOGS")[-3][0])
        until(lambda: purged(house, oldest), lambda: "a purge: the server keeps files that it still needs for a moment")
        time.sleep(1.1)
        after = gtid_of(house, "INSERT INTO shop.order_log (order_id, what) VALUES (3, 'after')")
        with serving(house) as service:
            confirmed(catalog, datetime.now(UTC))
            assert service.stop() == 0

    found = house.ok("timeline", SERVER)
    (gap,) = found["gaps"]
    ends = f"{gap['after']['file']}:{gap['after']['pos']}", f"{oldest}:{gap['before']['pos']}"
    assert gap["before"]["file"] == oldest
    shown = house.run("timeline", SERVER)
    for end in ends:
        assert end in shown.out
    assert parse_time(found["latest"]) < inside
    assert before - timedelta(seconds=1) <= parse_time(found["latest"])
    assert found["objectives"]["achieved_rpo"] > 1

    for target in (
        format_time(inside),
        f"gtid:{lost_gtid}",
        f"before-gtid:{lost_gtid}",
        f"{lost_file}:500",
        f"gtid:{after}",
        f"{oldest}:{gap['before']['pos'] or 4}",
    ):
        refused = house.fails("restore", SERVER, "--to", target, "--datadir", str(short_tmp / "no"))
        for end in ends:
            assert end in refused.all, (target, refused.all)
        assert not (short_tmp / "no").exists()
    for target in (format_time(before), f"gtid:{kept}"):
        house.ok("plan", SERVER, "--to", target)
    refused = house.fails("restore", SERVER, "--to", "latest", "--datadir", str(short_tmp / "no"))
    assert all(end in refused.all for end in (*ends, "--accept-older")), refused.all
    assert not (short_tmp / "no").exists()
    outcome = house.ok("restore", SERVER, "--to", "latest", "--accept-older", "--datadir", str(short_tmp / "d"))
    assert any(all(end in text for end in ends) for text in outcome["warnings"]), outcome["warnings"]
    with PrivateServer(datadir=short_tmp / "d") as restored:
        assert [
            row[0] for row in restored.query("SELECT what FROM shop.order_log WHERE what IN ('kept', 'lost', 'after')")
        ] == ["kept"]
