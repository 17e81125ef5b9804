"""What a server is that answers under a known name: the same one, one that took over, or a stranger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backupd.model.server_facts import STRANGER, Identity, Verdict
from backupd.recovery.chains import Archived, Met, judge, lineages, standing_aside, strangers, strangers_by_backups
from tests.unit.recovery.test_lineage import AT, backup

KNOWN = (Identity("shop", "A", Verdict.OWN, AT, AT, server_id=1),)
SOURCE = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
OURS = Archived("0-1-500", server_id=1)


@pytest.mark.parametrize(
    ("met", "archived", "verdict"),
    [
        (Met("A", 1, mariadb=True), OURS, Verdict.OWN),
        (Met("B", 2, mariadb=True, executed="0-1-500,0-2-503", kin=True), OURS, Verdict.FAILOVER),
        # A replica of another shop, which has written more: numbers alone are no evidence.
        (Met("B", 2, mariadb=True, executed="0-1-500,0-2-503"), OURS, Verdict.STRANGER),
        (Met("B", 2, mariadb=True, executed="0-1-499,0-2-503", kin=True), OURS, Verdict.STRANGER),
        (Met("B", 2, mariadb=True, executed="0-1-499,0-2-503"), OURS, Verdict.STRANGER),
        (Met("B", 2, mariadb=True, executed="0-2-900"), OURS, Verdict.STRANGER),
        (Met("B", 1, mariadb=True, executed="0-1-900"), OURS, Verdict.STRANGER),
        (Met("B", 1, mariadb=True, executed="0-1-900"), replace(OURS, server_id=0), Verdict.STRANGER),
        # From a replica back to its source: that has another number than the one that was there.
        (Met("B", 1, mariadb=True, executed="0-1-900", kin=True), replace(OURS, server_id=2), Verdict.FAILOVER),
        (Met("B", 2, mariadb=True, executed="0-1-400,0-2-500", forked=True), OURS, Verdict.FAILOVER),
        (Met("B", 1, mariadb=True, restored_from="shop"), OURS, Verdict.OWN),
        (Met("B", 1, mariadb=True, restored_from="other"), OURS, Verdict.STRANGER),
        (Met("B", 1, mariadb=True, same_log=True), OURS, Verdict.OWN),
        (Met("B", 2, mariadb=False, executed=f"{SOURCE}:1-77"), Archived(f"{SOURCE}:1-77"), Verdict.FAILOVER),
        (Met("B", 2, mariadb=False, executed=f"{SOURCE}:1-76"), Archived(f"{SOURCE}:1-77"), Verdict.STRANGER),
        (Met("B", 2, mariadb=False, executed=f"{SOURCE}:1-76"), OURS, Verdict.STRANGER),
        (Met("B", 2, mariadb=True), OURS, Verdict.STRANGER),
        (Met("B", 2, mariadb=True, executed="0-1-900"), Archived(), Verdict.STRANGER),
    ],
)
def test_who_does_not_show_that_it_goes_on_from_what_is_here_is_a_stranger(
    met: Met, archived: Archived, verdict: Verdict
) -> None:
    found, why = judge("shop", KNOWN, met, archived)
    assert found is verdict
    assert why or met.uuid == "A"


def test_the_first_server_of_all_is_the_right_one_and_a_stranger_stays_one() -> None:
    met = Met("B", 1, mariadb=True)
    assert judge("shop", (), met, Archived())[0] is Verdict.OWN
    known = (*KNOWN, Identity("shop", "B", Verdict.STRANGER, AT, AT))
    assert judge("shop", known, met, OURS)[0] is Verdict.STRANGER


def test_backups_of_a_stranger_stand_aside_though_they_were_made_here() -> None:
    records = [backup("a1", 1, "A", made=True), replace(backup("b1", 2, "B", made=True), apart=True)]
    (found,) = strangers(records)
    assert (found.uuid, found.ours, found.apart, found.former) == ("B", "A", True, False)
    assert lineages(records) == {"a1": "", "b1": "B"}
    assert standing_aside(records, latest=False) == (found,)


def test_a_catalog_that_is_made_anew_knows_strangers_by_what_their_newest_backup_says() -> None:
    strange = replace(backup("b1", 2, "B"), reason=f"{STRANGER}: B")
    assert set(strangers_by_backups([backup("a1", 1, "A"), strange])) == {"B"}
    assert strangers_by_backups([strange, backup("b2", 3, "B")]) == {}
    after = [replace(one, apart=one.server_uuid == "B") for one in (backup("a1", 1, "A"), strange)]
    assert standing_aside(after, latest=True)[0].backups == ("b1",)
