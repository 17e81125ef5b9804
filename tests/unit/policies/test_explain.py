from __future__ import annotations

from pathlib import Path

import pytest

from policies.lint import explain, when
from policies.reference import example
from tests.support.policies import load_policy


def test_a_policy_is_told_in_sentences(tmp_path: Path) -> None:
    (tmp_path / "gold.yaml").write_text(example("gold"), encoding="utf-8")
    assert explain(load_policy(tmp_path / "gold.yaml")) == [
        "A full copy of the data files is taken at 02:00 on sun.",
        (
            "A copy of what changed since the one before is taken at 02:00 on mon-sat; after 7 of them a full one is "
            "taken instead."
        ),
        "The tables shop.* except shop.audit_*, none above 2.0 GiB are dumped at 04:00 every day.",
        (
            "Commits wait for a dump for at most 1.0s; a dump in which single tables could not be read is kept "
            "and counts "
            "as failed and is tried again."
        ),
        "The binary log is followed as it is written and stored every 10.0s; at most 10.0 GiB wait in the spool.",
        "/etc/mysql, /usr/local/bin/rotate-audit are kept with each backup.",
        "A backup succeeds only when it is at local.",
        "Afterwards it is copied to offsite and to vault.",
        "local keeps every moment of the last 7d, and the newest 2 full backups.",
        (
            "offsite keeps the last backup of each of 7 days, and the last backup of each of 5 weeks, "
            "and the last backup of each of 12 months."
        ),
        "vault keeps the last backup of each of 36 months, and the last backup of each of 7 years.",
        "Recovery point objective (RPO): at most 1m of data may be lost.",
        "Recovery time objective (RTO): a restore may take at most 2h.",
        "A test restore to random is made at 06:00 every day, with 1 SQL check.",
        "10 % of all that is stored is read again and compared at 12:00 every day.",
        "With each full backup the source's tables are summed up for comparison, for at most 10m.",
        "Times are those of Europe/Berlin.",
        "Each run starts up to 20m later, always the same for one server.",
        "Nothing starts in mon-fri 08:00-11:30; what is due then starts at its end.",
        (
            "A run that fails for a reason that may pass is tried 4 times in all, the second time after 5m, then "
            "twice as "
            "long each time."
        ),
        "At most 400.0 MiB a second are read from the server's disks.",
        "At most 200.0 MiB a second are written to each destination.",
        "The work runs at processor priority 10.",
        (
            "It pauses while a replica is more than 1m behind, or while the disk takes more than 50 ms for a "
            "request, and "
            "gives up after 30m of pauses."
        ),
        "A run without any progress for 30m is stopped and counts as failed.",
    ]


def test_sets_of_tables_are_told_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        """\
logical:
  partial: accepted
  repair: true
  sets:
    money: {schedule: "every 1h", tables: {include: ["shop.pay_*", shop.orders]}}
    rest: {schedule: "0 3 * * sun", tables: {exclude: ["shop.pay_*"]}}
destinations: {required: [local]}
""",
        encoding="utf-8",
    )
    assert explain(load_policy(tmp_path / "x.yaml"))[:4] == [
        "Of the set money, the tables shop.pay_*, shop.orders are dumped every 1h.",
        "Of the set rest, the tables *.* except shop.pay_* are dumped at 03:00 on sun.",
        (
            "Commits wait for a dump for at most 1.0s; a dump in which single tables could not be read is kept and is "
            "accepted, with a warning."
        ),
        "Damaged MyISAM and Aria tables are repaired before they are dumped.",
    ]


def test_what_is_left_out_is_told_as_it_will_be(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        """\
physical: {full: "every 6h"}
destinations: {required: [local, near]}
retention: {near: {keep_fulls: 1, hourly: 24}}
verify: {schedule: "0 1 * * *"}
timing: {catch_up: false}
retry: {attempts: 1}
witness: {enabled: false}
""",
        encoding="utf-8",
    )
    assert explain(load_policy(tmp_path / "x.yaml")) == [
        "A full copy of the data files is taken every 6h.",
        "A backup succeeds only when it is at local and at near.",
        "local keeps everything.",
        "near keeps the newest full backup, and the last backup of each of 24 hours.",
        "All that is stored is read again and compared at 01:00 every day.",
        "A run that was missed is not made up for.",
        "A run that fails is not repeated.",
        "A run without any progress for 30m is stopped and counts as failed.",
    ]


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("5 0 1 * *", "at 00:05 on day 1 of each month"),
        ("*/5 * * * *", "on the schedule `*/5 * * * *`"),
        ("0 0 1 1 *", "on the schedule `0 0 1 1 *`"),
        ("0 0 1 * mon", "on the schedule `0 0 1 * mon`"),
    ],
)
def test_times_are_told_where_they_are_simple(cron: str, words: str) -> None:
    assert when(cron) == words
