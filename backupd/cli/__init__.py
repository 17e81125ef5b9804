"""The command line: words in, the application's answers out. No decision is made here."""

from __future__ import annotations

import atexit
import gc
import signal
import sys

if "serve" in sys.argv[1:4:2]:  # the first word, or that after `--config FILE`
    # Before anything that takes its time: SIGHUP asks the service to read its configuration, which it is about to do.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

# A start makes 130,000 objects that stay, and Python looks for cycles among them after every 700: a tenth of its time.
# What is garbage later is found all the same, at most some megabytes later.
gc.set_threshold(50_000)
# At the end it would look at all of them once more, a sixth of the time of a command; nothing is lost by leaving that.
atexit.register(gc.freeze)
