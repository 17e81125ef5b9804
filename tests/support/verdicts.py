"""The pytest plugin that says what a test's outcome means for the run.

* A comparison of data that fails (tests/support/oracle.py) stops the run at once. Its folders are kept.
* With ``--repeat-failed`` any other test that fails runs once more, alone, after all the others. One that passes then
  is FLAKY: printed with its seed, counted as "flaky" in pytest's closing line. Three in a run fail it.
* A skip fails the test unless its reason is in tests/skips.txt. Skips are counted by reason at the end of the run.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.support import oracle
from tests.support.stores import folders

FLAKY_FAIL = 3
"""So many flaky tests in a run fail it."""
MOST_REPEATED = 10
"""When more tests failed, it is no accident: none is repeated."""
SKIPS = "tests/skips.txt"
NOT_TESTED = re.compile(r"no private (\w+) server")
"""In the reason of a skip where scripts/mysql-root or scripts/s3-server could not have their program."""
_DIFFERS, _UNEXPECTED = "backupd: data differs", "backupd: unexpected skip"
"""Properties of reports."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repeat-failed",
        action="store_true",
        help="run a test that failed once more, alone; it is flaky when it passes then",
    )
    parser.addoption("--no-skips", action="store_true", help="every skip is a failure")


def pytest_configure(config: pytest.Config) -> None:
    if is_worker(config):
        return
    # One seed for all processes of a run: whatever fails can be repeated with it.
    os.environ.setdefault("BACKUPD_SEED", str(random.SystemRandom().randrange(2**32)))
    config.pluginmanager.register(Run(config), "backupd-run")


def pytest_report_header() -> str:
    return f"BACKUPD_SEED={os.environ['BACKUPD_SEED']}"


def is_worker(config: pytest.Config) -> bool:
    """Is this a process of xdist that runs a share of the tests?"""
    return hasattr(config, "workerinput")


# --- in the process that runs the test


oracle.when_data_differs(folders.keep)


@pytest.hookimpl(tryfirst=True)
def pytest_assertrepr_compare(op: str, left: object, right: object) -> None:
    """An assert's comparison has failed."""
    __tracebackhide__ = True
    oracle.judge(op, left, right)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and is_about_data(call.excinfo.value):
        kept = [*folders.living(), *(path for path in [getattr(item, "funcargs", {}).get("tmp_path")] if path)]
        report.sections.append(
            (
                "data differs",
                "\n".join([f"BACKUPD_SEED={os.environ['BACKUPD_SEED']}", *(f"kept: {path}" for path in kept)]),
            )
        )
        report.user_properties.append((_DIFFERS, True))
        item.session.shouldfail = f"data differs: {item.nodeid}"
    elif report.skipped and not hasattr(report, "wasxfail"):
        _judge_skip(report, item.config)
        report.user_properties += [(_UNEXPECTED, True)] if report.failed else []
    if report.when == "teardown" and not item.session.shouldfail:
        folders.keep_nothing()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _judge_skip(report, collector.config)
    return report


def _judge_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    reason = reason_of(report)
    if config.getoption("--no-skips"):
        report.outcome, report.longrepr = "failed", f"skipped, and nothing may be: {reason}"
    elif not any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in expected_skips(config.rootpath)):
        report.outcome, report.longrepr = "failed", f"skipped, for a reason that is not in {SKIPS}: {reason}"


def is_about_data(error: BaseException | None) -> bool:
    """Was it a comparison of data that failed, perhaps behind another failure while the test ended?"""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, oracle.DataDiffersError):
            return True
        if isinstance(error, BaseExceptionGroup) and any(is_about_data(one) for one in error.exceptions):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Of a skip."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def expected_skips(root: Path) -> list[str]:
    """The patterns of reasons for which a test may be skipped."""
    return [line for line in (root / SKIPS).read_text().splitlines() if line and not line.startswith("#")]


# --- in the process that sees all reports


