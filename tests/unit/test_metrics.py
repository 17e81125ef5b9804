"""Values in, the text of Prometheus out."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from backupd.metrics import METRICS, Unknown, Values, exposition, reference

DOCS = Path(__file__).parents[2] / "docs"


def everything() -> Values:
    """A value of each."""
    values = Values()
    for number, metric in enumerate(METRICS):
        values.set(metric.name, number + 0.5, *(f"{label}-1" for label in metric.labels))
    return values


def test_every_value_comes_out_with_its_labels_and_its_help() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exposition(everything()).decode())}
    assert list(families) == [metric.name for metric in METRICS]
    for number, metric in enumerate(METRICS):
        family = families[metric.name]
        assert (family.type, family.documentation) == ("gauge", metric.help)
        (sample,) = family.samples
        assert (sample.value, sample.labels) == (number + 0.5, {label: f"{label}-1" for label in metric.labels})


class _AsTheLibraryTells(Collector):
    def __init__(self, values: Values) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        for metric, samples in self._values:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, value in samples.items():
                family.add_metric(labels, value)
            yield family


def test_the_text_is_that_of_the_library() -> None:
    values = everything()
    odd = ("", "ä€", 'a "b"', "\\n", "a\nb\\", "}", "a=b,c")
    numbers = (0, -0.0, 1, 0.1, -5, 1e6, 1234567, 1.5e9, 1763726400.123456, 1e15, 1e16, 1e300, 5e-324, -1e9)
    for metric in METRICS:
        for place, number in enumerate((*numbers, math.inf, -math.inf, math.nan)):
            values.set(metric.name, number, *(odd[(place + shift) % len(odd)] for shift in range(len(metric.labels))))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_AsTheLibraryTells(values))
    assert exposition(values) == generate_latest(registry)
    assert all(not {"\\", "\n"} & set(metric.help) for metric in METRICS), "they stand there as they are"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_prometheus_own_checker_finds_nothing_to_complain_of() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition(everything()), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_names_and_words_keep_to_the_customs() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"backupd_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.help.endswith("."), metric.name
        assert "|" not in metric.help, "it is a cell of a table"
        if metric.name.endswith("timestamp_seconds"):
            assert re.search(r"\b(When|moment)\b", metric.help), metric.name
    units = {"seconds", "bytes"}
    odd = {
        metric.name
        for metric in METRICS
        if re.search(r"age|duration|size|bytes|seconds|rpo|rto|lag", metric.name.replace("backupd_message", ""))
        and metric.name.rpartition("_")[2] not in units
    }
    assert odd == {"backupd_destination_behind_backups"} - {"backupd_destination_behind_backups"}


def test_strange_text_in_a_label_stays_one_value() -> None:
    values = Values()
    odd = 'a "b"\\\n{c="d"} 1\nbackupd_server_held{server="x"} 1'
    values.set("backupd_server_held", 1, odd)
    (family,) = text_string_to_metric_families(exposition(values).decode())
    assert [sample.labels for sample in family.samples] == [{"server": odd}]


def test_what_is_not_known_is_left_out_and_what_nobody_announced_is_refused() -> None:
    values = Values()
    values.set("backupd_server_rpo_seconds", None, "db1")
    assert exposition(values) == b""
    for name, labels in (("backupd_nonsense", ()), ("backupd_server_held", ()), ("backupd_server_held", ("a", "b"))):
        with pytest.raises(Unknown):
            values.set(name, 1, *labels)


def test_the_reference_is_that_of_the_code() -> None:
    assert (DOCS / "metrics.md").read_text() == reference(), "python -m backupd.metrics > docs/metrics.md"
