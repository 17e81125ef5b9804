"""What `backupd check` calls ok was tried in small, or it says that it was not."""

from __future__ import annotations

import ast
from pathlib import Path

PRODUCT = Path(__file__).parents[3] / "backupd"

TRIED = {
    "there is no catalog at {} yet: the first backup or the service ": "its place is looked at",
    "manifests are signed with {}": "a sample is signed, and the signature verified",
    "{} is {} {} ({}), {} tables, {}, at {}": "asked of the server",
    "{} is {}: {}": "asked of the server that answers, and compared with what is known of it",
    "every local user can read at {}/metrics, without a token: names of servers, ": "told by the configuration",
    "physical backups leave out the {} tables of engine {}; all of them ": "the server's tables are listed",
    "the binary log is received up to its end; {}": "the end of the log is received, as a stream does",
    "{} can be read": "a byte of each file is read",
    "{} can be read: key plugins of prepared copies get a copy of it": "it is opened",
    "programs that work on backups run as {}, ": "the user is looked up, as before each of them",
    "a user namespace confines programs that work on backups: ": "a program is run in one",
    "programs that work on backups are confined by root, ": "a program is run so",
    "{} is a mount point: a restore onto it moves files in, it cannot be renamed": "asked of the kernel",
    "{} has every privilege that is needed": "each is looked for in the grants that the server gives",
    "{} {} at {} connects and begins a dump; it writes ": "it does",
    "{} is {}{}": "something is sealed for all keys",
    "{}: {}": "the way to the server: the check's own connection is secured so, or cannot be made",
    "it can be written": "something is put and removed",
    "it can be written, {}": "something is put and removed",
    "{} can be written": "something is written",
    "{} may restore tables into {}, by its grants": "each privilege is looked for in the grants that the server gives",
    "--into {} needs an account that may write, named by servers.": "the one account that there is lacks grants",
    "{} ({}) has {} nodes; configured are {}": "each configured node is asked",
    "{} replicates from nobody, so there is nothing to compare it with": "it is asked for its sources",
    "the account on {} (the {}) may do a consistency check": "each privilege is looked for in the grants that it gives",
}
"""Beginnings of the lines that are ok, and how each was tried."""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def test_every_line_of_check_that_is_ok_was_tried_or_says_that_it_was_not() -> None:
    found = [
        _text(call.args[1])
        for path in sorted(PRODUCT.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "fine"
    ]
    assert len(found) > len(TRIED)
    unknown = [text for text in found if "not probed" not in text and not any(text.startswith(one) for one in TRIED)]
    assert not unknown, "try it in small, or say `not probed`; then name it above"
    assert not [one for one in TRIED if not any(text.startswith(one) for text in found)], "these lines are gone"
