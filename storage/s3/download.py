"""Reading from a bucket: a stream that goes on where it broke, and never ends early without saying so."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, BinaryIO

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from backupd.model.errors import DestinationError
from storage.s3.client import ATTEMPTS, Bucket
from storage.s3.errors import code_of, status_of

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3.client import S3Client

_CHUNK = 1 << 20


def open_download(bucket: Bucket, key: str, offset: int, length: int | None, *, version: str = "") -> BinaryIO:
    """Bytes of ``key`` from ``offset``, at most ``length``; the caller closes it. Raises ObjectMissingError at once.
    ``version``: of an earlier state of it."""
    raw = Download(bucket, key, offset, None if length is None else offset + length, version)
    return io.BufferedReader(raw, _CHUNK)


class Download(io.RawIOBase):
    """``end``: of the bytes that are wanted, excluded; None for all."""

    def __init__(self, bucket: Bucket, key: str, offset: int, end: int | None, version: str = "") -> None:
        super().__init__()
        self._version = version
        self._bucket = bucket
        self._key = key
        self._doing = f"reading {key}"
        self._at = offset
        self._end = end
        self._etag = ""
        self._body: StreamingBody | None = None
        self._open(time.monotonic())

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # Buffer is not in 3.11
        piece = self._read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def readall(self) -> bytes:
        pieces: list[bytes] = []
        while piece := self._read(_CHUNK):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        """Some bytes; none only at the true end."""
        begun = time.monotonic()
        for _attempt in range(ATTEMPTS):
            if self._body is None:
                return b""
            try:
                piece = self._body.read(size)
                self._at += len(piece)
                if piece:
                    return piece
                if self._end is None or self._at >= self._end:
                    self._drop()
                    return b""
                failure: Exception = DestinationError("it ended early")
            except (BotoCoreError, HTTPError, OSError) as error:
                failure = error
            self._drop()
            self._open(begun)
        raise DestinationError(
            f"{self._bucket.words.place}: {self._doing} failed",
            detail=f"at byte {self._at}, {ATTEMPTS} times: {failure}",
            hint="look at the network and at the server; it is tried again later",
        ) from failure

    def _open(self, begun: float) -> None:
        """Ask for what is still wanted. Nothing is wanted behind the end."""
        if self._end is not None and self._at >= self._end and self._etag:
            return
        try:
            answer = self._bucket.call(self._doing, self._ask, key=self._key, begun=begun, expect=_is_answer)
        except ClientError as error:
            if status_of(error) == 416 or code_of(error) == "InvalidRange":
                return
            raise DestinationError(
                f"{self._bucket.words.place}: {self._key} was replaced while it was read",
                hint="read it again from its beginning",
            ) from error
        body, begin, size, etag = answer
        if begin != self._at or (self._etag and etag != self._etag):
            body.close()
            raise DestinationError(
                f"{self._bucket.words.place}: {self._doing} failed",
                detail=f"asked for bytes from {self._at}, got those from {begin}",
                hint="this server does not know ranges; use one that does",
            )
        self._etag = etag or "-"
        self._end = size if self._end is None else min(self._end, size)
        if self._at < self._end:
            self._body = body
        else:
            body.close()

    def _ask(self, client: S3Client) -> tuple[StreamingBody, int, int, str]:
        """The body, its first byte's place, the size of the object, its ETag."""
        wanted = (
            ""
            if self._at == 0 and self._end is None
            else f"bytes={self._at}-" + ("" if self._end is None else str(max(self._end, self._at + 1) - 1))
        )
        fields = {"Bucket": self._bucket.config.bucket, "Key": self._bucket.full(self._key)}
        if wanted:
            fields["Range"] = wanted
        if self._version:
            fields["VersionId"] = self._version
        if self._etag not in {"", "-"}:
            fields["IfMatch"] = self._etag
        answer = client.get_object(**fields)  # type: ignore[arg-type]  # optional fields
        told = answer.get("ContentRange", "")
        begin, size = 0, answer["ContentLength"]
        if told:
            span, _slash, total = told.removeprefix("bytes ").partition("/")
            begin, size = int(span.partition("-")[0]), int(total)
        return answer["Body"], begin, size, answer.get("ETag", "")

    def _drop(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


def _is_answer(error: ClientError) -> bool:
    """The place knows the key, and there is nothing at that offset, or something else by now."""
    return status_of(error) in {412, 416} or code_of(error) in {"InvalidRange", "PreconditionFailed"}
