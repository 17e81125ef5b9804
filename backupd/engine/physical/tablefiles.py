"""Which table a file of a data directory, or of a backup of one, belongs to: by its path alone.

A schema is a folder; a table's files bear its name, a suffix of its engine, and ``#P#...`` for a partition of it. What
belongs to no single table (``db.opt``, general tablespaces, undo, redo, the server's own schemas) has no owner. The
tables behind a full-text index are files of their own, ``FTS_<id of the table, in hex>_...``, and only a server's
dictionary says whose they are.

Names of schemas and tables in names of files: letters, digits and ``_`` stay; a letter of most alphabets becomes ``@``
and two characters, everything else ``@`` and four hex digits (``größe`` is ``gr@1i@1je``). MySQL offers no way to ask
for that, and no server runs when a backup's list of files is read, so the two-character codes are here, as MariaDB
10.11.19 gave them one by one.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from backupd.engine.sql.tables import SYSTEM_SCHEMAS
from backupd.model.table import BaseTable, TableName

_ORDER = "@0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Of the second characters of the codes."""
_CODES = """\
@           ⒶⒷⒸⒹⒺⒻⒼⒽⒾⒿⓀⓁⓂⓃⓄⓅⓆⓇⓈⓉⓊⓋⓌⓍⓎⓏⓐⓑⓒⓓⓔⓕⓖⓗⓘⓙⓚⓛⓜⓝⓞⓟⓠⓡⓢⓣⓤⓥⓦⓧⓨⓩ
0                 ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓ      àáâãäåæçèéêëìíîïðñòó
1                 ÔÕÖ ØÙÚÛÜÝÞŸĀĂĄĆĈĊČĎ      ôõößøùúûüýþÿāăąćĉċčď
2                 ĐĒĔĖĘĚĜĞĠĢĤĦĨĪĬĮ ĲĴĶ      đēĕėęěĝğġģĥħĩīĭįıĳĵķ
3                  ĹĻĽĿŁŃŅŇ ŊŌŎŐŒŔŖŘŚŜ      ĸĺļľŀłńņňŉŋōŏőœŕŗřśŝ
4                 ŞŠŢŤŦŨŪŬŮŰŲŴŶŹŻŽ          şšţťŧũūŭůűųŵŷźżžſ
5                                                             ΐ
6                 ΆΈΉΊ Α ΓΔΕΖΗ Ι ΛΜΝΞΟ      άέήίΰαβγδεζηθικλμνξο
7                  Ρ  ΤΥ ΧΨΩΪΫΌΎΏ ΒΘϒϓ      πρςστυφχψωϊϋόύώ ϐϑ
8                 ϔΦΠ  ϚϜϞϠϢϤϦϨϪϬϮΚ Σ        ϕϖϗϙϛϝϟϡϣϥϧϩϫϭϯϰϱϲϳ
9                      ϽϾϿ                  ϵ϶ϸϻϼ
AＡ
BＢ
CＣ
DＤ
EＥ
FＦ
GＧАФЈѸҦӍӴ ՄⅠ                           ƳǞȈȰ      ḀḨṐṸṠẾỦἈἪ Ὤᾈᾬ
HＨБХЉѺҨ ӶԱՅⅡ                          ƂƵǠȊȲ  Ɲ   ḂḪṒṺ ỀỨἉἫ Ὥᾉᾭ
IＩВЦЊѼҪӐӸԲՆⅢ                          ƄƸǢȌ       ḄḬṔṼ ỂỪἊἬ Ὦᾊᾮ
JＪГЧЋѾҬӒ ԳՇⅣ                          Ƈ ǤȎ  Ɠ Ʈ  ḆḮṖṾ ỄỬἋἭ Ὧᾋᾯ
KＫДШЌҀҮӔ ԴՈⅤ                          Ƌ ǦȐ   Ɵ   ḈḰṘẀ ỆỮἌἮ ᾺᾌᾸ
LＬЕЩЍ ҰӖ ԵՉⅥ                            ǨȒ    Ʊ  ḊḲṚẂẠỈỰἍἯὙΆᾍᾹ
MＭЖЪЎҊҲӘ ԶՊⅦ                          Ƒ ǪȔ  Ɣ Ʋ  ḌḴṜẄẢỊỲἎἸ Ὲᾎ
NＮЗЫЏҌҴӚ ԷՋⅧ                          ǶƼǬȖ       ḎḶṞẆẤỌỴἏἹὛΈᾏᾼῨ
OＯИЬѠҎҶӜ ԸՌⅨ                          ƘǄǮȘȺ      ḐḸ ẈẦỎỶἘἺ Ὴᾘ Ῡ
PＰЙЭѢҐҸӞԀԹՍⅩ                          ȽǇ ȚȻ      ḒḺṢẊẨỐỸἙἻὝΉᾙ
QＱКЮѤҒҺӠԂԺՎⅪ                           ǊǱȜȾƁ     ḔḼṤẌẪỒ ἚἼ Ὶᾚ
RＲЛЯѦҔҼӢԄԻՏⅫ                          ȠǍǴȞ ƆƗ    ḖḾṦẎẬỔ ἛἽὟΊᾛ
SＳМЀѨҖҾӤԆԼՐⅬ                          ƠǏǸ   Ɩ    ḘṀṨẐẮỖ ἜἾ Ὸᾜ Ῥ
TＴНЁѪҘӀӦԈԽՑⅭ                          ƢǑǺȢ Ɖ  Ʒ  ḚṂṪẒẰỘ ἝἿ Όᾝῌ
UＵОЂѬҚӁӨԊԾՒⅮ                          ƤǓǼȤ Ɗ     ḜṄṬẔẲỚ  Ὀ Ὺᾞ
VＶПЃѮҜӃӪԌԿՓⅯ                          ƧǕǾȦ   ƦɁ  ḞṆṮ ẴỜ  Ὁ Ύᾟ
WＷРЄѰҞӅӬԎՀՔ                            ǗȀȨ Ə     ḠṈṰ ẶỞ  ὊὨῺᾨ
XＸСЅѲҠӇӮ ՁՕ                            ǙȂȪ       ḢṊṲ ẸỠ  ὋὩΏᾩ
YＹТІѴҢӉӰ Ղ                            ƬǛȄȬ ƐƜƩ   ḤṌṴ ẺỢ ἨὌὪ ᾪῘῼ
ZＺУЇѶҤӋӲ Ճ                            ƯƎȆȮ       ḦṎṶ ẼỤ ἩὍὫ ᾫῙ
aａ
bｂ
cｃ
dｄ
eｅ
fｆ
gｇафјѹҧӎӵ մⅰ                          ƀƴǟȉȱ ɝɱʅʙʭḁḩṑṹẛếủἀἢ ὤᾀᾤῒ
hｈбхљѻҩ ӷայⅱ                          ƃƶǡȋȳ ɞɲʆʚʮḃḫṓṻ ềứἁἣ ὥᾁᾥΐῶ
iｉвцњѽҫӑӹբնⅲ                          ƅƹǣȍȴ ɟɳʇʛʯḅḭṕṽ ểừἂἤ ὦᾂᾦ ῷ
jｊгчћѿҭӓ գշⅳ                          ƈƺǥȏȵ ɠɴʈʜ ḇḯṗṿ ễửἃἥ ὧᾃᾧ
kｋдшќҁүӕ դոⅴ                          ƌƻǧȑȶ ɡɵʉʝ ḉḱṙẁ ệữἄἦὐὰᾄᾰῖ
lｌещѝ ұӗ եչⅵ                          ƍ ǩȓȷ ɢɶʊʞ ḋḳṛẃạỉựἅἧὑάᾅᾱῗ
mｍжъўҋҳә զպⅶ                          ƒƾǫȕȸ ɣɷʋʟ ḍḵṝẅảịỳἆἰὒὲᾆᾲ
nｎзыџҍҵӛ էջⅷ                          ƕƽǭȗȹɐɤɸʌʠ ḏḷṟẇấọỵἇἱὓέᾇᾳῠ
oｏиьѡҏҷӝ ըռⅸ                          ƙǆǯș ɑɥɹʍʡ ḑḹṡẉầỏỷἐἲὔὴᾐᾴῡ
pｐйэѣґҹӟԁթսⅹ                          ƚǉǰțȼɒɦɺʎʢ ḓḻṣẋẩốỹἑἳὕήᾑ ῢ
qｑкюѥғһӡԃժվⅺ                          ƛǌǳȝ ɓɧɻʏʣ ḕḽṥẍẫồ ἒἴὖὶᾒᾶΰ
rｒляѧҕҽӣԅիտⅻ                          ƞǎǵȟȿɔɨɼʐʤ ḗḿṧẏậổ ἓἵὗίᾓᾷῤ
sｓмѐѩҗҿӥԇլրⅼ                          ơǐǹȡɀɕɩɽʑʥ ḙṁṩẑắỗ ἔἶ ὸᾔῂῥ
tｔнёѫҙ ӧԉխցⅽ                          ƣǒǻȣ ɖɪɾʒʦ ḛṃṫẓằộ ἕἷ όᾕῃῦ
uｕођѭқӂөԋծւⅾ                          ƥǔǽȥ ɗɫɿʓʧ ḝṅṭẕẳớ  ὀ ὺᾖῄῧ
vｖпѓѯҝӄӫԍկփⅿ                          ƨǖǿȧ ɘɬʀʔʨ ḟṇṯẖẵờ  ὁ ύᾗ
wｗрєѱҟӆӭԏհք                           ƪǘȁȩ əɭʁʕʩ ḡṉṱẗặở  ὂὠὼᾠῆ
xｘсѕѳҡӈӯ ձօ                           ƫǚȃȫ ɚɮʂʖʪ ḣṋṳẘẹỡ  ὃὡώᾡῇῲ
yｙтіѵңӊӱ ղ                            ƭǜȅȭ ɛɯʃʗʫ ḥṍṵẙẻợ ἠὄὢ ᾢῐῳ
zｚуїѷҥӌӳ ճ                            ưǝȇȯ ɜɰʄʘʬ ḧṏṷẚẽụ ἡὅὣ ᾣῑῴ
"""
"""A line for each first character: that, then a letter for each second one, or a space."""

