"""The command line: words in, the application's answers out. No decision is made here."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from collections.abc import Mapping

if "serve" in sys.argv[1:4:2]:  # the first word, or that after `--config FILE`
    # Before anything that takes its time: SIGHUP asks the service to read its configuration, which it is about to do.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

# Python looks for cycles of garbage whenever 700 objects more than before are alive: a tenth of the time of a start,
# which makes 130,000 that stay. Here it looks for the first time when there are more than that, then after every
# 50,000: what is garbage is found all the same, at most some megabytes later.
gc.set_threshold(200_000)


def _look_again(phase: str, _found: Mapping[str, int]) -> None:
    if phase == "stop":
        gc.callbacks.remove(_look_again)
        gc.set_threshold(50_000)


gc.callbacks.append(_look_again)

# At the end it would look at all of them once more, a sixth of the time of a command; nothing is lost by leaving that.
atexit.register(gc.freeze)
