"""The plugin on runs of its own, with and without several processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]

FLAKY = """
    from pathlib import Path
    def test_{name}():
        seen = Path(__file__).with_name("seen-{name}")
        there = seen.exists()
        seen.touch()
        assert there, "the first time"
"""
GOOD = """
    def test_good():
        pass
"""
DIFFERS = """
    from tests.support.oracle import Sums
    from tests.support.stores.folders import short_directory
    def test_differs():
        with short_directory() as folder:
            (folder / "data").write_text("what differs")
            assert Sums({"`shop`.`orders`": 1}) == {"`shop`.`orders`": 2}
    def test_later():
        raise AssertionError("it ran")
"""


@pytest.fixture(params=["one process", "two processes"])
def run(request: pytest.FixtureRequest, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    def go(*args: str, **files: str) -> pytest.RunResult:
        pytester.makepyfile(**files)
        several = ["-n", "2", "--dist", "loadfile"] if request.param == "two processes" else []
        return pytester.runpytest_subprocess("-rfE", *several, *args, timeout=120)

    pytester.makeconftest('pytest_plugins = ("tests.support.verdicts",)')
    skips = pytester.mkdir("tests") / "skips.txt"
    skips.write_text("# expected\nleft to a .*\nno private MySQL server in .*\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("BACKUPD_SEED", "4711")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take longer than all the rest
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist" if request.param == "two processes" else "")
    return go


def closing(result: pytest.RunResult) -> str:
    """The last line, which must be pytest's own."""
    line = [line for line in result.outlines if line.strip()][-1]
    assert re.fullmatch(r"=+ .* in [\d.]+s.* =+", line), result.outlines[-5:]
    return line


def test_data_that_differs_stops_the_run_at_once_and_its_folder_is_kept(run: Run, pytester: pytest.Pytester) -> None:
    slow = "\n".join(f"def test_{number}():\n    import time; time.sleep(0.5)" for number in range(60))
    result = run("--repeat-failed", test_a=DIFFERS, test_b=slow)
    assert result.ret == 1
    assert "1 failed" in closing(result)
    result.stdout.fnmatch_lines(
        ["*found 1, expected 2*", "*BACKUPD_SEED=4711*", "*data differs: test_a.py::test_differs*"]
    )
    result.stdout.no_fnmatch_line("*it ran*")
    result.stdout.no_fnmatch_line("*repeating*")
    assert int((re.search(r"(\d+) passed", closing(result)) or ["", "0"])[1]) < 40
    (kept,) = re.findall(r"kept: (\S+/bt-\S+)", result.stdout.str())
    data = Path(kept) / "data"
    assert data.read_text() == "what differs"
    data.unlink()
    Path(kept).rmdir()


def test_a_failure_that_passes_alone_is_flaky_and_the_run_does_not_fail(run: Run) -> None:
    teardown = """
    import pytest
    from pathlib import Path
    @pytest.fixture
    def end():
        yield
        seen = Path(__file__).with_name("seen-end")
        there = seen.exists()
        seen.touch()
        assert there, "the first end"
    def test_end(end):
        pass
    """
    result = run("--repeat-failed", test_a=FLAKY.format(name="one"), test_b=GOOD, test_c=teardown)
    assert result.ret == 0
    assert "failed" not in closing(result)
    assert "error" not in closing(result)
    assert "2 flaky" in closing(result)
    assert "1 passed" in closing(result)
    result.stdout.fnmatch_lines(["FLAKY test_a.py::test_one*BACKUPD_SEED=4711"])
    result.stdout.fnmatch_lines(["*the first time*"])


def test_three_flaky_tests_fail_the_run(run: Run) -> None:
    result = run("--repeat-failed", test_good=GOOD, **{f"test_{name}": FLAKY.format(name=name) for name in "abc"})
    assert result.ret == 1
    assert "3 failed, 1 passed" in closing(result)
    result.stdout.fnmatch_lines(["FLAKY test_a.py::test_a*", "3 flaky tests: 3 in a run fail it"])


def test_what_fails_again_has_failed(run: Run) -> None:
    result = run("--repeat-failed", test_a="def test_bad():\n    assert 1 == 2\n", test_b=FLAKY.format(name="b"))
    assert result.ret == 1
    assert "1 failed, 1 flaky" in closing(result)
    result.stdout.fnmatch_lines(["repeating test_a.py::test_bad alone", "it fails again:"])


def test_many_failures_are_not_repeated_and_without_the_option_none_is(run: Run) -> None:
    bad = "\n".join(f"def test_{number}():\n    assert False" for number in range(11))
    result = run("--repeat-failed", test_a=bad)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["11 tests failed, too many*"])
    result.stdout.no_fnmatch_line("*repeating*")
    result = run("test_b.py", test_b=FLAKY.format(name="b"))
    assert result.ret == 1
    assert "1 failed" in closing(result)


def test_a_skip_is_counted_when_it_is_in_the_list_and_fails_the_run_when_not(run: Run) -> None:
    expected = """
    import pytest
    @pytest.mark.skip(reason="left to a soak")
    def test_one():
        pass
    def test_two():
        pytest.skip("no private MySQL server in /x: the mirror is away")
    def test_three():
        pass
    """
    result = run("--repeat-failed", test_a=expected)
    assert result.ret == 0
    assert "1 passed, 2 skipped" in closing(result)
    result.stdout.fnmatch_lines(["*1  left to a soak", "MYSQL NOT TESTED: 1 tests were skipped: no private*"])
    assert run("--no-skips", test_a=expected).ret == 1
    result = run(
        "--repeat-failed",
        "test_b.py",
        "test_c.py",
        "test_d.py",
        test_b="""
    import pytest
    def test_it():
        pytest.skip("no time")
    """,
        test_c="import pytest\npytest.skip('no wish', allow_module_level=True)",
        test_d=GOOD,
    )
    assert result.ret != 0
    assert "skipped" not in closing(result)
    result.stdout.fnmatch_lines(["*not in tests/skips.txt: no wish*"])
    result.stdout.no_fnmatch_line("*repeating*")


def test_folders_are_kept_for_data_that_differs_only_where_that_fails_the_test(run: Run) -> None:
    result = run(
        test_a="""
    import pytest
    from tests.support import oracle
    from tests.support.stores import folders
    made = []
    def test_caught():
        with pytest.raises(oracle.DataDiffersError):
            with folders.short_directory() as folder:
                made.append(folder)
                oracle.same(1, 2)
        assert made[0].exists()
    def test_gone():
        assert not made[0].exists()
    """
    )
    assert result.ret == 0
    assert "2 passed" in closing(result)


def test_a_mirror_that_fails_is_asked_twice_and_then_named(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "scripts" / "mysql-root"
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "mmdebstrap": f"echo asked >>{tmp_path}/asked; echo 'E: 503' >&2; exit 25",
        "apt-get": "echo 'http://mirror.example/debian|Debian|Debian'",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [script],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "BACKUPD_TEST_MYSQL_ROOT": str(tmp_path / "root"),
            "BACKUPD_MIRROR_PAUSE": "0",
        },
    )
    assert (tmp_path / "asked").read_text() == "asked\nasked\n"
    assert "E: 503" in done.stderr
    assert (tmp_path / "root/unavailable").read_text().endswith("http://mirror.example/debian, twice\n")
