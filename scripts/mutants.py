"""Plant each defect of tests/house/mutants.toml in a copy of the project and run the test that has to notice it.

    scripts/mutants [WORD]...

WORD: only defects with this word in the name of the function or test. First all the tests run once without any defect.
Prints a line for each; ends with 1 unless every defect was caught.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.house.defined import ROOT
from tests.house.planted import Mutant, mutants

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__", ".*_cache", "build", "screenshots")
_FAILED = 1
"""What pytest ends with when a test failed, and nothing else went wrong."""


def tests_pass(copy: Path, tests: Iterable[str]) -> tuple[int, str]:
    """pytest's exit code, and what it said."""
    command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        cwd=copy,
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def address(mutant: Mutant) -> str:
    test = mutant.test_at()
    return f"{test.file}::{test.name.replace('.', '::')}"


def caught(copy: Path, mutant: Mutant) -> tuple[bool, str]:
    """Whether its test fails with it, and by the failure of what."""
    path, content = mutant.planted()
    target = copy / path.relative_to(ROOT)
    good = target.read_bytes()
    target.write_bytes(content)
    try:
        code, said = tests_pass(copy, [address(mutant)])
    finally:
        target.write_bytes(good)
    last = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return code == _FAILED and any(line.startswith("FAILED") for line in last), "\n".join(last[-3:])


def main(words: list[str]) -> int:
    chosen = [one for one in mutants() if not words or any(word in f"{one.function} {one.test}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=_NOT_COPIED, symlinks=True)
        (copy / ".cache").symlink_to((ROOT / ".cache").resolve())
        code, said = tests_pass(copy, sorted({address(one) for one in chosen}))
        if code != 0:
            print(said)
            return 1
        missed = 0
        for number, mutant in enumerate(chosen, 1):
            begun = time.monotonic()
            found, how = caught(copy, mutant)
            missed += not found
            print(
                f"{number:2} {'caught' if found else 'MISSED'} {mutant.function}: `{mutant.old}` -> `{mutant.new}` "
                f"by {mutant.test} ({time.monotonic() - begun:.0f} s)",
                flush=True,
            )
            if not found:
                print(how)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
