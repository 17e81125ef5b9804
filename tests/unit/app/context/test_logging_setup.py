"""How a log is written: JSON lines, and text for a terminal."""

from __future__ import annotations

import json
import logging
from io import StringIO

from backupd.app.context import logging_setup as logs

HASH = "*2470C0C06DEE42FD1618BBB99005ADCA2EC9D1E1"


def test_the_log_is_json_lines_where_nobody_looks() -> None:
    stream = StringIO()
    with logs.logging_to(stream):
        logs.say("job-failed", f"first\npassword=hunter2 {HASH}", level=logging.ERROR, server="db1", job="j1")
        logs.say("daemon-started", "hello")
    logs.say("daemon-stopped", "nobody listens")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "error",
        "event": "job-failed",
        "server": "db1",
        "job": "j1",
        "message": "first\npassword=[hidden] [hidden]",
    }
    assert (second["event"], second["server"], second["message"]) == ("daemon-started", "", "hello")


def test_the_log_is_text_on_a_terminal() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with logs.logging_to(stream):
        logs.say("job-failed", "gpg exited with 2", level=logging.WARNING, server="db1", job="j1")
    line = stream.getvalue()
    assert line.endswith("Z WARNING job-failed db1 j1: gpg exited with 2\n")
