"""A dead node of a Galera cluster: back by IST out of a full backup, against an SST by mariadb-backup and by rsync.

Three nodes on this machine, clients that write at a fixed rate to the two that live.
``python -m bench.clusters.rejoin`` prints a table, the seconds of each run, and the load. The script of an SST by
mariadb-backup sleeps for ten seconds before it sends anything: the ratio is given with them, and without.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from bench.measure import Run, Series, compared, table
from tests.support.e2e.house import SERVER
from tests.support.e2e.lab import Lab, die, laboratory, writing
from tests.support.keys import operator_keys

FIXED_SLEEP = 10.0


def grow(lab: Lab, mib: int) -> None:
    """Rows of ``mib`` MiB."""
    lab.node.execute(
        "CREATE TABLE shop.bulk (id BIGINT AUTO_INCREMENT PRIMARY KEY, client INT, content VARBINARY(1000),"
        " KEY (client))"
    )
    for _number in range(mib // 16 or 1):
        lab.node.execute(
            "INSERT INTO shop.bulk (client, content) SELECT seq % 97, RANDOM_BYTES(1000) FROM shop.seq_1_to_16000"
        )
    lab.cluster.settle(timeout=600)


def by_ist(lab: Lab, backup: str) -> tuple[Run, dict[str, Any]]:
    die(lab.node)
    begun = time.perf_counter()
    outcome = lab.rejoin("--to", f"backup:{backup}")
    if outcome["join"]["outcome"] != "ist":
        raise RuntimeError(json.dumps(outcome))
    compared_for = sum(phase["seconds"] for phase in outcome["phases"] if phase["name"] == "verified")
    return Run(time.perf_counter() - begun - compared_for, 0, ""), outcome


def by_sst(lab: Lab, method: str) -> Run:
    die(lab.node)
    lab.node.make_empty()
    lab.node.sst_method = method
    begun = time.perf_counter()
    lab.node.start(900)
    if "SST completed on joiner" not in lab.node.log_text():
        raise RuntimeError(f"it was no SST by {method}")
    return Run(time.perf_counter() - begun, 0, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ours, theirs, awake, copied = Series(), Series(), Series(), Series()
    phases: list[dict[str, float]] = []
    with operator_keys() as keys, laboratory(keys, gtid_mode=True, gcache="256M") as lab:
        grow(lab, options.mib)
        backup = lab.ok("backup", SERVER, "--kind", "full")["id"]
        with writing(*lab.cluster.nodes[1:], pause=0.01):
            for _round in range(options.rounds):
                run, outcome = by_ist(lab, backup)
                ours.runs.append(run)
                phases.append({phase["name"]: round(phase["seconds"], 1) for phase in outcome["phases"]})
                theirs.runs.append(by_sst(lab, "mariabackup"))
                copied.runs.append(by_sst(lab, "rsync"))
                awake.runs.append(Run(theirs.runs[-1].seconds - FIXED_SLEEP, 0, ""))
    print(
        table(
            [
                compared(f"a node of {options.mib} MiB back, against an SST", ours, theirs, None),
                compared("the same, without the SST's fixed 10 s", ours, awake, None),
                compared("the same, against an SST by rsync", ours, copied, None),
            ]
        )
    )
    print(json.dumps(phases))
    print(f"load {os.getloadavg()}")


if __name__ == "__main__":
    main()
