"""The command line: words in, the application's answers out. No decision is made here."""

from __future__ import annotations

import signal
import sys

if "serve" in sys.argv[1:4:2]:  # the first word, or that after `--config FILE`
    # Before anything that takes its time: SIGHUP asks the service to read its configuration, which it is about to do.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
