"""Configuration and policies: what is right loads, what is wrong is all said at once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import BaseModel

from backupd.model.errors import ConfigurationError
from policies.configuration import Configuration
from policies.fields import Section
from policies.load import load
from policies.policy import NO_LOGICAL_INCREMENTS, Policy
from restore.planning.target import parse_target
from tests.support.catalog.configuration_files import CONFIGURATION, POLICY, example_configuration, problems, write
from tests.support.policies import load_policy

DESIGN_POLICY = """\
physical: {full: "0 2 * * sun", incremental: "0 2 * * mon-sat"}
logical:  {schedule: "0 4 * * *", tables: {include: ["shop.*"], exclude: ["shop.audit_*"], max_size: 2GiB}}
binlog:   {stream: true, checkpoint: 10s}
config_files: [/etc/mysql, /usr/local/bin/rotate-audit]
destinations: {required: [local], others: [offsite, vault]}
retention:
  local:   {recovery_window: 7d, keep_fulls: 2}
  offsite: {daily: 7, weekly: 5, monthly: 12}
  vault:   {monthly: 36, yearly: 7}
objectives: {rpo: 60s, rto: 2h}
test_restore:
  schedule: "0 6 * * *"
  target: random
  checks:
    - sql: "SELECT COUNT(*) > 0 FROM shop.orders WHERE created_at > {target} - INTERVAL 1 DAY"
"""

DESIGN_CONFIGURATION = """\
catalog: sqlite:////var/lib/backupd/catalog.db
spool: /var/lib/backupd/spool
policies: {policies}
servers:
  shop-db1: {{socket: /run/mysqld/mysqld.sock, defaults_file: /etc/backupd/shop-db1.cnf, policy: gold}}
destinations:
  local:   {{type: filesystem, path: /srv/backups}}
  offsite: {{type: s3, bucket: acme-backups, prefix: prod, storage_class: STANDARD_IA}}
  vault:   {{type: s3, bucket: acme-vault, storage_class: DEEP_ARCHIVE}}
encryption: {{gnupg_home: /etc/backupd/gnupg, recipients: [ops@example.com]}}
restore: {{gnupg_home: /etc/gnupg-restore, scratch: {{path: /srv/scratch, max_bytes: 500GiB, memory: 2GiB}}}}
alerts:
  email: {{smtp: "smtp://localhost:25", from: backupd@example.com, to: [dba@example.com]}}
api: {{listen: "127.0.0.1:8642"}}
"""


def test_the_contract_s_examples_load_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path, DESIGN_CONFIGURATION.format(policies=tmp_path / "policies"), gold=DESIGN_POLICY)
    loaded = load(path)
    configuration, gold = loaded.configuration, loaded.policies["gold"]
    assert configuration.catalog == "sqlite:////var/lib/backupd/catalog.db"
    assert configuration.restore is not None
    assert configuration.restore.scratch.max_bytes == 500 * 1024**3
    assert configuration.restore.scratch.memory == 2 * 1024**3
    assert configuration.alerts.email is not None
    assert configuration.alerts.email.sender == "backupd@example.com"
    assert configuration.servers["shop-db1"].owner == "mysql"
    assert gold.physical is not None
    assert gold.physical.parallel == 2
    assert gold.objectives.rto == timedelta(hours=2)
    assert gold.logical is not None
    assert gold.logical.tables.max_size == 2 * 1024**3
    assert gold.retention["vault"].monthly == 36
    assert gold.test_restore is not None
    assert gold.test_restore.checks[0].sql.startswith("SELECT COUNT(*) > 0")
    assert gold.witness.enabled
    assert gold.witness.max_duration == timedelta(minutes=10)


def test_the_shipped_example_of_a_configuration_loads(tmp_path: Path) -> None:
    path = write(tmp_path, example_configuration(tmp_path / "policies"), gold=DESIGN_POLICY)
    assert problems(path) == []


def test_what_is_left_out_has_defaults_and_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    text = CONFIGURATION + "catalog: sqlite:///state/catalog.db\nspool: ../spool\n"
    loaded = load(write(tmp_path, text))
    configuration = loaded.configuration
    assert configuration.catalog == f"sqlite:///{tmp_path}/state/catalog.db"
    assert configuration.spool == tmp_path.parent / "spool"
    assert configuration.policies == tmp_path / "policies"
    assert configuration.encryption.gnupg_home == tmp_path / "gnupg"
    assert configuration.restore is None
    assert configuration.api.listen == "127.0.0.1:8642"
    policy = loaded.policies["gold"]
    assert policy.test_restore is None
    assert policy.objectives.rto is None


def test_every_problem_of_every_file_is_said_at_once_with_its_line(tmp_path: Path) -> None:
    configuration = """\
