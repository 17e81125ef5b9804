"""YAML that is not what somebody meant: one clear problem with its line, never more than that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from policies import yaml_tree
from policies.document import Node
from policies.yaml_tree import MAX_BYTES, parse_document, read_document


def _only(text: str) -> tuple[int | None, str]:
    _node, problems = parse_document(text, "x.yaml")
    assert len(problems) == 1, problems
    return problems[0].line, problems[0].message


def _plain(text: str) -> object:
    node, problems = parse_document(text, "x.yaml")
    assert problems == []
    assert node is not None
    return node.plain()


def test_values_follow_the_core_schema_of_yaml_1_2() -> None:
    text = "a: 1\nb: 0x1F\nc: 1.5\nd: true\ne: null\nf: ~\ng:\nh: yes\ni: 2026-11-21\nj: 1:30\nk: '5'\nl: 1e999"
    assert _plain(text) == {
        "a": 1,
        "b": 31,
        "c": 1.5,
        "d": True,
        "e": None,
        "f": None,
        "g": None,
        "h": "yes",
        "i": "2026-11-21",
        "j": "1:30",
        "k": "5",
        "l": "1e999",
    }


def test_every_value_knows_its_line() -> None:
    node, _problems = parse_document("# first\na:\n  b: 1\n  c:\n  - x\n  - y: 2\n", "x")
    assert node is not None
    inner = node.child("a")
    assert inner is not None
    assert inner.key_lines == {"b": 3, "c": 4}
    items = inner.child("c")
    assert items is not None
    assert [item.line for item in items.value if isinstance(item, Node)] == [5, 6]  # type: ignore[union-attr]  # a list


def test_aliases_mean_what_they_name() -> None:
    assert _plain("a: &x {k: [1, 2]}\nb: *x\n&y c: *y") == {"a": {"k": [1, 2]}, "b": {"k": [1, 2]}, "c": "c"}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "is empty"),
        ("# only words\n\n", 1, "is empty"),
        ("--- \n...\n", 1, "is empty"),
        ("- a\n- b\n", 1, "must be a mapping"),
        ("just words\n", 1, "must be a mapping"),
        ("a: 1\nb: 2\na: 3\n", 3, "`a` is written twice, first in line 1"),
        ("a:\n  b: 1\n  'b': 2\n", 3, "`b` is written twice"),
        ("a:\n\t- b\n", 2, "a tab is used for indentation"),
        ("a: 1\n\tb: 2\n", 2, "a tab is used for indentation"),
        ("a: *\n", 1, "begins with * needs quotes"),
        ("a: * * * * *\n", 1, "begins with * needs quotes"),
        ("a: *b\n", 1, "*b names nothing"),
        ("a: &b [1, *b]\n", 1, "would never end"),
        ("a: b: c\n", 1, "a second ': ' in one line"),
        ("a: [1, 2\nb: 3\n", 2, "is not YAML"),
        ("a: {b: 1\n", 2, "is not YAML"),
        ("a: 'b\n", 2, "is not YAML"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("a: !!python/object/apply:os.system [id]\n", 1, "tags"),
        ("a: !!int '3'\n", 1, "tags"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys (<<) are not supported"),
        ("? [a, b]\n: c\n", 1, "must be plain text"),
        ("a: &x [1]\n*x : 2\n", 2, "must be plain text"),
        ("a: 'b\x07'\n", 1, "control character U+0007"),
        ("a: 1\nb: \ud800\n", 2, "control character U+D800"),
        ('a: "b\\0"\n', 1, "control character U+0000"),
        ("a: 1 # one\x85b: 2\n", 1, "line separator U+0085"),
        ("a: 1\n# one\u2028b: 2\n", 2, "line separator U+2028"),
        ("a: @b\n", 1, "is not YAML"),
        ("%YAML 9.9.9\n---\na: 1\n", 1, "is not YAML"),
        ("a: " + "[" * 100_000, 1, "nested deeper"),
        ("a: {" * 1_000, 1, "nested deeper"),
        ('a: "\\xZZ"\n', 1, "is not YAML"),
        ('a: "\\UFFFFFFFF"\n', None, "is not YAML"),
    ],
)
@pytest.mark.parametrize("loader", [yaml.CSafeLoader, yaml.SafeLoader], ids=["libyaml", "python"])
def test_what_is_wrong_is_said_once_with_its_line(
    monkeypatch: pytest.MonkeyPatch, loader: type[object], text: str, line: int | None, message: str
) -> None:
    monkeypatch.setattr(yaml_tree, "_LOADER", loader)
    found_line, found = _only(text)
    assert message in found
    assert "\n" not in found
    if line is not None:
        assert found_line == line


def test_half_of_a_character_is_refused() -> None:
    line, message = _only('a: "b\\ud83d"\n')
    assert line == 1
    assert "invalid Unicode character escape code" in message


def test_several_duplicates_are_all_reported() -> None:
    _node, problems = parse_document("a: 1\na: 2\nb: {c: 1, c: 2}\na: 3\n", "x")
    assert [problem.line for problem in problems] == [2, 3, 4]


def test_a_bomb_of_aliases_is_refused_at_once() -> None:
    lines = ["a0: &a0 [" + ", ".join(["lol"] * 10) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 30)]
    started = time.monotonic()
    line, message = _only("\n".join(lines))
    assert "aliases that multiply are refused" in message
    assert line is not None
    assert time.monotonic() - started < 60


def test_a_long_chain_of_aliases_does_not_exhaust_the_stack() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2_000)]
    node, problems = parse_document("\n".join(lines), "x")
    assert node is None
    assert "aliases" in problems[0].message


def test_files_that_cannot_be_read_are_one_problem_each(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes("a: 1\nb: caf\xe9\n".encode("latin-1"))
    (tmp_path / "wide").write_text("a: 1\n", encoding="utf-16")
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "loop").symlink_to("loop")
    expected = {
        "missing": (None, "does not exist"),
        "pipe": (None, "not a regular file"),
        ".": (None, "is a folder"),
        "latin": (2, "byte 0xe9 is not UTF-8"),
        "wide": (1, "UTF-16"),
        "large": (None, "larger than"),
        "loop": (None, "cannot be read"),
        "latin/x": (None, "cannot be read"),
        "a\x00b": (None, "cannot be read"),
        "n" * 300: (None, "cannot be read"),
    }
    for name, (line, message) in expected.items():
        node, problems = read_document(tmp_path / name)
        assert node is None
        assert len(problems) == 1
        assert message in problems[0].message, problems
        assert problems[0].line == line
        assert problems[0].file == str(tmp_path / name)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    node, problems = read_document(tmp_path / "x")
    assert problems == []
    assert node is not None
    assert node.plain() == {"a": 1, "b": 2}


def test_a_thousand_servers_are_read_in_a_moment() -> None:
    text = "servers:\n" + "".join(
        f"  db{n}: {{socket: /run/{n}.sock, defaults_file: /etc/{n}.cnf, policy: gold}}\n" for n in range(1_000)
    )
    started = time.monotonic()
    node, problems = parse_document(text, "x")
    assert problems == []
    assert node is not None
    assert len(node.names("servers")) == 1_000
    assert time.monotonic() - started < 60
