"""What is left in memory after large blocks were freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import sys
from pathlib import Path
from backupd.process.runtime import return_large_blocks
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
if sys.argv[1] == "returned":
    return_large_blocks()
block = b"x" * (24 << 20)  # freed, it makes glibc keep blocks of this size
del block
before = resident()
block = b"x" * (16 << 20)
behind = b"y" * 65536
del block
print(resident() - before)
"""


_ARENAS = """
import re, sys, threading
from pathlib import Path
from backupd.process.runtime import share_arenas
if sys.argv[1] == "shared":
    share_arenas()
def arenas():  # each takes 64 MiB of address space, of which little is used
    lines = Path("/proc/self/maps").read_text().splitlines()
    sizes = [int(b, 16) - int(a, 16) for a, b in (re.match("(\\w+)-(\\w+)", line).groups() for line in lines)]
    return sum(60 << 20 <= size <= 64 << 20 for size in sizes)
before = arenas()
met = threading.Barrier(9)
def work():
    block = bytearray(100_000)
    met.wait()
    met.wait()
for _ in range(8):
    threading.Thread(target=work).start()
met.wait()
print(arenas() - before)
met.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a habit of glibc")
def test_threads_share_the_arenas_of_a_service() -> None:
    apart, shared = (
        int(subprocess.run([sys.executable, "-c", _ARENAS, how], check=True, stdout=subprocess.PIPE).stdout)
        for how in ("apart", "shared")
    )
    assert apart >= 6
    assert shared <= 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a habit of glibc")
def test_a_large_block_goes_back_to_the_system_although_one_was_freed_before() -> None:
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", _PROGRAM, how], check=True, stdout=subprocess.PIPE).stdout)
        for how in ("kept", "returned")
    )
    assert kept > 12 << 20
    assert returned < 2 << 20
