"""What the names of files tell, and which missing ones a prepare may speak of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.physical.streaming import why_unprepared, without_left_out
from backupd.engine.physical.tablefiles import (
    absent,
    decode_file_name,
    fulltext_id,
    highest_space_id,
    left_behind,
    owner_of,
    space_id,
    space_id_of_meta,
    stem_of,
    table_of,
)
from backupd.model.errors import ToolError, UnrestorableError
from backupd.model.manifest import BodyFacts, decode_body, encode_facts
from backupd.model.server_facts import Position, Receipts, Tool, Version
from backupd.model.table import BaseTable, TableName
from tests.support.catalog.samples import server_info
from tests.support.servers.mariadb import PrivateServer

NAMES = (
    "plain_1",
    "naïve.tablé $1",
    "größe 数据",
    "таблица",
    "Ωmega",
    "a-b/c\\d'\"`%",
    "ΐ",
    "ῴ",
    "Ⓐｚ",
    "#sql-like",
    " x",
)


def test_names_are_read_as_the_server_writes_them(shared_server: PrivateServer) -> None:
    for name in NAMES:
        written = shared_server.query("SELECT CAST(CONVERT(%s USING filename) AS BINARY)", (name,))[0][0].decode()
        assert decode_file_name(written) == name
    letters = "".join(map(chr, [*range(0xC0, 0x590), *range(0x1E00, 0x2000), *range(0x2160, 0x2180)]))
    written = shared_server.query("SELECT CAST(CONVERT(%s USING filename) AS BINARY)", (letters,))[0][0].decode()
    assert decode_file_name(written) == letters


@pytest.mark.parametrize("text", ["a b", "@", "@xyz@", "@zz", "x@00"])
def test_what_is_no_such_name_is_shown_as_the_servers_show_it(text: str) -> None:
    assert decode_file_name(text) == f"#mysql50#{text}"


def test_a_name_that_is_a_device_elsewhere_loses_its_mark() -> None:
    assert decode_file_name("con@@@") == "con"


@pytest.mark.parametrize(
    ("path", "stem"),
    [
        ("shop/orders.ibd", "shop/orders"),
        ("shop/orders.ibd.delta", "shop/orders"),
        ("shop/orders.new", "shop/orders"),
        ("shop/orders#P#p0#SP#s1.ibd", "shop/orders"),
        ("shop/orders#p#p0.ibd.meta", "shop/orders"),
        ("shop/orders.TRG", "shop/orders"),
        ("shop/na@0vve@002e.frm", "shop/na@0vve@002e"),
        ("shop/#sql-alter-1-2.ibd", "shop/#sql-alter-1-2"),
        ("shop/db.opt", ""),
        ("shop/some_trigger.TRN", ""),
        ("shop/FTS_000000000000001b_CONFIG.ibd", ""),
        ("mysql/user.frm", ""),
        ("sys/sys_config.ibd", ""),
        ("ibdata1", ""),
        ("undo001", ""),
        ("#innodb_redo/#ib_redo0", ""),
        ("ts1.ibd", ""),
    ],
)
def test_every_file_of_a_table_has_the_same_stem(path: str, stem: str) -> None:
    assert stem_of(path) == stem


def test_the_owner_of_a_file_is_a_table_and_no_leftover_of_one() -> None:
    assert owner_of("gr@1i@1je/t#P#p0.ibd") == TableName("größe", "t")
    assert owner_of("shop/#sql-1.ibd") is None
    assert table_of("shop/orders") == TableName("shop", "orders")
    assert fulltext_id("other/fts_000000000000042e_being_deleted.ibd") == 0x42E
    assert fulltext_id("other/orders.ibd") is None


def test_numbers_of_tablespaces_are_read_from_both_their_places(shared_server: PrivateServer) -> None:
    shared_server.settle()
    view = shared_server.query("SELECT SPACE FROM information_schema.INNODB_SYS_TABLES WHERE NAME = 'shop/orders'")
    head = (shared_server.datadir / "shop/orders.ibd").read_bytes()[:64]
    assert space_id(head) == view[0][0]
    assert space_id_of_meta("page_size = 16384\nzip_size = 0 \nspace_id = 12\n") == 12
    assert space_id_of_meta("nothing") is None
    newest = max(row[0] for row in shared_server.query("SELECT SPACE FROM information_schema.INNODB_SYS_TABLES"))
    highest = highest_space_id(shared_server.datadir / "ibdata1", 16384)
    assert highest is not None
    assert highest >= newest


def test_a_page_that_is_another_one_tells_no_number(short_tmp: Path) -> None:
    (short_tmp / "ibdata1").write_bytes(bytes(16384 * 9))
    assert highest_space_id(short_tmp / "ibdata1", 16384) is None
    assert highest_space_id(short_tmp / "absent", 16384) is None


def test_a_link_that_a_rename_left_behind_belongs_to_the_only_table_it_can() -> None:
    paths = ["a/t.isl", "a/t.ibd", "b/t.frm", "b/u.frm", "b/u.ibd"]
    assert left_behind(paths) == {"a/t": "b/t"}
    assert left_behind([*paths, "c/t.frm"]) == {}
    assert left_behind([*paths, "a/t.frm"]) == {}


def test_only_files_that_were_left_out_may_be_missed_by_a_prepare() -> None:
    lines = [
        "InnoDB: Tablespace 6 was not found at ./shop/x.ibd when restoring a (partial?) backup. All redo log",
        "InnoDB: Tablespace 7 was not found at /srv/else/shop/x#P#p0.ibd when restoring a (partial?) backup",
        "InnoDB: Could not find a valid tablespace file for `shop`.`x`. See",
        "InnoDB: Could not find a valid tablespace file for shop/x. Please",
        "InnoDB: Tablespace 8 was not found at ./shop/wanted.ibd when restoring a (partial?) backup",
        "InnoDB: [ERROR] something else about ./shop/x.ibd",
    ]
    kept = without_left_out("\n".join(lines), lambda path: stem_of(path) == "shop/x")
    assert kept.splitlines() == lines[4:]


def _lacking(
    engine: str,
    *files: str,
    table: str = "t",
    space: int | None = 7,
    shared: bool = False,
    parts: tuple[str, ...] = (),
    renamed: dict[str, str] | None = None,
) -> bool:
    one = BaseTable(TableName("m", table), engine, space, shared, parts)
    return absent([one], ["mysql/db.frm", *files], renamed) == (one,)


@pytest.mark.parametrize(
    ("engine", "files"),
    [
        ("MyISAM", ("m/t.frm", "m/t.MYD", "m/t.MYI")),
        ("Aria", ("m/t.frm", "m/t.MAD", "m/t.MAI")),
        ("CSV", ("m/t.frm", "m/t.CSV", "m/t.CSM")),
        ("ARCHIVE", ("m/t.frm", "m/t.ARZ")),
        ("MRG_MyISAM", ("m/t.frm", "m/t.MRG")),
        ("InnoDB", ("m/t.frm", "m/t.ibd")),
        ("InnoDB", ("m/t.frm", "m/t.new")),
        ("InnoDB", ("m/t.frm", "m/t.ibd.delta", "m/t.ibd.meta")),
        ("InnoDB", ("m/t.frm", "m/t.new.delta", "m/t.new.meta")),
        ("MEMORY", ("m/t.frm",)),
        ("BLACKHOLE", ("m/t.frm",)),
        ("ROCKSDB", ("m/t.frm",)),
        ("", ("m/t.frm",)),
    ],
)
def test_a_table_needs_every_file_of_its_engine(engine: str, files: tuple[str, ...]) -> None:
    assert not _lacking(engine, *files)
    for left_out in files:
        assert _lacking(engine, *(file for file in files if file != left_out)), left_out


@pytest.mark.parametrize(("engine", "suffixes"), [("InnoDB", ("ibd",)), ("MyISAM", ("MYD", "MYI"))])
def test_each_partition_needs_its_files(engine: str, suffixes: tuple[str, ...]) -> None:
    whole = [
        "m/t.frm",
        "m/t.par",
        *(f"m/t#P#{part}.{suffix}" for part in ("p0#SP#Gr@1i@1je", "p1#SP#s1") for suffix in suffixes),
    ]
    parts = ("p0/gr\u00f6\u00dfe", "P1/s1")
    assert not _lacking(engine, *whole, parts=parts)
    for left_out in whole[2:]:
        assert _lacking(engine, *(file for file in whole if file != left_out), parts=parts), left_out
    assert not _lacking("MyISAM", "m/t.frm", "m/t#P#a.MYD", "m/t#P#a.MYI"), "the partitions are not known"
    assert _lacking("MyISAM", "m/t.frm", "m/t#P#a.MYD"), "the partitions are not known"


def test_tables_of_a_common_tablespace_have_no_file_of_their_own() -> None:
    assert not _lacking("InnoDB", "m/t.frm", shared=True)
    assert not _lacking("InnoDB", "m/t.frm", space=None), "it may be in the system tablespace"
    assert _lacking("InnoDB", space=None)


def test_names_of_files_are_read_as_names_of_tables() -> None:
    assert not _lacking("Aria", "m/na@0vve@002e.frm", "m/na@0vve@002e.MAD", "m/na@0vve@002e.MAI", table="na\u00efve.")
    assert _lacking("Aria", "m/t.frm", "m/t.MAD", "m/t.MAI", table="T")


def test_tables_that_were_renamed_or_dropped_while_the_tool_ran() -> None:
    swapped = ("m/t.frm", "m/u.frm", "m/t.ibd", "m/t.ren", "m/u.ibd", "m/u.ren")
    assert not _lacking("InnoDB", *swapped, renamed={"m/t": "m/u", "m/u": "m/t"})
    assert not _lacking("InnoDB", "m/t.frm", "m/u.ibd", "m/u.ren", renamed={"m/u": "m/t"})
    assert _lacking("InnoDB", "m/t.frm", "m/t.ibd", "m/t.ren", renamed={"m/t": "m/u"})
    assert not _lacking("InnoDB", "m/t.frm", "m/u.ibd", "m/u.ren"), "nobody knows what it is called now"
    assert _lacking("InnoDB", "m/t.frm", "m/t.ibd", "m/t.del")
    assert not _lacking("InnoDB", "m/t.frm", "m/t.ibd", "m/t.del", "m/t.new")
    assert not _lacking("InnoDB", "m/t.frm", "o/t.ibd", "o/t.isl"), "moved with its DATA DIRECTORY into another schema"


def test_where_definitions_are_in_the_dictionary() -> None:
    name = "a_table_with_a_long_name"
    one = BaseTable(TableName("m", name), "MyISAM")
    files = [f"m/{name}.MYD", f"m/{name}.MYI", "m/a_table_with_a_l_361.sdi"]
    assert absent([one], files) == ()
    for left_out in files[:2]:
        assert absent([one], [file for file in files if file != left_out]) == (one,)
    assert absent([one], [*files[:2], "n/other_7.sdi"]) == (one,)
    assert absent([BaseTable(TableName("m", "i"), "InnoDB", 4)], ["m/i.ibd", *files]) == ()


def test_a_manifest_tells_what_tables_there_were() -> None:
    version = Version(10, 11, 6)
    server = server_info(version=version, version_text="10.11.6", datadir="/d", log_bin=False, position=Position())
    facts = BodyFacts(
        backup_id="20260102T000000Z-00000001",
        position=Position(),
        server=server,
        tool=Tool("t", "/t", version, "10"),
        receipts=Receipts("full-backuped", 0, 1, 1, Position(), "10.11.6", "10.11.6"),
        objects_digest="",
        missing=(TableName("m", "no`de"),),
        inventory=(
            BaseTable(TableName("m", "größe"), "InnoDB", 7, shared=True),
            BaseTable(TableName("m", "t"), "Aria", parts=("p0", "p1/s1")),
        ),
    )
    written = encode_facts(facts, 0)
    assert decode_body(written).facts == facts
    earlier = replace(facts, missing=(), inventory=None)
    old = encode_facts(earlier, 0)
    assert not {b"inventory", b"missing"} & set(old.split(b'"'))
    assert decode_body(old).facts == earlier


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("[ERROR] InnoDB: Unable to apply log to corrupted page 4 in file shop/b.ibd", True),
        ("Can't rename ./a/t.ibd to ./a/x.ibd: errno 2", True),
        ("***WARNING: './shop/t' may be crashed", True),
        ("[01] Copying ./shop/corrupted_orders.frm to ./shop/corrupted_orders.frm", False),
        ("[ERROR] InnoDB: Data structure corruption\nOSError: No space left on device", False),
        ("[ERROR] InnoDB: corrupted page 4\nCannot decrypt shop/b.ibd", False),
        ("Killed", False),
    ],
)
def test_a_prepare_that_fails_over_its_data_is_told_from_one_that_something_else_ended(line: str, bad: bool) -> None:
    log = f"[01] Copying ./mysql/plugin.frm to ./mysql/plugin.frm\n{line}\n"
    told = why_unprepared(ToolError("mariadb-backup exited with 1"), log)
    assert isinstance(told, UnrestorableError) is bad
    assert (line.splitlines()[0] in told.detail) is bad