_DECODED = {
    f"@{line[0]}{second}": letter
    for line in _CODES.splitlines()
    for second, letter in zip(_ORDER, line[1:], strict=False)
    if letter != " "
}
_TOKEN = re.compile("@(?:[0-9a-f]{4}|..)|[0-9A-Za-z_]", re.DOTALL)
_RESERVED = "@@@"
"""Behind names that are devices elsewhere (``con``)."""
_OLD = "#mysql50#"
"""How the servers themselves show a name that is no such code."""


def decode_file_name(text: str) -> str:
    """The name of a schema or table whose folder or file is called ``text``, without suffix and partition."""
    bare = text.removesuffix(_RESERVED)
    found: list[str] = []
    index = 0
    while index < len(bare):
        match = _TOKEN.match(bare, index)
        letter = _letter(match[0]) if match else ""
        if match is None or not letter:
            return _OLD + text
        found.append(letter)
        index = match.end()
    return "".join(found)


def _letter(token: str) -> str:
    if not token.startswith("@"):
        return token
    return _DECODED.get(token, "") if len(token) == 3 else chr(int(token[1:], 16))


_KEPT = 100_000
"""Answers that are remembered: every file of a backup is asked about several times."""
_FULLTEXT = re.compile(r"fts_([0-9a-f]{16})_", re.IGNORECASE)
_SHARED = ("db.opt",)
_SMALL = (".TRN", ".sdi")
"""Suffixes of tiny files that are named after something else: a trigger, a table and a number. All are taken."""
_END = re.compile(r"\.|#[A-Za-z]+#")
_IN_SCHEMA = re.compile(r"(?P<schema>[^/#]+)/(?P<file>[^/]+)")
_PART = re.compile("#(?:[Pp]|[Ss][Pp])#")
_SDI = re.compile(r"(?P<schema>[^/#]+)/(?P<prefix>[^/]+)_\d+\.sdi")
_INNODB = "innodb"
OF_ENGINE: Mapping[str, tuple[str, ...]] = {
    "myisam": ("MYD", "MYI"),
    "aria": ("MAD", "MAI"),
    "csv": ("CSV", "CSM"),
    "archive": ("ARZ",),
    "mrg_myisam": ("MRG",),
}
"""Suffixes of the files without which a table of the engine is nothing. Engines that are not here keep no file for
each table (RocksDB), keep nothing (MEMORY), or keep it elsewhere."""


