"""A library that says it was loaded: made without a compiler, so that the tests need none.

Its start-up code (x86-64, no libc) creates the file ``pwned`` in the current folder. From this source, with
``gcc -nostdlib -shared -fPIC -Os -s -Wl,-init,run``::

    void run(void) { long f = sys3(SYS_open, "pwned", O_CREAT | O_WRONLY, 0644); sys3(SYS_write, f, "pwned\\n", 6);
                     sys3(SYS_close, f, 0, 0); }
"""

from __future__ import annotations

import base64
import zlib

MARK = "pwned"
_PACKED = (
    "c-pIX^>JfjWMqH=W(GS31doBi0ZM;hLKd@NU;&a`44h!KtPHrp4n|a(K>$L5xNOMsf~fQX22>iRkBLNm98fy&X-Ntj1MvWA9oU^r"
    "P?{J3QYQoqom{8}YnVh)X&%E4kV*R-fyAyQKzWZ|TU8*NpVgz+R0+uN=sdm)?l*o`!%I7u!J^mrSq~SK=cT4FfJrWpaXe6CVfL^<"
    "`3g`zEKV|@e3;)YpnNU{RCU}?T7rQ-z}?x|N<qUVH7PSOPr=Yg&q&We*U&^eB{j*=sMJssD#XB`SDaB?QdE+d#GsdvSe(J2mr|Km"
    "T$u}@ONtouN>VFI81#zrQxZ!O8T3*!;?s%}b5p_ciMg4{40_4=xw)x%B~)@ZH#E$c(83!=i!dP4DRTOQ#g8D=3?{VrfYAo<d<aQP"
    "9BA<(36*0)i{A{ict=i;$UqS(?;)ojjP!~_zdBUR2+Ci<h)VO~&<~^ak@6JQ@&OHSpz$rCZf9md%m0k1`JNd~KP*2xLG3p{Gq-{X"
    ";Xi!tXGAg^8O(?3_a+d200IY5;{"
)


def evil_library() -> bytes:
    return zlib.decompress(base64.b85decode(_PACKED))
