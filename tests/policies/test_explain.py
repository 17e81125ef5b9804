from __future__ import annotations

from pathlib import Path

import pytest

from policies.explain import explain, when
from policies.load import load_policy
from policies.reference import example


def test_a_policy_is_told_in_sentences(tmp_path: Path) -> None:
    (tmp_path / "gold.yaml").write_text(example("gold"), encoding="utf-8")
    assert explain(load_policy(tmp_path / "gold.yaml")) == [
        "A full copy of the data files is taken at 02:00 on sun.",
        "A copy of what changed since the one before is taken at 02:00 on mon-sat.",
        "The tables shop.* except shop.audit_*, none above 2.0 GiB are dumped at 04:00 every day.",
        "The binary log is followed as it is written and stored every 10.0s.",
        "/etc/mysql, /usr/local/bin/rotate-audit are kept with each backup.",
        "A backup succeeds only when it is at local.",
        "Afterwards it is copied to offsite and to vault.",
        "local keeps every moment of the last 7d, and the newest 2 full backups.",
        ("offsite keeps the last backup of each of 7 days, and the last backup of each of 5 weeks, "
         "and the last backup of each of 12 months."),
        "vault keeps the last backup of each of 36 months, and the last backup of each of 7 years.",
        "At most 1m of work may be lost.",
        "A restore may take 2h.",
        "A test restore to random is made at 06:00 every day, with 1 SQL check.",
        "With each full backup the source's tables are summed up for comparison, for at most 10m.",
    ]


@pytest.mark.parametrize(("cron", "words"), [
    ("5 0 1 * *", "at 00:05 on day 1 of each month"), ("*/5 * * * *", "on the schedule `*/5 * * * *`"),
    ("0 0 1 1 *", "on the schedule `0 0 1 1 *`"), ("0 0 1 * mon", "on the schedule `0 0 1 * mon`")])
def test_times_are_told_where_they_are_simple(cron: str, words: str) -> None:
    assert when(cron) == words