catalog: mysql://x
server:
  db1: {}
servers:
  db1: {sockt: /x, policy: gold}
  "bad name": {policy: gold}
  db2: {policy: glod, password: geheim}
destinations:
  local: {type: filesytem, path: /srv}
  near: {type: filesystem}
  far: {path: /x}
  "": {type: filesystem, path: /}
encryption: {recipients: []}
restore: {gnupg_home: g, scratch: {memory: lots}}
api: {listen: 8642}
"""
    policy = """\
physical: {full: "0 25 * * *", paralel: 3}
logical: {schedule: "0 4 * * *", incremental: true, tables: {include: [shop]}}
destinations: {required: [lokal]}
retention:
  lokal: {}
  other: {daily: 0}
objectives: {rto: soon}
test_restore: {checks: [{sql: "SELECT {taget}"}, {}]}
"""
    path = write(tmp_path, configuration, gold=policy, broken="a: [\n", empty="")
    found = problems(path)
    assert {(file, line, name) for file, line, name, _message in found} >= {
        ("backupd.yaml", 1, "catalog"),
        ("backupd.yaml", 2, "server"),
        ("backupd.yaml", 5, "servers.db1.sockt"),
        ("backupd.yaml", 6, "servers.bad name"),
        ("backupd.yaml", 7, "servers.db2.policy"),
        ("backupd.yaml", 7, "servers.db2.password"),
        ("backupd.yaml", 9, "destinations.local"),
        ("backupd.yaml", 10, "destinations.near.path"),
        ("backupd.yaml", 11, "destinations.far"),
        ("backupd.yaml", 12, "destinations."),
        ("backupd.yaml", 12, "destinations..path"),
        ("backupd.yaml", 13, "encryption.gnupg_home"),
        ("backupd.yaml", 13, "encryption.recipients"),
        ("backupd.yaml", 14, "restore.scratch.memory"),
        ("backupd.yaml", 15, "api.listen"),
        ("gold.yaml", 1, "physical.full"),
        ("gold.yaml", 1, "physical.paralel"),
        ("gold.yaml", 2, "logical.incremental"),
        ("gold.yaml", 2, "logical.tables.include[0]"),
        ("gold.yaml", 3, "destinations.required[0]"),
        ("gold.yaml", 5, "retention.lokal"),
        ("gold.yaml", 6, "retention.other"),
        ("gold.yaml", 6, "retention.other.daily"),
        ("gold.yaml", 7, "objectives.rto"),
        ("gold.yaml", 8, "test_restore.checks[0].sql"),
        ("gold.yaml", 8, "test_restore.checks[1].sql"),
        ("broken.yaml", 2, ""),
        ("empty.yaml", 1, ""),
    }
    messages = {name: message for _file, _line, name, message in found}
    assert "did you mean `servers`?" in messages["server"]
    assert "did you mean `socket`?" in messages["servers.db1.sockt"]
    assert "did you mean `gold`?" in messages["servers.db2.policy"]
    assert "password_file" in messages["servers.db2.password"]
    assert "did you mean `filesystem`?" in messages["destinations.local"]
    assert "did you mean `parallel`?" in messages["physical.paralel"]
    assert messages["logical.incremental"] == NO_LOGICAL_INCREMENTS
    assert "did you mean `local`?" in messages["destinations.required[0]"]
    assert "GnuPG's home" in messages["encryption.gnupg_home"]
    assert "not a duration" in messages["objectives.rto"]
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert f"{path}:5: servers.db1.sockt: is not known here" in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("servers: {db1: {policy: gold, socket: /a, host: b}}", "servers.db1", "both socket and host"),
        ("servers: {db1: {policy: gold, port: 1}}", "servers.db1", "port but no host"),
        ("servers: {db1: {policy: gold, host: b, port: 70000}}", "servers.db1.port", "less than or equal to 65535"),
        ("servers: {db1: {policy: gold, password_file: a, password_env: B}}", "servers.db1", "both password_file"),
        ("servers: {db1: {policy: [gold]}}", "servers.db1.policy", "must be text"),
        ("servers: {db1: }", "servers.db1", "must be a mapping"),
        ("servers: [db1]", "servers", "must be a mapping"),
        ("servers: {../x: {policy: gold}}", "servers.../x", "is not a name"),
        ("destinations: {}", "destinations", "must not be empty"),
        (
            "destinations: {local: {type: s3, bucket: acme, secret_access_key: geheim}}",
            "destinations.local.secret_access_key",
            "credentials_file",
        ),
        (
            "destinations: {local: {type: s3, bucket: acme, storage_class: COLD}}",
            "destinations.local.storage_class",
            "must be 'STANDARD'",
        ),
        (
            "destinations: {local: {type: filesystem, path: /x, bucket: y}}",
            "destinations.local.bucket",
            "not known here; known: max_download, max_upload, off_site, path, type",
        ),
        ("destinations: {local: {type: [1], path: /x}}", "destinations.local", "is not known"),
        ("destinations: {local: /srv}", "destinations.local", "must be a mapping"),
        (
            "destinations: {local: {type: filesystem, path: ~/backups}}",
            "destinations.local.path",
            "'~' is not expanded",
        ),
        ("catalog: postgresql://me:geheim@db/x", "catalog", "secrets stay out"),
        ("catalog: postgresql://me@db/x?password=geheim", "catalog", "secrets stay out"),
        ("catalog: sqlite://", "catalog", "path of a file"),
        ("catalog: 5", "catalog", "must be a URL"),
        ("catalog: /var/lib/catalog.db", "catalog", "sqlite:////var/lib"),
        ("alerts: {email: {smtp: 'smtp://a:geheim@h', from: a@b, to: [c@d]}}", "alerts.email.smtp", "password_file"),
        ("alerts: {email: {smtp: 'mail.example.com', from: a@b, to: [c@d]}}", "alerts.email.smtp", "smtp://HOST"),
        ("alerts: {email: {smtp: 'smtp://h', from: ab, to: [c@d]}}", "alerts.email.from", "not a mail address"),
        ("api: {listen: '127.0.0.1:99999'}", "api.listen", "ADDRESS:PORT"),
        ("api: {listen: '0:99'}", "api.listen", "ADDRESS:PORT"),
        ("api: {listen: '::1:80'}", "api.listen", "ADDRESS:PORT"),
        ("api: {listen: '127.1:80'}", "api.listen", "ADDRESS:PORT"),
        ("api: {listen: '0x7f.1:80'}", "api.listen", "ADDRESS:PORT"),
        ("api: {listen: '[127.0.0.1]:80'}", "api.listen", "ADDRESS:PORT"),
        ("api: {listen: '*:80'}", "api.listen", "ADDRESS:PORT"),
        ("restore: {gnupg_home: g, scratch: {max_bytes: 0}}", "restore.scratch.max_bytes", "more than 0"),
        (
            "restore: {gnupg_home: g, scratch: {max_bytes: " + "9" * 400 + "P}}",
            "restore.scratch.max_bytes",
            "8 EiB",
        ),
        ("restore: {gnupg_home: g, scratch: {max_bytes: true}}", "restore.scratch.max_bytes", "not a size"),
        ("restore: {gnupg_home: g, passphrase: geheim}", "restore.passphrase", "passphrase_file"),
        ("policies: nowhere", "policies", "does not exist"),
        ("policies: backupd.yaml", "policies", "cannot be read"),
        ("policies: ~x", "policies", "'~' is not expanded"),
    ],
)
def test_one_mistake_in_the_configuration_is_one_problem(tmp_path: Path, text: str, field: str, message: str) -> None:
    key = text.partition(":")[0]
    lines = [line for line in CONFIGURATION.replace("\n  ", "\0").splitlines() if not line.startswith(f"{key}:")]
    path = write(tmp_path, "\n".join([*lines, text]).replace("\0", "\n  ") + "\n")
    found = [problem for problem in problems(path) if problem[0] == "backupd.yaml"]
    assert len(found) == 1, found
    assert found[0][1] == len(path.read_text().splitlines())
    assert (found[0][2], message in found[0][3]) == (field, True), found
    assert "geheim" not in str(found)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("physical: {full: never}", "physical.full", "5 fields"),
        ("physical: {full: 5}", "physical.full", "must be text"),
        ("physical: {}", "physical.full", "is missing: When full backups"),
        ('physical: {full: "0 2 * * *", parallel: 0}', "physical.parallel", "greater than or equal to 1"),
        ('physical: {full: "0 2 * * *", parallel: 1.5}', "physical.parallel", "whole number"),
        ('physical: {full: "0 2 30 2 *"}', "physical.full", "never matches"),
        ('logical: {schedule: "0 2 * * *", incremental: false}', "logical.incremental", "weekly-logical"),
        ("logical: {}", "logical", "is never done: give it a schedule, or sets"),
        (
            'logical: {tables: {include: ["a.b"]}, sets: {m: {schedule: "0 2 * * *", tables: {include: ["a.b"]}}}}',
            "logical",
            "no schedule says when these are dumped",
        ),
        ('logical: {sets: {money: {schedule: "0 2 * * *"}}}', "logical.sets.money.tables", "is missing: Which tables"),
        ('logical: {sets: {money: {tables: {include: ["a.b"]}}}}', "logical.sets.money.schedule", "is missing: When"),
        ('logical: {sets: {"a b": {schedule: "0 2 * * *", tables: {}}}}', "logical.sets.a b", "is not a name"),
        (
            "logical: {sets: {" + "x" * 49 + ': {schedule: "0 2 * * *", tables: {}}}}',
            "logical.sets." + "x" * 49,
            "at most 48 characters",
        ),
        (
            'logical: {sets: {m: {schedule: "0 2 * * *", tables: {}, incrementals: 1}}}',
            "logical.sets.m.incrementals",
            "weekly-logical",
        ),
        ('logical: {schedule: "0 2 * * *", partial: maybe}', "logical.partial", "'failed' or 'accepted'"),
        ('logical: {schedule: "0 2 * * *", max_lock: 31s}', "logical.max_lock", "less than or equal to 30 seconds"),
        ('logical: {schedule: "0 2 * * *", chunk: 4KiB}', "logical.chunk", "greater than or equal to 1048576"),
        ('logical: {schedule: "0 2 * * *", threads: 0}', "logical.threads", "greater than or equal to 1"),
        ('logical: {schedule: "0 2 * * *", on_long_queries: kill}', "logical.on_long_queries", "'wait' or 'fail'"),
        (
            'logical: {schedule: "0 2 * * *", tables: {include: ["a.b", "orders"]}}',
            "logical.tables.include[1]",
            "write schema.table",
        ),
        ("binlog: {checkpoint: 10}", "binlog.checkpoint", "not a duration"),
        ("binlog: {checkpoint: 0s}", "binlog.checkpoint", "longer than 0s"),
        ("binlog: {checkpoint: " + "9" * 30 + "d}", "binlog.checkpoint", "too long"),
        ("binlog: {stream: sometimes}", "binlog.stream", "true or false"),
        ("destinations: {}", "destinations.required", "is missing"),
        ("destinations: {required: []}", "destinations.required", "must not be empty"),
        ("destinations: {required: local}", "destinations.required", "must be a list"),
        ("destinations: {required: [local], others: [local]}", "destinations", "named more than once"),
        ("retention: {local: {}}", "retention.local", "keeps nothing"),
        ("retention: {lokal: {daily: 1}}", "retention.lokal", "did you mean `local`?"),
        ("config_files: [relative, 5]", "config_files[1]", "must be text"),
        ('test_restore: {target: ""}', "test_restore.target", "is not a target"),
        ("test_restore: {target: yesterday}", "test_restore.target", "write latest, random, backup:ID"),
        ("test_restore: {target: 2026-11-21T09:41:03}", "test_restore.target", "is not a target"),
        ("test_restore: {target: random@main}", "test_restore.target", "is not a target"),
        ('physical: {full: "every 30s"}', "physical.full", "at least every 1m"),
        ('physical: {full: "every soon"}', "physical.full", "not a duration"),
        ('physical: {full: "every 367d"}', "physical.full", "too seldom: at most every 366d"),
        ('physical: {full: "every 3000000d"}', "physical.full", "too long a time"),
        ('physical: {full: "0 2 * * *", max_chain: ' + "9" * 5000 + "}", "physical.max_chain", "is too large a number"),
        ("retry: {pause: 25h}", "retry.pause", "less than or equal to 1 day"),
        ("limits: {hang: 36526d}", "limits.hang", "at most 36525d, a hundred years"),
        ("limits: {hang: " + "9" * 5000 + "d}", "limits.hang", "9...' is too long a time"),
        ('physical: {incremental: "0 2 * * *"}', "physical.full", "is missing: When full backups"),
        (
            'physical: {full: "0 2 * * *", incremental: "0 3 * * *", max_chain: 0}',
            "physical.max_chain",
            "max_chain is 0",
        ),
        ('timing: {blackout: ["01:00-03:00"]}', "timing.blackout", "covers every time of physical.full (`0 2 * * *`)"),
        ('timing: {blackout: ["00:00-24:00"]}', "timing.blackout", "leave some time of the week free"),
        ('timing: {blackout: ["sun-sat 22:00-02:01"]}', "timing.blackout", "move the schedule, or cut the window"),
        ('timing: {blackout: ["someday 01:00-03:00"]}', "timing.blackout[0]", "is not a window"),
        ('timing: {blackout: ["fri-mon 01:00-03:00"]}', "timing.blackout[0]", "two ranges"),
        ('timing: {blackout: ["03:00-03:00"]}', "timing.blackout[0]", "is empty"),
        ("timing: {jitter: 25h}", "timing.jitter", "1d 1h is longer than the time between two runs of physical.full"),
        ("timing: {timezone: Europe/Paris2}", "timing.timezone", "is not a time zone"),
        ("timing: {jiter: 1m}", "timing.jiter", "did you mean `jitter`?"),
        ("retry: {attempts: 0}", "retry.attempts", "greater than or equal to 1"),
        ("limits: {nice: 20}", "limits.nice", "less than or equal to 19"),
        ("limits: {disk_latency: 0ms}", "limits.disk_latency", "longer than 0s"),
        ("limits: {read: fast}", "limits.read", "is not a size"),
        ('verify: {schedule: "0 1 * * *", subset: 10}', "verify.subset", "write 10%"),
        ('verify: {schedule: "0 1 * * *", subset: 110%}', "verify.subset", "write 10%"),
        (
            "verify: {subset: 10%}",
            "verify.schedule",
            'is missing: When a share of what is stored is read again, for example schedule: "0 12 * * *"',
        ),
        ("password: geheim", "password", "secrets do not belong"),
        ("schedule: daily", "schedule", "each leg has its own"),
        ("binlog: {checkpoint: 500ms}", "binlog.checkpoint", "greater than or equal to 1 second"),
        ("binlog: {checkpoint: 2h}", "binlog.checkpoint", "less than or equal to 1 hour"),
        ("binlog: {max_spool: 1MiB}", "binlog.max_spool", "greater than or equal to 67108864"),
        ('witness: {enabled: false, schedule: "0 3 * * *"}', "witness.schedule", "leave out one of the two"),
        ('witness: {schedule: "sometimes"}', "witness.schedule", "cron"),
        ("objectives: {pro: 1m}", "objectives.pro", "did you mean `rpo`?"),
        ("objectives: {ro: 1m}", "objectives.ro", "did you mean `rpo` or `rto`?"),
        ("witness: {max_durations: 5m}", "witness.max_durations", "did you mean `max_duration`?"),
    ],
)
def test_one_mistake_in_a_policy_is_one_problem(tmp_path: Path, text: str, field: str, message: str) -> None:
    key = text.partition(":")[0]
    lines = [line for line in POLICY.splitlines() if not line.startswith(f"{key}:")]
    path = write(tmp_path, gold="\n".join([*lines, text]) + "\n")
    found = problems(path)
    assert len(found) == 1, found
    assert found[0][:3] == ("gold.yaml", len(lines) + 1, field)
    assert message in found[0][3]
    assert "geheim" not in str(found)
    with pytest.raises(ConfigurationError, match="1 problem in the configuration"):
        load_policy(tmp_path / "policies" / "gold.yaml")


@pytest.mark.parametrize(
    "target",
    [
        "latest",
        "random",
        "latest@main",
        "backup:20261121T020000Z-7f3a9c01",
        "2026-11-21T09:41:03.250Z",
        "2026-11-21T10:41:03+01:00",
        "gtid:0-1-100",
        "before-gtid:3e11fa47-71ca-11e1-9e33-c80aa9429562:23",
        "mysql-bin.000042:1234",
        "mysql-bin.000042:1234@before-the-crash",
    ],
)
def test_every_kind_of_target_is_understood(tmp_path: Path, target: str) -> None:
    path = write(tmp_path, gold=f'{POLICY}test_restore: {{target: "{target}"}}\n')
    assert problems(path) == []
    parse_target("latest" if target == "random" else target)


def test_sets_of_tables_have_schedules_of_their_own(tmp_path: Path) -> None:
    sets = """\
