"""The files of a server program that was unpacked into some folder: messages, libraries, plugins.

A program of the system finds them by the paths that it was built with. One that lies elsewhere (a release unpacked
into /srv) must be told, and whoever confines it must let it see them.
"""

from __future__ import annotations

from pathlib import Path

SYSTEM_FOLDERS = ("/usr", "/etc", "/opt", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_PARTS = ("bin", "sbin", "lib", "lib64", "libexec", "share")
_MESSAGES = ("share", "share/mysql", "share/mariadb")
_ENGLISH = "english/errmsg.sys"


def is_of_the_system(path: Path) -> bool:
    """Does ``path`` lie where the system's programs and their files do?"""
    return any(path == Path(folder) or Path(folder) in path.parents for folder in SYSTEM_FOLDERS)


def places(program: Path) -> list[Path]:
    """Folders outside the system's own that ``program`` needs to see: its own, and those of its installation."""
    found = {program.parent, program.resolve().parent}
    for folder in tuple(found):
        if folder.name in _PARTS:
            # Not the whole of it: a data directory may lie beside the programs.
            found |= {folder.parent / part for part in _PARTS if (folder.parent / part).is_dir()}
    return sorted(place for place in found if not is_of_the_system(place))


def server_options(program: str) -> dict[str, str]:
    """What a server program must be told of its own files; nothing for one of the system."""
    if "/" not in program:
        return {}
    path = Path(program).resolve()
    if any(folder in path.parents for folder in (Path("/usr"), Path("/bin"), Path("/sbin"))):
        return {}
    for base in (path.parent.parent, path.parent):
        for folder in _MESSAGES:
            if (base / folder / _ENGLISH).is_file():
                return {"basedir": str(base), "lc_messages_dir": str(base / folder)}
    return {}
