"""A dump tool around another one, in which something happens at a chosen moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from backupd.engine.dump.insert_files import DumpedFile, DumpRequest, DumpRun, DumpTable, DumpTool
from backupd.engine.server.definition_text import Columns
from backupd.model.server_facts import Tool
from backupd.model.table import TableName

Files = Callable[[Iterator[DumpedFile]], Iterator[DumpedFile]]


def all_files(files: Iterator[DumpedFile]) -> Iterator[DumpedFile]:
    return files


@dataclass(eq=False)
class Meddled:
    """In the first run, ``opened`` is called with it when it has its snapshots and commits are blocked; ``before`` when
    its files are asked for first; ``files`` stands between the tool and whoever takes its files."""

    inner: DumpTool
    opened: Callable[[DumpRun], None] = lambda _run: None
    before: Callable[[], None] = lambda: None
    files: Files = all_files
    runs: list[DumpRequest] = field(default_factory=list)

    @property
    def tool(self) -> Tool:
        return self.inner.tool

    def refuses(self, table: DumpTable, columns: Columns) -> str:
        return self.inner.refuses(table, columns)

    def run(self, request: DumpRequest) -> DumpRun:
        self.runs.append(request)
        return self.inner.run(request) if len(self.runs) > 1 else _Run(self.inner.run(request), self)


class _Run:
    def __init__(self, inner: DumpRun, meddled: Meddled) -> None:
        self._inner, self._meddled = inner, meddled

    def open(self, seconds: float) -> None:
        self._inner.open(seconds)
        self._meddled.opened(self._inner)

    def files(self) -> Iterator[DumpedFile]:
        self._meddled.before()
        yield from self._meddled.files(self._inner.files())

    def verdicts(self) -> Mapping[TableName, str | None]:
        return self._inner.verdicts()

    def pause(self) -> None:
        self._inner.pause()

    def resume(self) -> None:
        self._inner.resume()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)