@functools.lru_cache(maxsize=_KEPT)
def stem_of(path: str) -> str:
    """``shop/orders`` of ``shop/orders#P#old.ibd.delta``; "" for what belongs to no single table. A table's stem is the
    same in every backup of a server, and no two tables have the same one."""
    match = _IN_SCHEMA.fullmatch(path)
    if match is None or match["schema"] in SYSTEM_SCHEMAS:
        return ""
    file = match["file"]
    if file in _SHARED or file.endswith(_SMALL) or _FULLTEXT.match(file):
        return ""
    end = _END.search(file, 1)  # a leading # is that of #sql..., which is none of the names below
    return f"{match['schema']}/{file[: end.start()] if end else file}"


@functools.lru_cache(maxsize=_KEPT)
def table_of(stem: str) -> TableName:
    """The table of a ``stem_of``."""
    schema, _, table = stem.partition("/")
    return TableName(decode_file_name(schema), decode_file_name(table))


def owner_of(path: str) -> TableName | None:
    """The table that ``path`` (relative to the data directory, with forward slashes) belongs to."""
    stem = stem_of(path)
    return table_of(stem) if stem and "/#" not in stem else None


def left_behind(paths: Iterable[str]) -> dict[str, str]:
    """Stems of tablespaces with a DATA DIRECTORY whose table was renamed into another schema, and the stem that it has
    now: MariaDB moves the definition only (see ``datafiles``)."""
    listed = [path for path in paths if stem_of(path)]
    defined = {stem_of(path) for path in listed if path.endswith(".frm")}
    links = {stem_of(path) for path in listed if path.endswith(".isl")} - defined
    if not links:
        return {}
    bare = defined - {stem_of(path) for path in listed if not path.endswith(".frm")}
    found: dict[str, str] = {}
    for link in links:
        able = [stem for stem in bare if stem.partition("/")[2] == link.partition("/")[2]]
        if len(able) == 1:
            found[link] = able[0]
    return found


