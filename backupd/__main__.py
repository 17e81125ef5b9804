"""``python -m backupd``: the command line, wherever its script was installed or not."""

from __future__ import annotations

import sys

from backupd.cli.main import main

sys.exit(main())
