"""Lists in words."""

from __future__ import annotations

from backupd.model.text import few


def test_a_list_in_words_says_how_many_it_leaves_out() -> None:
    assert few("abc", 3) == "a, b, c"
    assert few((name for name in "abcde"), 3) == "a, b, c and 2 more"
    assert few(range(3), 1, "more files") == "0 and 2 more files"
    assert few((), 3) == ""
