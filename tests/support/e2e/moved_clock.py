"""A clock that a file moves, for every program that a test starts."""

from __future__ import annotations

from tests.support.e2e.house import House

_CLOCK = """\
import datetime, os, time
_file, _time, _gettime, _datetime = os.environ["TEST_CLOCK"], time.time, time.clock_gettime, datetime.datetime
def _moved():
    with open(_file) as file:
        return [float(word) for word in file.read().split()]
class _Any(type):
    def __instancecheck__(cls, one):
        return isinstance(one, _datetime)
    def __subclasscheck__(cls, kind):
        return issubclass(kind, _datetime)
class datetime_(_datetime, metaclass=_Any):
    @classmethod
    def now(cls, tz=None):
        return _datetime.now(tz) + datetime.timedelta(seconds=_moved()[0])
datetime_.__name__ = datetime_.__qualname__ = "datetime"
datetime.datetime = datetime_
time.time = lambda: _time() + _moved()[0]
time.clock_gettime = lambda clock: _gettime(clock) + (_moved()[1] if clock == time.CLOCK_BOOTTIME else 0)
"""


class MovedClock:
    """Of every program of ``house``. ``step``: as somebody sets it; ``wait``: as time goes."""

    def __init__(self, house: House) -> None:
        folder = house.base / "moved"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_CLOCK)
        self._file = folder / "clock"
        self._wall = self._passed = 0.0
        self._write()
        house.env |= {"PYTHONPATH": str(folder), "TEST_CLOCK": str(self._file)}

    def step(self, seconds: float) -> None:
        self._wall += seconds
        self._write()

    def wait(self, seconds: float) -> None:
        self._passed += seconds
        self.step(seconds)

    def _write(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{self._wall} {self._passed}")
        fresh.rename(self._file)