def absent(
    tables: Iterable[BaseTable], paths: Iterable[str], renamed: Mapping[str, str] | None = None
) -> tuple[BaseTable, ...]:
    """Those of ``tables`` of which the backup with the entries ``paths`` lacks a file that they need, each partition's
    counted.

    A table of InnoDB needs its ``.ibd``, or its ``.ibd.delta`` and ``.ibd.meta`` in an increment, or the same as
    ``.new``; none where it shares a tablespace or ``space`` is not known. Whether definitions are files of their own
    (``.frm``, ``.sdi``) shows in ``paths``. ``renamed``: stem to stem, what the files ``*.ren`` say (see
    ``datafiles``); None where nobody has read them, and then no table of InnoDB is called absent that may be meant.
    """
    return tuple(_Held(frozenset(paths), renamed).lacking(tables))


class _Held:
    """What a backup holds, by table and partition. Suffixes are without their dot; the partition of a table that has
    none is ""."""

    def __init__(self, paths: Collection[str], renamed: Mapping[str, str] | None) -> None:
        self._suffixes: dict[TableName, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._sdi: dict[str, set[str]] = defaultdict(set)
        moved = left_behind(paths)
        for path in paths:
            stem = stem_of(path)
            if stem:
                part, _, suffix = path.removeprefix(stem).partition(".")
                self._suffixes[table_of(stem)][part_name(part)].add(suffix)
                if stem in moved:
                    self._suffixes[table_of(moved[stem])][part_name(part)].add(suffix)
            elif match := _SDI.fullmatch(path):
                self._sdi[decode_file_name(match["schema"])].add(decode_file_name(match["prefix"]))
        self._has_frm = any(path.endswith(".frm") for path in paths)
        renames = [path.removesuffix(".ren") for path in paths if path.endswith(".ren")]
        self._has_uncertain = any(stem not in (renamed or {}) for stem in renames)
        taken = [(*_named(stem), *_named((renamed or {})[stem])) for stem in renames if stem in (renamed or {})]
        self._come = {(table, part) for old, of, table, part in taken if self._pages(old, of)}
        self._gone = {(old, of) for old, of, _table, _part in taken}

    def lacking(self, tables: Iterable[BaseTable]) -> Iterator[BaseTable]:
        return (table for table in tables if not self._whole(table))

    def _whole(self, table: BaseTable) -> bool:
        found, engine = self._suffixes.get(table.name, {}), table.engine.lower()
        if self._has_frm:
            if "frm" not in found.get("", ()):
                return False
        elif (
            self._sdi
            and engine in OF_ENGINE
            and not any(table.name.table.startswith(prefix) for prefix in self._sdi.get(table.name.schema, ()))
        ):
            return False
        if engine == _INNODB:
            if table.shared or table.space is None:
                return True
            return all(self._has_pages(table.name, part) for part in table.parts or ("",))
        needed = OF_ENGINE.get(engine, ())
        # Where the partitions are not known, each that left a trace has to be whole, and there has to be one.
        known = [part.lower() for part in table.parts] or [part for part in found if part] or [""]
        return all(suffix in found.get(part, ()) for part in known for suffix in needed)

    def _has_pages(self, table: TableName, part: str) -> bool:
        part = part.lower()
        if (table, part) in self._come:
            return True
        there = self._suffixes.get(table, {}).get(part, ())
        if "new" in there or {"new.delta", "new.meta"} <= set(there):
            return True
        return self._has_uncertain or ((table, part) not in self._gone and self._pages(table, part))

    def _pages(self, table: TableName, part: str) -> bool:
        """Are there pages that were copied under this name, of a table that was not dropped meanwhile?"""
        there = self._suffixes.get(table, {}).get(part, set())
        return "del" not in there and ("ibd" in there or {"ibd.delta", "ibd.meta"} <= there)


def _named(stem: str) -> tuple[TableName, str]:
    table, mark, rest = stem.partition("#") if "/#" not in stem else (stem, "", "")
    return table_of(table), part_name(mark + rest)


def part_name(part: str) -> str:
    """``p0/p0sp1`` of ``#P#p0#SP#p0sp1``, "" of "": a partition's name as ``BaseTable.parts`` has it. Upper and lower
    case are the same to the servers."""
    return "/".join(decode_file_name(name).lower() for name in _PART.split(part)[1:])


def fulltext_id(path: str) -> int | None:
    """The number of the table whose full-text index ``path`` is part of, as InnoDB numbers tables; None for others."""
    match = _FULLTEXT.match(path.rpartition("/")[2])
    return int(match[1], 16) if match else None


def space_id(head: bytes) -> int:
    """Of a tablespace whose file begins with ``head`` (64 bytes are enough): the number that follows it through every
    RENAME, and is new after TRUNCATE and rebuilds."""
    return int.from_bytes(head[34:38])


def space_id_of_meta(text: str) -> int | None:
    """The same, from the ``.meta`` beside an increment's pages."""
    match = re.search(r"^space_id = (\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


_DICTIONARY_PAGE, _OF_SYSTEM, _HIGHEST = 7, 6, 38 + 24
"""FIL_PAGE_TYPE_SYS, and DICT_HDR_MAX_SPACE_ID of the page with the dictionary's header (dict0boot.h)."""


def highest_space_id(system: Path, page_size: int) -> int | None:
    """The highest number given to a tablespace when this page of ``system`` (the first file of the system tablespace,
    not encrypted) was last written; None where it does not look like that page."""
    try:
        with system.open("rb") as file:
            file.seek(_DICTIONARY_PAGE * page_size)
            page = file.read(_HIGHEST + 4)
    except OSError:
        return None
    if int.from_bytes(page[4:8]) != _DICTIONARY_PAGE or int.from_bytes(page[24:26]) != _OF_SYSTEM:
        return None
    return int.from_bytes(page[_HIGHEST:])
