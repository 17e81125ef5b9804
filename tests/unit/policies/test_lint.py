"""Advice: what is valid, and still will not do what its owner hopes."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.handed import Loaded
from policies.lint import CROWD, advice, crowds, not_yet_active
from policies.load import load
from policies.policy import Policy
from policies.reference import example
from tests.support.catalog.configuration_files import CONFIGURATION, example_configuration, write

COMPLETE = """\
physical: {full: "0 2 * * sun", incremental: "0 2 * * mon-sat"}
logical: {schedule: "0 4 * * *"}
binlog: {stream: true, checkpoint: 10s}
config_files: [/etc/mysql]
destinations: {required: [local, offsite]}
retention: {local: {recovery_window: 7d}, offsite: {daily: 10}}
objectives: {rpo: 60s}
test_restore: {schedule: "0 6 * * *"}
verify: {schedule: "0 12 * * *"}
"""

TWO = CONFIGURATION.replace("encryption:", "  offsite: {type: s3, bucket: acme-backups}\nencryption:")


def loaded(folder: Path, text: str, configuration: str = TWO) -> Loaded:
    return load(write(folder, configuration, gold=text))


def advised(folder: Path, text: str, configuration: str = TWO) -> list[str]:
    found = loaded(folder, text, configuration)
    return advice(found.policies["gold"], found.configuration)


def changed(old: str, new: str) -> str:
    assert old in COMPLETE
    return COMPLETE.replace(old, new)


def test_a_complete_policy_gets_no_advice(tmp_path: Path) -> None:
    assert advised(tmp_path, COMPLETE) == []


def test_the_examples_are_advised_what_they_leave_out_on_purpose(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        example_configuration(tmp_path / "policies"),
        gold=example("gold"),
        physical=example("physical-only"),
        weekly=example("weekly-logical"),
    )
    policies = load(path).policies
    assert advice(policies["gold"]) == []
    assert [line.partition(":")[0] for line in advice(policies["physical"])] == ["logical", "binlog", "destinations"]
    assert [line.partition(":")[0] for line in advice(policies["weekly"])] == ["physical", "destinations"]


@pytest.mark.parametrize(
    ("section", "field"),
    [("logical", "logical"), ("config_files", "config_files"), ("test_restore", "test_restore"), ("verify", "verify")],
)
def test_each_missing_part_is_named(tmp_path: Path, section: str, field: str) -> None:
    lines = [line for line in COMPLETE.splitlines() if not line.startswith(f"{section}:")]
    assert [text.partition(":")[0] for text in advised(tmp_path, "\n".join(lines) + "\n")] == [field]


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ('test_restore: {schedule: "0 6 * * *"}', "test_restore: {target: random}", "test_restore.schedule", "nobody"),
        (
            "offsite: {daily: 10}",
            "offsite: {daily: 3}",
            "retention.offsite",
            "reaches back 3d, the recovery window of local 7d",
        ),
        ("offsite: {daily: 10}", "offsite: {hourly: 48}", "retention.offsite", "reaches back 2d"),
        (
            'full: "0 2 * * sun"',
            'full: "0 2 1 * *", max_chain: 40',
            "retention.local.recovery_window",
            "less than the time between two full backups (31d)",
        ),
        (
            'full: "0 2 * * sun"',
            'full: "0 2 * * sun", max_chain: 5',
            "physical.max_chain",
            "at most 5 increments, but up to 6 are due",
        ),
        ('incremental: "0 2 * * mon-sat"', "incremental: every 1h", "physical.max_chain", "up to 167 are due"),
        (
            'verify: {schedule: "0 12 * * *"}',
            'verify: {schedule: "0 6,18 * * *"}\nretry: {pause: 5h, attempts: 5}',
            "retry",
            "waits up to 1d before the last attempt, longer than the time between two runs of verify",
        ),
        ("rpo: 60s", "rpo: 5s", "objectives.rpo", "stored every 10.0s"),
    ],
)
def test_one_weakness_is_one_piece_of_advice(tmp_path: Path, old: str, new: str, field: str, words: str) -> None:
    text = (
        changed(old, new).replace('logical: {schedule: "0 4 * * *"}', 'logical: {schedule: "0 4 1 * *"}')
        if "1 * *" in new
        else changed(old, new)
    )
    found = advised(tmp_path, text)
    assert [one.partition(": ")[0] for one in found] == [field]
    assert words in found[0]


@pytest.mark.parametrize("binlog", ["", "binlog: {stream: false}\n"])
def test_a_window_and_an_rpo_without_the_binary_log_are_promises_nobody_keeps(tmp_path: Path, binlog: str) -> None:
    found = advised(tmp_path, changed("binlog: {stream: true, checkpoint: 10s}\n", binlog))
    assert [one.partition(": ")[0] for one in found if not one.startswith("binlog")] == [
        "retention.local.recovery_window",
        "objectives.rpo",
    ]
    assert "promises every moment of the last 7d" in "".join(found)
    assert "all data since the last backup is lost, up to 1d" in found[-1]


def test_a_window_without_any_full_backup_is_named(tmp_path: Path) -> None:
    lines = [line for line in COMPLETE.splitlines() if not line.startswith(("physical", "logical"))]
    assert any("no full backup is taken" in text for text in advised(tmp_path, "\n".join(lines) + "\n"))


def test_what_needs_the_binary_log_is_named_where_none_is_streamed(tmp_path: Path) -> None:
    text = changed("binlog: {stream: true, checkpoint: 10s}\n", "binlog: {stream: false}\n").replace(
        'schedule: "0 6 * * *"', 'schedule: "0 6 * * *", target: "2026-11-21T09:41:03Z"'
    )
    fields = [one.partition(": ")[0] for one in advised(tmp_path, text + 'witness: {schedule: "0 */6 * * *"}\n')]
    assert {"test_restore.target", "witness.schedule"} <= set(fields)
    fields = [one.partition(": ")[0] for one in advised(tmp_path, COMPLETE + 'witness: {schedule: "0 */6 * * *"}\n')]
    assert fields == []


def test_a_policy_of_dumps_is_told_that_they_are_not_restored_for_a_test(tmp_path: Path) -> None:
    policy = loaded(
        tmp_path, "\n".join(line for line in COMPLETE.splitlines() if not line.startswith("physical"))
    ).policies["gold"]
    assert [line.partition(":")[0] for line in not_yet_active(policy)] == ["test_restore"]


def test_only_folders_is_no_off_site_copy(tmp_path: Path) -> None:
    disks = TWO.replace("{type: s3, bucket: acme-backups}", "{type: filesystem, path: /mnt/nas}")
    assert [text.partition(":")[0] for text in advised(tmp_path, COMPLETE, disks)] == ["destinations"]
    assert advice(loaded(tmp_path, COMPLETE, disks).policies["gold"]) == []
    away = disks.replace("path: /mnt/nas}", "path: /mnt/nas, off_site: true}")
    assert advised(tmp_path, COMPLETE, away) == []
    for wanted, field in (("{copies: 3}", "protection.copies"), ("{off_site: 2}", "protection.off_site")):
        told = advised(tmp_path, f"{COMPLETE}protection: {wanted}\n", away)
        assert [text.partition(":")[0] for text in told] == [field]


def test_one_destination_may_be_a_decision(tmp_path: Path) -> None:
    one = COMPLETE.replace("[local, offsite]", "[local]").replace(", offsite: {daily: 10}", "")
    for protection in ("", "protection: {copies: 1}\n", "protection: {off_site: 0}\n"):
        assert [text.partition(":")[0] for text in advised(tmp_path, one + protection)] == ["destinations"]
    assert advised(tmp_path, f"{one}protection: {{copies: 1, off_site: 0}}\n") == []


def _servers(number: int) -> str:
    names = ", ".join(f"db{one}: {{policy: gold}}" for one in range(number))
    return TWO.replace("servers:\n  db1: {policy: gold}\n", f"servers: {{{names}}}\n")


def test_many_servers_in_the_same_minute_are_told_to_spread(tmp_path: Path) -> None:
    found = loaded(tmp_path, COMPLETE, _servers(CROWD))
    texts = crowds(found.configuration, found.policies)
    assert [text.partition(";")[0] for text in texts] == [
        f"timing.jitter: {CROWD} servers start in the same minute (gold: {field})"
        for field in (
            "physical.full",
            "physical.incremental",
            "logical.schedule",
            "test_restore.schedule",
            "verify.schedule",
        )
    ]
    few = loaded(tmp_path, COMPLETE, _servers(CROWD - 1))
    assert crowds(few.configuration, few.policies) == []
    spread = loaded(tmp_path, COMPLETE + "timing: {jitter: 10m}\n", _servers(CROWD))
    assert crowds(spread.configuration, spread.policies) == []


def test_the_same_minute_of_different_days_is_no_crowd(tmp_path: Path) -> None:
    configuration = _servers(5).replace("db4: {policy: gold}", "db4: {policy: silver}")
    path = write(
        tmp_path,
        configuration,
        gold='physical: {full: "0 2 * * mon"}\ndestinations: {required: [local]}\n',
        silver='physical: {full: "0 2 * * sun"}\ndestinations: {required: [local]}\n',
    )
    found = load(path)
    assert crowds(found.configuration, found.policies) == []


def test_servers_of_several_policies_count_together(tmp_path: Path) -> None:
    configuration = _servers(5).replace("db4: {policy: gold}", "db4: {policy: silver}")
    path = write(
        tmp_path,
        configuration,
        gold='physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n',
        silver='physical: {full: "0 2 * * sun"}\ndestinations: {required: [local]}\n',
    )
    found = load(path)
    assert crowds(found.configuration, found.policies) == [
        (
            "timing.jitter: 5 servers start in the same minute (gold: physical.full, silver: physical.full); a jitter "
            "spreads them"
        )
    ]


def test_a_policy_with_the_least_is_advised_all_the_rest() -> None:
    least = Policy.model_validate({"binlog": {}, "destinations": {"required": ["local"]}})
    assert [text.partition(":")[0] for text in advice(least)] == [
        "physical",
        "logical",
        "config_files",
        "destinations",
        "test_restore",
        "verify",
        "binlog",
    ]