logical:
  sets:
    money: {schedule: "every 1h", tables: {include: ["shop.pay_*"], max_size: 1GiB}}
    rest: {schedule: "0 3 * * sun", tables: {exclude: ["shop.pay_*"]}}
"""
    write(
        tmp_path,
        gold=f"{POLICY}{sets}"
        if "logical:" not in POLICY
        else "".join(line for line in POLICY.splitlines(keepends=True) if not line.startswith("logical:")) + sets,
    )
    logical = load_policy(tmp_path / "policies" / "gold.yaml").logical
    assert logical is not None
    assert {
        name: (cadence, tables.include, tables.max_size) for name, (cadence, tables) in logical.selections.items()
    } == {"money": ("every 1h", ("shop.pay_*",), 1 << 30), "rest": ("0 3 * * sun", ("*.*",), None)}
    assert (logical.schedule, logical.threads, logical.chunk, logical.partial, logical.repair, logical.count_rows) == (
        None,
        4,
        64 << 20,
        "failed",
        False,
        True,
    )
    assert (logical.max_lock.total_seconds(), logical.long_queries.total_seconds(), logical.on_long_queries) == (
        1.0,
        60.0,
        "wait",
    )


def test_limits_are_read_with_their_units(tmp_path: Path) -> None:
    text = (
        "limits: {read: 200MiB, send: 5MB, nice: 10, replica_lag: 60s, disk_latency: 50ms, long_queries: 2m, "
        "max_pause: 1h500ms}\n"
    )
    limits = load(write(tmp_path, gold=POLICY + text)).policies["gold"].limits
    assert (limits.read, limits.send, limits.nice) == (200 * 1024**2, 5_000_000, 10)
    assert (limits.replica_lag, limits.disk_latency) == (timedelta(minutes=1), timedelta(milliseconds=50))
    assert limits.long_queries == timedelta(minutes=2)
    assert limits.max_pause == timedelta(hours=1, milliseconds=500)
    assert limits.hang == timedelta(minutes=30)


@pytest.mark.parametrize(
    "timing",
    ['blackout: ["01:00-02:00"]', 'blackout: ["mon-fri 00:00-24:00"]', 'blackout: ["sat 22:00-02:01"]', "jitter: 24h"],
)
def test_timing_that_can_be_kept_is_not_refused(tmp_path: Path, timing: str) -> None:
    assert problems(write(tmp_path, gold=f"{POLICY}timing: {{{timing}}}\n")) == []


def test_every_schedule_that_a_blackout_swallows_is_named(tmp_path: Path) -> None:
    text = """\
