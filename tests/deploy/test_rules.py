"""The alerts in deploy/prometheus-rules.yml, fired and kept quiet by Prometheus' own promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from backupd.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus-rules.yml"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")

HOURS = 4 * 24
_S = '{job="backupd",instance="h:1",server="db1"'
_D = '{job="backupd",instance="h:1",destination="local"'
_I = '{job="backupd",instance="h:1"'

HEALTHY = {
    f"up{_I}}}": "1",
    f"backupd_service_on_watch{_I}}}": "1",
    f"backupd_server_recoverable{_S}}}": "1",
    f"backupd_server_rpo_seconds{_S}}}": "30",
    f"backupd_server_rpo_objective_seconds{_S}}}": "60",
    f"backupd_server_rto_predicted_seconds{_S}}}": "600",
    f"backupd_server_rto_objective_seconds{_S}}}": "3600",
    f'backupd_backup_last_success_timestamp_seconds{_S},kind="physical-full",set=""}}': "0+3600",
    f'backupd_job_last_failed{_S},kind="verify",leg="verify"}}': "0",
    f'backupd_job_running_seconds{_S},kind="physical-full"}}': "60",
    f"backupd_server_paused{_S}}}": "0",
    f"backupd_server_absent{_S}}}": "0",
    f"backupd_server_status{_S}}}": "0",
    f"backupd_server_gap_noticed_timestamp_seconds{_S}}}": "-99",
    f'backupd_backup_last_duration_seconds{_S},kind="physical-full",set=""}}': "60",
    f"backupd_proof_last_good{_S}}}": "1",
    f"backupd_proof_age_seconds{_S}}}": "86400",
    f"backupd_stream_up{_S}}}": "1",
    f"backupd_stream_spool_bytes{_S}}}": "10",
    f"backupd_stream_spool_limit_bytes{_S}}}": "1000",
    f"backupd_destination_checked_timestamp_seconds{_D}}}": "0+3600",
    f"backupd_destination_reachable{_D}}}": "1",
    f"backupd_destination_free_bytes{_D}}}": "50",
    f"backupd_destination_size_bytes{_D}}}": "100",
    f"backupd_destination_full_timestamp_seconds{_D}}}": "9999999",
    f"backupd_destination_behind_seconds{_D}}}": "60",
    f"backupd_message_oldest_queued_seconds{_I}}}": "0",
}
"""Each series, at one value; one step is an hour. Four days of an installation that nothing is wrong with."""

SICK: dict[str, dict[str, str]] = {
    "BackupdDown": {"up": "0"},
    "BackupdNotOnWatch": {"backupd_service_on_watch": "0"},
    "BackupServerNotRecoverable": {"backupd_server_recoverable": "0"},
    "BackupRpoBroken": {"backupd_server_rpo_seconds": "61"},
    "BackupRtoBroken": {"backupd_server_rto_predicted_seconds": "3601"},
    "BackupTooOld": {"backupd_backup_last_success_timestamp_seconds": "0"},
    "BackupJobFailed": {"backupd_job_last_failed": "1"},
    "BackupJobHangs": {"backupd_job_running_seconds": "86401"},
    "BackupPaused": {
        "backupd_server_paused": "1",
        "backupd_stream_up": "0",
        "backupd_backup_last_success_timestamp_seconds": "0",
    },
    "BackupServerOutOfRotation": {"backupd_server_absent": "1"},
    "BackupProofFailed": {"backupd_proof_last_good": "0"},
    "BackupProofTooOld": {"backupd_proof_age_seconds": "3024001"},
    "BinlogStreamDown": {"backupd_stream_up": "0"},
    "BinlogSpoolFills": {"backupd_stream_spool_bytes": "801"},
    "BinlogGap": {"backupd_server_gap_noticed_timestamp_seconds": "0+3600"},
    "BackupServerBad": {"backupd_server_status": "2"},
    "BackupNeverProved": {"backupd_proof_age_seconds": ""},
    "BackupDestinationUnreachable": {"backupd_destination_reachable": "0"},
    "BackupDestinationFills": {"backupd_destination_free_bytes": "4"},
    "BackupDestinationBehind": {"backupd_destination_behind_seconds": "86401"},
    "BackupMailStuck": {"backupd_message_oldest_queued_seconds": "3601"},
}
"""What differs in an installation of which that alert tells, and no other."""

AS_WELL: dict[str, tuple[str, dict[str, str]]] = {
    "no look at a place ends": ("BackupDestinationUnreachable", {"backupd_destination_checked_timestamp_seconds": "0"}),
    "a gap from the beginning": (
        "BinlogGap",
        {"backupd_server_gap_noticed_timestamp_seconds": "345600", "backupd_server_gaps": "1"},
    ),
}
"""Other installations of which an alert tells."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def _series(installation: str, changes: dict[str, str]) -> list[dict[str, str]]:
    found = []
    for key, value in HEALTHY.items():
        first, _plus, step = changes.get(key.partition("{")[0], value).partition("+")
        if not first:
            continue  # it has no such series
        found.append({"series": key.replace('"h:1"', f'"{installation}"'), "values": f"{first}+{step or 0}x{HOURS}"})
    return found


@needs_promtool
def test_each_alert_fires_when_it_should_and_no_other_does(tmp_path: Path) -> None:
    assert set(SICK) == {rule["alert"] for rule in rules()}
    series = _series("healthy", {})
    for name, changes in SICK.items():
        series += _series(name, changes)
    for name, (_alert, changes) in AS_WELL.items():
        series += _series(name, changes)
    told = {name: name for name in SICK} | {name: alert for name, (alert, _changes) in AS_WELL.items()}
    expected = [{"labels": f'{{alertname="{alert}", instance="{name}"}}', "value": 1} for name, alert in told.items()]
    test = {
        "interval": "1h",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
                "eval_time": f"{HOURS}h",
                "exp_samples": expected,
            }
        ],
    }
    file = tmp_path / "test.yml"
    with file.open("w") as out:
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1h", "tests": [test]}, out)
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    for command in (["check", "config", str(DEPLOY / "prometheus.yml")], ["check", "rules", "--lint=all", str(RULES)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_ask_only_for_metrics_that_there_are_and_name_the_next_step() -> None:
    known = {metric.name for metric in METRICS}
    for rule in rules():
        assert set(re.findall(r"\bbackupd_\w+", rule["expr"])) <= known, rule["alert"]
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert re.search(r"`|hooks|Somebody", rule["annotations"]["description"]), rule["alert"]
