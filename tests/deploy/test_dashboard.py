"""deploy/grafana-dashboard.json asks for what there is, in words that Prometheus understands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from backupd.metrics import METRICS

FILE = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
    return found


def queries() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield str(target["expr"])


def test_it_asks_only_for_metrics_and_labels_that_there_are() -> None:
    known = {metric.name: set(metric.labels) for metric in METRICS}
    asked = [name for query in queries() for name in re.findall(r"\bbackupd_\w+", query)]
    assert set(asked) <= set(known)
    assert len(set(asked)) >= 20
    for panel in panels():
        for target in panel.get("targets", ()):
            labels = set().union(*(known[name] for name in re.findall(r"\bbackupd_\w+", target["expr"])))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, panel["title"]
            assert set(re.findall(r"(\w+)!?=~?\"", target["expr"])) <= labels, panel["title"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$server", ".*")} for number, query in enumerate(queries())
    ]
    with (tmp_path / "rules.yml").open("w") as out:
        yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}, out)
    done = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_panel_has_a_name_and_a_place_of_its_own() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    assert all(panel["title"] for panel in found)
    boxes = sorted((panel["gridPos"]["y"], panel["gridPos"]["x"], panel["gridPos"]["w"]) for panel in found)
    for (y, x, width), (other_y, other_x, _width) in pairwise(boxes):
        assert y != other_y or x + width <= other_x
        assert x + width <= 24
