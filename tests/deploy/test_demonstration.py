"""`make demo` is somebody's first look: it runs where the packages of the tests are not installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_needs_no_package_of_the_tests() -> None:
    wanted = [
        re.split(r"[^\w-]", line)[0].replace("-", "_")
        for line in requires("backupd") or ()
        if "extra ==" in line and not line.startswith("backupd")
    ]
    assert {"pytest", "hypothesis"} <= set(wanted)
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({wanted!r})); sys.path.insert(0, 'scripts'); "
        "import demo; print('ready')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "ready\n", done.stderr
