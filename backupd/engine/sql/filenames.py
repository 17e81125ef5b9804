"""Names of schemas and tables as the servers write them into names of files and folders.

Letters, digits and ``_`` stay; a letter of most alphabets becomes ``@`` and two characters, everything else ``@`` and
four hex digits (``größe`` is ``gr@1i@1je``). MySQL offers no way to ask for that, and no server runs when a backup's
list of files is read, so the two-character codes stand here, as MariaDB 10.11.19 told them one by one.
"""

from __future__ import annotations

import re

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
    place = 0
    while place < len(bare):
        match = _TOKEN.match(bare, place)
        letter = _letter(match[0]) if match else ""
        if match is None or not letter:
            return _OLD + text
        found.append(letter)
        place = match.end()
    return "".join(found)


def _letter(token: str) -> str:
    if not token.startswith("@"):
        return token
    return _DECODED.get(token, "") if len(token) == 3 else chr(int(token[1:], 16))
