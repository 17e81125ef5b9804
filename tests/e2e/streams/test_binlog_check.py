"""`backupd check` names what makes a recovery from binary logs silently incomplete."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.e2e.house import SERVER, House
from tests.support.e2e.oracle import WITH_MARIADB, WITH_MYSQL, WITH_XTRABACKUP, Kind, params
from tests.support.e2e.service import ONCE_A_YEAR
from tests.support.keys import Keys

POLICY = ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s}\n"
RISKY = {"binlog_do_db": "shop", "sync_binlog": 0, "binlog_format": "STATEMENT"}
KINDS = [param for kind in (WITH_MARIADB, WITH_MYSQL, WITH_XTRABACKUP) for param in params(kind)]


def checked(kind: Kind, base: Path, keys: Keys, *, code: int, **server: object) -> str:
    with kind.stack.make(**server) as one:
        one.create_backup_users()
        house = House(base, one, keys, programs=kind.programs())
        (base / "policies" / "gold.yaml").write_text(POLICY)
        return house.fails("check", SERVER, code=code).all


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_settings_that_leave_transactions_out_of_the_log_or_lose_them_are_warned_of(
    kind: Kind, short_tmp: Path, keys: Keys
) -> None:
    told = checked(kind, short_tmp, keys, code=0, options=RISKY)
    for words in ("binlog_do_db is set (shop)", "sync_binlog is 0, not 1", "binlog_format is STATEMENT"):
        assert words in told, told


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_server_without_a_binary_log_cannot_be_streamed(kind: Kind, short_tmp: Path, keys: Keys) -> None:
    told = checked(kind, short_tmp, keys, code=1, binlog=False)
    assert "the policy streams the binary log, and this server writes none (log_bin is off)" in told
