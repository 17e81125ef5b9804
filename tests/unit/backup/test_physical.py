"""What a physical backup may lack, and what is said of it."""

from __future__ import annotations

import pytest

from backupd.backup.physical import refuse_incomplete, words_of
from backupd.engine.physical.capture import Stock
from backupd.model.errors import TablesChangedError
from backupd.model.table import BaseTable, TableName

_INNODB = BaseTable(TableName("m", "i"), "InnoDB", 7)
_OLD = BaseTable(TableName("m", "o"), "MyISAM")


def test_a_whole_backup_is_kept_without_a_word() -> None:
    stock = Stock(inventory=(_INNODB, _OLD), fetched=(_OLD.name,), swapped=("m/a", "m/b"))
    refuse_incomplete(stock, increment=False, repeats=2)
    assert words_of(stock) == ()


def test_an_increment_with_swapped_tables_becomes_a_full_backup() -> None:
    with pytest.raises(TablesChangedError, match=r"m\.a, m\.p") as caught:
        refuse_incomplete(Stock(inventory=(), swapped=("m/a", "m/p#P#x")), increment=True, repeats=0)
    assert caught.value.as_full


@pytest.mark.parametrize("repeats", [2, 0])
def test_a_backup_without_a_table_of_innodb_is_never_kept(repeats: int) -> None:
    with pytest.raises(TablesChangedError, match=r"left out 1 table that the server had .*: m\.i\n") as caught:
        refuse_incomplete(Stock(inventory=(_INNODB, _OLD), missing=(_INNODB, _OLD)), increment=False, repeats=repeats)
    assert not caught.value.as_full


def test_a_backup_without_other_tables_is_kept_when_it_was_taken_often_enough() -> None:
    stock = Stock(inventory=(_INNODB, _OLD), missing=(_OLD,))
    with pytest.raises(TablesChangedError, match=r"m\.o"):
        refuse_incomplete(stock, increment=False, repeats=1)
    refuse_incomplete(stock, increment=False, repeats=0)
    (words,) = words_of(stock)
    assert words.startswith("this backup lacks 1 table that")
    assert words.endswith(": m.o")


def test_a_backup_whose_tables_nobody_listed_says_so() -> None:
    (words,) = words_of(Stock(problem="the account does not see the tables of m"))
    assert "were not compared" in words
    assert words.endswith("the account does not see the tables of m")