physical: {full: "30 9 1 * *", incremental: "every 6h"}
destinations: {required: [local]}
verify: {schedule: "0 10 * * mon"}
test_restore: {schedule: "0 12 * * mon"}
timing: {blackout: ["08:00-11:00"], jitter: 7h}
"""
    found = problems(write(tmp_path, gold=text))
    assert [(line, name, message.partition(" (")[0]) for _file, line, name, message in found] == [
        (5, "timing.blackout", "covers every time of physical.full"),
        (5, "timing.blackout", "covers every time of verify.schedule"),
        (5, "timing.jitter", "7h is longer than the time between two runs of physical.incremental"),
    ]


def test_a_policy_that_backs_up_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, gold="destinations: {required: [local]}\n")
    assert [problem[3] for problem in problems(path)] == ["backs up nothing: give physical, logical or binlog"]


def test_files_in_the_folder_that_would_be_ignored_are_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "policies" / "silver.yml").write_text(POLICY)
    (tmp_path / "policies" / "notes.txt").write_text("anything")
    (tmp_path / "policies" / ".#gold.yaml").symlink_to("nowhere")
    (tmp_path / "policies" / "bad name.yaml").write_text(POLICY)
    broken = load(path).broken
    assert [(Path(one.file).name, one.message[:20]) for name in sorted(broken) for one in broken[name]] == [
        ("bad name.yaml", "its name cannot be t"),
        ("silver.yml", "would be ignored: na"),
    ]


def test_a_missing_configuration_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path / "backupd.yaml")
    assert f"{tmp_path}/backupd.yaml: does not exist" in str(caught.value)
    assert "policy example backupd" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("top", [Configuration, Policy])
def test_no_section_of_any_schema_ignores_a_name_that_it_does_not_know(top: type[Section]) -> None:
    seen: set[type[BaseModel]] = set()

    def visit(kind: object) -> None:
        for inner in getattr(kind, "__args__", ()):
            visit(inner)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
            seen.add(kind)
            assert kind.model_config.get("extra") == "forbid", kind
            for name, field in kind.model_fields.items():
                assert field.description or issubclass(kind, Section), name
                visit(field.annotation)

    visit(top)
    assert len(seen) >= 9


@pytest.mark.parametrize("top", [Configuration, Policy])
def test_every_field_is_described_and_every_plain_one_has_an_example(top: type[Section]) -> None:
    schema = top.model_json_schema()
    for title, section in {"": schema, **schema["$defs"]}.items():
        for name, field in section["properties"].items():
            described = field.get("description") or schema["$defs"][field["$ref"].rsplit("/", 1)[-1]]["description"]
            assert described, (title, name)
            plain = not any(word in str(field) for word in ("$ref", "const"))
            assert not plain or field.get("examples"), (title, name)


# Two names of one place


@pytest.mark.parametrize(
    ("first", "second", "how", "field"),
    [
        (
            "{type: filesystem, path: /srv/b}",
            "{type: filesystem, path: /srv/b/}",
            "is the same folder or bucket as",
            "path",
        ),
        ("{type: filesystem, path: /srv}", "{type: filesystem, path: /srv/b}", "is inside of", "path"),
        (
            "{type: s3, bucket: acme, prefix: p}",
            "{type: s3, bucket: acme, prefix: p}",
            "is the same folder or bucket as",
            "bucket",
        ),
        ("{type: s3, bucket: acme}", "{type: s3, bucket: acme, prefix: p}", "is inside of", "bucket"),
        (
            "{type: sftp, host: h, user: u, path: /v, key_file: /k, known_hosts: /h}",
            "{type: sftp, host: H, user: u, path: /v/w, key_file: /k, known_hosts: /h}",
            "is inside of",
            "path",
        ),
    ],
)
def test_one_place_under_two_names_is_an_error_that_names_both(
    tmp_path: Path, first: str, second: str, how: str, field: str
) -> None:
    file = _two_places(tmp_path, first, second)
    told = (
        f"destination `two` {how} `one` (destinations.one.{field}, line 5): give each destination its own folder, "
        "bucket or prefix"
    )
    assert problems(file) == [("backupd.yaml", 6, f"destinations.two.{field}", told)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("{type: filesystem, path: /srv/b}", "{type: filesystem, path: /srv/bb}"),
        ("{type: s3, bucket: acme, prefix: p}", "{type: s3, bucket: acme, prefix: pp}"),
        ("{type: s3, bucket: acme}", '{type: s3, bucket: acme, endpoint_url: "https://other.example.com"}'),
        ("{type: sftp, host: h, user: u, path: /v, key_file: /k, known_hosts: /h}", "{type: filesystem, path: /v}"),
    ],
)
def test_places_that_only_look_alike_are_two(tmp_path: Path, first: str, second: str) -> None:
    assert problems(_two_places(tmp_path, first, second)) == []


def _two_places(folder: Path, first: str, second: str) -> Path:
    (folder / "policies").mkdir()
    file = folder / "backupd.yaml"
    file.write_text(
        f"spool: /spool\npolicies: {folder}/policies\nservers: {{}}\ndestinations:\n  one: {first}\n"
        f"  two: {second}\nencryption: {{gnupg_home: /g, recipients: [ops@example.com]}}\n"
    )
    return file
