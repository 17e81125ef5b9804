"""The commands of a prepare; what comes of them is in test_traps."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.engine.physical.streaming import check_logs, prepare_step
from backupd.engine.server.sandbox import can_confine, is_available
from backupd.engine.toolset import find_tool
from backupd.model.errors import BackupdError, ToolError, UnrestorableError
from backupd.model.server_facts import Tool, Version
from backupd.process.command import Command
from backupd.process.pipeline import run

TOOL = Tool("xtrabackup", "/usr/bin/true", Version(2, 4, 4), "")


def test_a_program_of_the_system_is_confined_to_where_its_folders_lie(tmp_path: Path) -> None:
    tool = find_tool(("mariadb-backup",))
    base, increment = tmp_path / "base", tmp_path / "increment"
    step = prepare_step(tool, "apply", base, increment, memory=1 << 30, switches=["--apply-log-only"])
    assert step.plain.argv == (
        tool.path,
        f"--defaults-file={base}/backup-my.cnf",
        "--prepare",
        "--apply-log-only",
        f"--target-dir={base}",
        "--use-memory=1024M",
        f"--incremental-dir={increment}",
    )
    if is_available():
        assert (step.command.argv[0].rpartition("/")[2], step.command.program) == ("bwrap", step.plain.program)
        assert step.command.argv[-len(step.plain.argv) :] == step.plain.argv
        bound = [step.command.argv[index + 1] for index, word in enumerate(step.command.argv) if word == "--bind"]
        assert bound == [str(tmp_path)]  # one mount for both, or files cannot be renamed from one to the other


def test_a_script_that_calls_what_the_sandbox_does_not_have_is_not_confined(tmp_path: Path) -> None:
    hidden, script = tmp_path / "hidden" / "tool", tmp_path / "programs" / "wrapper"
    for path, text in ((hidden, "#!/bin/sh\nexit 0\n"), (script, f'#!/bin/sh\nexec {hidden} "$@"\n')):
        path.parent.mkdir()
        path.write_text(text)
        path.chmod(0o755)
    assert run(Command((str(script),)), check=False).returncode == 0
    assert not can_confine(str(script))
    step = prepare_step(Tool("t", str(script), Version(2, 4), ""), "apply", tmp_path, None, memory=1)
    assert step.command == step.plain
    assert "--use-memory=1M" in step.plain.argv


@pytest.mark.parametrize(
    ("logs", "kind", "message"),
    [
        ([""], ToolError, "but did not print"),
        (["completed OK!\nno"], ToolError, "but did not print"),
        (["completed OK!", "x bad y\ncompleted OK!"], UnrestorableError, "not completely"),
    ],
)
def test_every_log_must_end_well_and_tell_of_no_trouble(
    logs: list[str],
    kind: type[BackupdError],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        check_logs(TOOL, Path("/x"), logs, silent=["bad"])
    with pytest.raises(UnrestorableError) as told:
        check_logs(TOOL, Path("/x"), ["x bad y\ncompleted OK!"], silent=["bad"])
    assert told.value.hint == (
        "every file is what was stored (its digest agrees), so another copy is the same: choose "
        "another backup (--to backup:ID)"
    )
    check_logs(TOOL, Path("/x"), ["a\n261121 02:04:24 completed OK!\n\n"], silent=["bad"])
    of_its_library = "\a/usr/bin/mariadb-backup: Warning: 2 files and 0 streams is left open"
    check_logs(TOOL, Path("/x"), [f"completed OK!\n{of_its_library}\n"], silent=["bad"])
