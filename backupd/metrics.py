"""What the service reports to Prometheus: values in, the text of its exposition format out.

Every metric is in METRICS; ``python -m backupd.metrics`` prints docs/metrics.md, which is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the format that every Prometheus reads."""

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gauge:
    """``labels``: their names. All of them are gauges: what the catalog forgets in time must not look like a counter
    that was reset."""

    name: str
    help: str
    labels: Labels = ()


class Unknown(ValueError):  # noqa: N818  a mistake of this program, not an error that anybody handles
    """A value for a metric that is not in METRICS, or with other labels."""


_S, _D = ("server",), ("destination",)
_B = ("server", "kind", "set")
_J = ("server", "kind", "leg")

METRICS: tuple[Gauge, ...] = (
    Gauge("backupd_build_info", "Always 1; the label is the running version.", ("version",)),
    Gauge("backupd_service_on_watch", "1 while a backupd service runs the schedules; 0: no scheduled job starts."),
    Gauge("backupd_collect_seconds", "How long it took to collect these values."),
    Gauge("backupd_server_status", "0 good, 1 warning, 2 bad: what the overview shows.", _S),
    Gauge("backupd_server_recoverable", "1 if the server has a recoverable point in time.", _S),
    Gauge(
        "backupd_server_tables_recoverable",
        "1 if tables of the server are recoverable, from physical or logical backups. Logical backups restore "
        "no whole server.",
        _S,
    ),
    Gauge("backupd_server_latest_recoverable_timestamp_seconds", "Latest recoverable moment.", _S),
    Gauge("backupd_server_first_recoverable_timestamp_seconds", "Earliest recoverable moment.", _S),
    Gauge("backupd_server_rpo_seconds", "Seconds of commits that are not archived yet (current recovery point).", _S),
    Gauge("backupd_server_rpo_objective_seconds", "Recovery point objective (RPO) of the policy: objectives.rpo.", _S),
    Gauge(
        "backupd_server_rto_predicted_seconds",
        "Estimated time of a restore to the latest recoverable point in time, from the durations of earlier restores.",
        _S,
    ),
    Gauge("backupd_server_rto_objective_seconds", "Recovery time objective (RTO) of the policy: objectives.rto.", _S),
    Gauge("backupd_server_windows", "Recoverable time ranges.", _S),
    Gauge("backupd_server_gaps", "Gaps in the archived binary logs.", _S),
    Gauge("backupd_server_gap_noticed_timestamp_seconds", "When the newest gap was detected.", _S),
    Gauge("backupd_server_backups", "Complete backups.", _S),
    Gauge("backupd_server_protected_backups", "Complete backups with as many verified copies as the policy wants.", _S),
    Gauge("backupd_server_stored_bytes", "Stored bytes of the server's backups, each shared object once.", _S),
    Gauge("backupd_server_held", "1 while a hold suspends deletions of the server.", _S),
    Gauge("backupd_server_paused", "1 while scheduled jobs of the server are suspended (pause).", _S),
    Gauge("backupd_server_absent", "1 while a backup has taken the server out of rotation.", _S),
    Gauge(
        "backupd_server_ist_window_seconds",
        "For how long the newest backup of the Galera node still lets a node come back by IST at the present rate of "
        "writes; 0: it needs an SST.",
        _S,
    ),
    Gauge("backupd_server_ist_restore_seconds", "Estimated time of that restore.", _S),
    Gauge("backupd_server_next_run_timestamp_seconds", "When the next run of a schedule starts.", ("server", "leg")),
    Gauge("backupd_backup_last_success_timestamp_seconds", "When the newest complete backup of a kind ended.", _B),
    Gauge("backupd_backup_last_age_seconds", "The age of the newest complete backup of a kind.", _B),
    Gauge("backupd_backup_last_duration_seconds", "How long the newest complete backup of a kind took.", _B),
    Gauge(
        "backupd_backup_last_source_bytes",
        "Bytes that the newest complete backup of a kind read, before compression.",
        _B,
    ),
    Gauge(
        "backupd_backup_last_stored_bytes",
        "Bytes of the newest complete backup of a kind at a destination, compressed and encrypted.",
        _B,
    ),
    Gauge(
        "backupd_backup_last_new_bytes",
        "Bytes of the newest complete backup that the destination did not hold before.",
        _B,
    ),
    Gauge(
        "backupd_backup_last_missing_tables",
        "Tables missing in the newest backup of a kind: not "
        "dumped, or left out by the physical tool and in no logical one.",
        _B,
    ),
    Gauge("backupd_proof_last_timestamp_seconds", "When the last test restore ended.", _S),
    Gauge("backupd_proof_last_good", "1 when the last test restore found the data good.", _S),
    Gauge("backupd_proof_last_good_timestamp_seconds", "When a test restore last found the data good.", _S),
    Gauge("backupd_proof_age_seconds", "How long ago a test restore last found the data good.", _S),
    Gauge("backupd_proof_compared_tables", "Tables that the last test restore compared with the source.", _S),
    Gauge("backupd_stream_up", "1 while the binary log is streamed; only of servers whose policy asks for it.", _S),
    Gauge(
        "backupd_stream_acknowledged",
        "1 while each commit waits until backupd has it (RPO 0); only of servers with binlog.acknowledge.",
        _S,
    ),
    Gauge("backupd_stream_acknowledged_since_timestamp_seconds", "When RPO 0 began to hold.", _S),
    Gauge("backupd_stream_spool_bytes", "Binary logs on this host that wait for a destination.", _S),
    Gauge("backupd_stream_spool_limit_bytes", "Spool limit in bytes (binlog.max_spool).", _S),
    Gauge(
        "backupd_destination_server_rpo_seconds",
        "Seconds of commits that are not archived at this destination yet (its current recovery point).",
        ("destination", "server"),
    ),
    Gauge("backupd_destination_status", "0 good, 1 warning, 2 bad.", _D),
    Gauge("backupd_destination_reachable", "1 if the destination responded to the last check.", _D),
    Gauge(
        "backupd_destination_checked_timestamp_seconds",
        "When the destination was last checked.",
        _D,
    ),
    Gauge("backupd_destination_free_bytes", "Free bytes of the destination, if the storage reports them.", _D),
    Gauge("backupd_destination_size_bytes", "Capacity of the destination in bytes, if the storage reports it.", _D),
    Gauge(
        "backupd_destination_full_timestamp_seconds",
        "Earliest moment at which the destination is full at its present growth; only if that is within a year.",
        _D,
    ),
    Gauge("backupd_destination_stored_bytes", "Bytes stored at the destination, according to the catalog.", _D),
    Gauge("backupd_destination_backups", "Backups with a complete copy at the destination.", _D),
    Gauge("backupd_destination_behind_backups", "Backups that still have to be copied to the destination.", _D),
    Gauge("backupd_destination_behind_bytes", "Bytes that still have to be copied to the destination.", _D),
    Gauge(
        "backupd_destination_behind_seconds",
        "How long the oldest of these backups has waited.",
        _D,
    ),
    Gauge(
        "backupd_destination_binlog_lag_seconds",
        "Maximum archiving lag of binary logs at the destination in the last 24 hours, in seconds.",
        _D,
    ),
    Gauge("backupd_jobs", "Unfinished jobs, by state: queued, waiting, running.", ("state",)),
    Gauge(
        "backupd_jobs_ended_last_day",
        "Jobs that ended within the last 24 hours, by final state.",
        ("server", "kind", "state"),
    ),
    Gauge("backupd_job_last_success_timestamp_seconds", "When a job of this kind and schedule last succeeded.", _J),
    Gauge(
        "backupd_job_last_failed",
        "1 when the last job of this kind and schedule failed, was missed, was killed or was incomplete.",
        _J,
    ),
    Gauge(
        "backupd_job_running_seconds",
        "For how long the running jobs of a server have run, the longest.",
        ("server", "kind"),
    ),
    Gauge("backupd_incidents_open", "Open incidents, by severity.", ("severity",)),
    Gauge("backupd_messages", "Messages about incidents, by state: queued, sent, failed (given up).", ("state",)),
    Gauge("backupd_message_oldest_queued_seconds", "For how long the oldest message waits to be sent."),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


class Values:
    """The values of a scrape; each once."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Labels, float]] = {}

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """None: not known, so nothing is set. Raises Unknown."""
        metric = _BY_NAME.get(name)
        if metric is None or len(labels) != len(metric.labels):
            raise Unknown(f"{name} with {len(labels)} labels")
        if value is not None:
            self._found.setdefault(name, {})[labels] = float(value)

    def __iter__(self) -> Iterator[tuple[Gauge, Mapping[Labels, float]]]:
        """In the order of METRICS, those that have a value."""
        return ((metric, self._found[metric.name]) for metric in METRICS if metric.name in self._found)


_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exposition(values: Values) -> bytes:
    """The text that a scrape gets, byte for byte as ``prometheus_client`` would write it; written here, as it takes
    many times longer for the values of a thousand servers."""
    label: Callable[[str], str] = cache(lambda text: text.translate(_ESCAPES))
    number: Callable[[float], str] = floatToGoString
    lines: list[str] = []
    for metric, samples in values:
        lines += (f"# HELP {metric.name} {metric.help}\n", f"# TYPE {metric.name} gauge\n")
        if not metric.labels:
            lines += (f"{metric.name} {number(value)}\n" for value in samples.values())
            continue
        order = sorted(range(len(metric.labels)), key=metric.labels.__getitem__)
        head = f'{metric.name}{{{metric.labels[order[0]]}="'
        between = [f'",{metric.labels[index]}="' for index in order[1:]]
        for found, value in samples.items():
            line = head + label(found[order[0]])
            for name, index in zip(between, order[1:], strict=True):
                line += name + label(found[index])
            lines.append(f'{line}"}} {number(value)}\n')
    return "".join(lines).encode()


def reference(metrics: Sequence[Gauge] = METRICS) -> str:
    """docs/metrics.md."""
    rows = [
        f"| `{metric.name}` | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for metric in metrics
    ]
    return "\n".join([_INTRODUCTION, "| metric | labels | description |", "|---|---|---|", *rows, ""])


_INTRODUCTION = """\
# Metrics

`GET /metrics` of the service gives everything that [Prometheus](https://prometheus.io) needs to watch backups. Made of
the code by `python -m backupd.metrics`; a test compares them.

`api.metrics` in the configuration says who may read it: by default anybody on this host, and holders of a token
elsewhere (`authorization: {credentials_file: ...}` in the scrape configuration; the role `viewer` is enough). With a
token for some servers only those are reported.

Ready to use: [deploy/prometheus.yml](../deploy/prometheus.yml) (how to scrape),
[deploy/prometheus-rules.yml](../deploy/prometheus-rules.yml) (alerts),
[deploy/grafana-dashboard.json](../deploy/grafana-dashboard.json) (import it and choose the data source).

All of them are gauges. What is not known is left out: a server without an objective has no `..._objective_seconds`, one
that was never proved no `backupd_proof_...`. Times are seconds since 1970; those of destinations were seen in the last
minute or so (`backupd_destination_checked_timestamp_seconds`): no scrape waits for a destination that does not
answer. Mail and the page report the same and need no Prometheus; what only Prometheus sees is that nobody answers at
all (`up`).

`set` is that of the policy's sets of tables for logical backups, empty elsewhere; `leg` the schedule of the policy that
asked for a job (`physical.full`, `logical/money`, `test_restore` ...), empty where a person did.
"""


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201  this is what the command is for
