"""The command line: words in, the application's answers out. No decision is made here."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

if "serve" in sys.argv[1:4:2]:  # the first word, or that after `--config FILE`
    # Before anything that takes its time: SIGHUP asks the service to read its configuration, which it is about to do.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

# Python looks for cycles of garbage whenever 700 objects more than before are alive: a tenth of the time of a start,
# which makes 130,000 that stay. Here it looks for the first time when there are more than that, then after every
# 50,000: what is garbage is found all the same, at most some megabytes later.
gc.set_threshold(200_000)


def _look_again(phase: str, _found: Mapping[str, int]) -> None:
    if phase == "stop":
        gc.callbacks.remove(_look_again)
        gc.set_threshold(50_000)


gc.callbacks.append(_look_again)

# At the end it would look at all of them once more, a sixth of the time of a command; nothing is lost by leaving that.
atexit.register(gc.freeze)


def _frozen_methods(
    cls: Any, fields: Sequence[dataclasses.Field[Any]], _globals: object
) -> tuple[Callable[[Any, str, Any], None], Callable[[Any, str], None]]:
    """What refuses to change a frozen value of ``cls``, as ``dataclasses`` has it."""
    names = frozenset(field.name for field in fields)

    def assign(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def remove(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    assign.__name__, remove.__name__ = "__setattr__", "__delattr__"
    return assign, remove


# Python compiles these two methods anew for each frozen dataclass: half of what making the class takes, a fifteenth of
# a command's time. In a Python that has no such function they are as it makes them.
if hasattr(dataclasses, "_frozen_get_del_attr"):
    vars(dataclasses)["_frozen_get_del_attr"] = _frozen_methods