class Run:
    """One run of pytest, seen from its end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.session: pytest.Session | None = None
        self.flaky: list[pytest.TestReport] = []
        self._differs = ""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (_DIFFERS, True) in report.user_properties:
            self._differs = report.nodeid
        if self._differs == report.nodeid and report.when == "teardown" and self._distributed and self.session:
            # Other workers would go on to the end of their files.
            self.session.shouldfail = f"data differs: {report.nodeid}"
            raise self.session.Failed(self.session.shouldfail)

    @property
    def _distributed(self) -> bool:
        return self.config.pluginmanager.has_plugin("dsession")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        if self.config.getoption("--repeat-failed"):
            self._repeat(session)
        return result

    def _repeat(self, session: pytest.Session) -> None:
        stats = self._terminal.stats
        failed: dict[str, pytest.TestReport] = {}
        for report in (*stats.get("failed", []), *stats.get("error", [])):
            if isinstance(report, pytest.TestReport) and (_UNEXPECTED, True) not in report.user_properties:
                failed.setdefault(report.nodeid, report)
        if not failed:
            return
        self._terminal.write_line("")
        if len(failed) > MOST_REPEATED:
            self._terminal.write_line(f"{len(failed)} tests failed, too many to be accidents: none is repeated")
            return
        for report in failed.values():
            self._terminal.write_line(f"repeating {report.nodeid} alone")
            if self._passes_alone(report.nodeid):
                self.flaky.append(report)
        if len(self.flaky) < FLAKY_FAIL:
            for report in self.flaky:
                session.testsfailed -= self._forgive(report)

    def _passes_alone(self, nodeid: str) -> bool:
        with tempfile.TemporaryDirectory(prefix="bt-again-") as folder:
            told = Path(folder) / "junit.xml"
            alone = ["-n0"] if self.config.pluginmanager.has_plugin("xdist") else []
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "--no-header",
                    "-p",
                    "no:cacheprovider",
                    *alone,
                    f"--junitxml={told}",
                    nodeid,
                ],
                cwd=self.config.rootpath,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode == 0:
                cases = list(ET.parse(told).iter("testcase"))
                passed = bool(cases) and not any(len(case.findall("skipped")) for case in cases)
            else:
                passed = False
            if not passed:
                self._terminal.write_line(f"it fails again:\n{done.stdout[-20000:]}")
            return passed

    def _forgive(self, flaky: pytest.TestReport) -> int:
        """Count a test as flaky and no more as failed; gives how many failures that were."""
        stats = self._terminal.stats
        forgiven = 0
        for category in ("failed", "error", "passed"):
            kept = [report for report in stats.get(category, []) if report.nodeid != flaky.nodeid]
            if category != "passed":
                forgiven += len(stats.get(category, [])) - len(kept)
            stats[category] = kept
            if not kept:
                del stats[category]
        self._terminal._add_stats("flaky", [flaky])
        return forgiven

    @property
    def _terminal(self) -> Any:
        return self.config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Iterator[None]:
        yield
        terminal = self._terminal
        for report in self.flaky:
            terminal.write_sep("_", f"FLAKY {report.nodeid}")
            terminal.write_line(report.longreprtext)
            for name, text in report.sections:
                terminal.write_line(f"--- {name}\n{text[-5000:]}")
        seed = os.environ["BACKUPD_SEED"]
        for report in self.flaky:
            terminal.write_line(
                f"FLAKY {report.nodeid}: failed, then passed alone; BACKUPD_SEED={seed}", yellow=True, bold=True
            )
        if len(self.flaky) >= FLAKY_FAIL:
            terminal.write_line(f"{len(self.flaky)} flaky tests: {FLAKY_FAIL} in a run fail it", red=True, bold=True)
        reasons = Counter(reason_of(report) for report in terminal.stats.get("skipped", []))
        if reasons:
            terminal.write_line(f"skipped, for reasons in {SKIPS}:")
            for reason, count in reasons.most_common():
                terminal.write_line(f"{count:6}  {reason}")
        for reason, count in reasons.items():
            if what := NOT_TESTED.search(reason):
                terminal.write_line(
                    f"{what[1].upper()} NOT TESTED: {count} tests were skipped: {reason}", red=True, bold=True
                )
