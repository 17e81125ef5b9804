"""Streams to and from a bucket.

Upload: one request for what fits into one, several parts for what does not. Nothing is visible before the last request,
which is the commit. Every part carries its SHA-256, which the server checks, and is sent again from memory. Memory of
one put: ``WHOLE`` bytes for what fits into one request, else at most four parts (64 MiB while parts have 16 MiB), and
two where parts are larger than 32 MiB.

Download: a stream that goes on where it broke, and never ends early without an error.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from backupd.model.errors import DestinationError, UnreachableError
from storage.s3.client import ATTEMPTS, Bucket, code_of, status_of

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef


MIB = 1 << 20
WHOLE = 32 * MIB
"""What has at most so many bytes goes in one request."""
PART = 16 * MIB
LARGEST_PART = 5 << 30
LARGEST = 5 << 40
PARTS = 10_000
_STEP = 1000
_IN_MEMORY = 3 * PART
_UNKNOWN = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest", "400"})
SHA256 = "backupd-sha256"
"""Name of the metadata that holds the digest (64 hex) of the whole object."""
TOKEN = "backupd-put"  # noqa: S105  no password
"""Name of the metadata that distinguishes one put from every other one."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What was committed. ``etag``: as the destination calls these bytes."""

    size: int
    etag: str


Taken = Callable[[str, str], bool]
"""Asked with the digest (hex) and the token of what is being stored when there is something under its key already: True
when that is the same, False when it is to be replaced; raises when neither may be."""
Result = TypeVar("Result")


class Upload:
    """One put of ``key``. ``headers``: what storage class, encryption and lock ask for. With ``taken`` it is stored
    only where there is nothing under ``key``, as far as the destination knows such conditions."""

    def __init__(self, bucket: Bucket, key: str, headers: Mapping[str, Any], taken: Taken | None) -> None:
        self._bucket = bucket
        self._key = key
        self._doing = f"writing {key}"
        self._headers = headers
        self._taken = taken
        self._token = secrets.token_hex(16)
        self._where = bucket.where(key)

    def store(self, stream: BinaryIO, running: set[str]) -> Uploaded:
        """Everything ``stream`` yields. ``running`` holds the id of an upload in parts while it is under way."""
        length = expected_length(stream)
        if length is not None and length > LARGEST:
            raise DestinationError(
                f"{self._bucket.words.label}: {self._key} has {length} bytes; no object may have more than {LARGEST}"
            )
        begin = [_fill(stream, WHOLE + 1)]  # a list, so that it can be let go while parts are sent
        if len(begin[0]) <= WHOLE:
            return self._whole(begin[0])
        return self._in_parts(begin, stream, length, running)

    # One request

    def _whole(self, data: bytes) -> Uploaded:
        digest = hashlib.sha256(data)
        fields = {
            **self._where,
            **self._headers,
            "ChecksumSHA256": _base64(digest.digest()),
            "Metadata": {SHA256: digest.hexdigest(), TOKEN: self._token},
        }

        def ask(client: S3Client, condition: Mapping[str, Any]) -> Uploaded:
            # a file, since the library makes one string of a request's head and a body of bytes; it shares their memory
            answer = client.put_object(**fields, **condition, Body=io.BytesIO(data))
            self._agree(answer.get("ChecksumSHA256"), _base64(digest.digest()))
            return Uploaded(len(data), answer["ETag"])

        return self._commit(ask) or self._replace(ask, digest.hexdigest()) or Uploaded(len(data), "")

    def _commit(self, ask: Callable[[S3Client, Mapping[str, Any]], Result], *, patient: bool = False) -> Result | None:
        """The last request of a put. None when the key is taken and was not to be."""
        if self._taken is not None and self._bucket.knows_conditions:
            try:
                return self._bucket.call(
                    self._doing,
                    lambda client: ask(client, {"IfNoneMatch": "*"}),
                    patient=patient,
                    expect=lambda error: is_taken(error) or _may_not_know(error),
                )
            except ClientError as error:
                if is_taken(error):
                    return None
            found = self._bucket.call(self._doing, lambda client: ask(client, {}), patient=patient)
            self._bucket.knows_conditions = False
            return found
        return self._bucket.call(self._doing, lambda client: ask(client, {}), patient=patient)

    def _replace(
        self, ask: Callable[[S3Client, Mapping[str, Any]], Result], sha256: str, *, patient: bool = False
    ) -> Result | None:
        """What to do about a key that is taken. None when the same is there."""
        if self._taken is None or self._taken(sha256, self._token):
            return None
        return self._bucket.call(self._doing, lambda client: ask(client, {}), patient=patient)

    # In parts

    def _in_parts(self, begin: list[bytes], stream: BinaryIO, length: int | None, running: set[str]) -> Uploaded:
        digest = known_digest(stream, begin[0]) if length is not None else ""
        metadata = {TOKEN: self._token, **({SHA256: digest} if digest else {})}
        upload = self._bucket.call(
            self._doing,
            lambda client: client.create_multipart_upload(
                **self._where, **self._headers, ChecksumAlgorithm="SHA256", Metadata=metadata
            ),
        )["UploadId"]
        running.add(upload)
        try:
            sent, size, whole = self._send(upload, begin, stream, length)

            def ask(client: S3Client, condition: Mapping[str, Any]) -> Uploaded:
                return Uploaded(size, self._complete(client, upload, sent, condition))

            done = self._commit(ask, patient=True) or self._replace(ask, whole, patient=True)
            if done is None:
                self._abort(upload)
            return done or Uploaded(size, "")
        except BaseException as error:
            if not isinstance(error, UnreachableError):
                self._abort(upload)
            raise
        finally:
            running.discard(upload)

    def _send(
        self, upload: str, begin: list[bytes], stream: BinaryIO, length: int | None
    ) -> tuple[list[_Sent], int, str]:
        """The parts, the number of bytes and their digest (hex)."""
        whole = hashlib.sha256()
        size = 0
        under_way: dict[Future[_Sent], int] = {}
        sent: list[_Sent] = []

        def settle(*, everything: bool, room: int = 0) -> None:
            """Wait for parts: for all, or until ``room`` bytes more fit into memory."""
            while under_way and (everything or sum(under_way.values()) + room > _IN_MEMORY):
                done, _open = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    del under_way[future]
                    sent.append(future.result())

        with ThreadPoolExecutor(_IN_MEMORY // PART, thread_name_prefix="s3-part") as threads:
            try:
                for number, data in enumerate(_parts(begin, stream, length), 1):
                    if number > PARTS:
                        raise DestinationError(
                            f"{self._bucket.words.label}: {self._key} is longer than any object may be",
                            detail=f"{size} bytes in {PARTS} parts, and not at its end",
                        )
                    whole.update(data)
                    size += len(data)
                    settle(everything=False, room=len(data))
                    under_way[threads.submit(self._send_part, upload, number, data)] = len(data)
                settle(everything=True)
            except BaseException:
                for future in under_way:
                    future.cancel()
                raise
        return sorted(sent, key=lambda part: part.number), size, whole.hexdigest()

    def _send_part(self, upload: str, number: int, data: bytes) -> _Sent:
        digest = hashlib.sha256(data).digest()
        answer = self._bucket.call(
            f"{self._doing} (part {number})",
            lambda client: client.upload_part(
                **self._where, UploadId=upload, PartNumber=number, Body=io.BytesIO(data), ChecksumSHA256=_base64(digest)
            ),
        )
        self._agree(answer.get("ChecksumSHA256"), _base64(digest))
        return _Sent(number, answer["ETag"], digest)

    def _complete(self, client: S3Client, upload: str, sent: list[_Sent], condition: Mapping[str, Any]) -> str:
        """The ETag of what is there now."""
        parts: list[CompletedPartTypeDef] = [
            {"PartNumber": part.number, "ETag": part.etag, "ChecksumSHA256": _base64(part.digest)} for part in sent
        ]
        try:
            answer = client.complete_multipart_upload(
                **self._where, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )
        except ClientError as error:
            if code_of(error) != "NoSuchUpload":
                raise
            # An earlier answer may have been lost on its way here: then it is complete, and carries our token.
            head = client.head_object(**self._where)
            if head["Metadata"].get(TOKEN) != self._token:
                raise
            return head["ETag"]
        composite = hashlib.sha256(b"".join(part.digest for part in sent)).digest()
        self._agree(answer.get("ChecksumSHA256", "").partition("-")[0], _base64(composite))
        return answer["ETag"]

    def _abort(self, upload: str) -> None:
        """What cannot be given up now is a leftover, which is cleared a day later."""
        with contextlib.suppress(DestinationError):
            abort(self._bucket, f"giving up {self._key}", self._key, upload)

    def _agree(self, answered: str | None, ours: str) -> None:
        if answered and answered != ours:
            problem = f"the destination says SHA-256 {answered} where {ours} was sent"
            raise self._bucket.words.failed(
                self._doing, problem, "bytes were changed in transit; backupd retries later"
            )


def abort(bucket: Bucket, doing: str, key: str, upload: str) -> bool:
    """Give an unfinished upload up. False when somebody else was faster."""
    where = bucket.where(key)
    try:
        bucket.call(
            doing,
            lambda client: client.abort_multipart_upload(**where, UploadId=upload),
            expect=lambda error: code_of(error) == "NoSuchUpload",
        )
    except ClientError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Sent:
    number: int
    etag: str
    digest: bytes


def is_taken(error: ClientError) -> bool:
    """Refused because there is something under the key."""
    return code_of(error) in {"PreconditionFailed", "412"}


def _may_not_know(error: ClientError) -> bool:
    """Some servers refuse a condition that they do not know."""
    return status_of(error) == 501 or (status_of(error) == 400 and code_of(error) in _UNKNOWN)


def part_size(number: int, length: int | None) -> int:
    """Bytes of part ``number`` (from 1) of an object of ``length`` bytes.

    Where nobody knows the length, parts double after each thousand, so that 10,000 of them are enough for any object.
    """
    if length is not None:
        return max(PART, math.ceil(length / PARTS / MIB) * MIB)
    return min(PART << (number - 1) // _STEP, LARGEST_PART)


def expected_length(stream: BinaryIO) -> int | None:
    """How many bytes ``stream`` has left, None where it cannot tell."""
    try:
        if not stream.seekable():
            return None
        here = stream.tell()
        end = stream.seek(0, io.SEEK_END)
        stream.seek(here)
    except (OSError, AttributeError):
        return None
    return end - here


def known_digest(stream: BinaryIO, begin: bytes) -> str:
    """The digest (hex) of ``begin`` and everything after it of a stream that can go back to where it is."""
    here = stream.tell()
    digest = hashlib.sha256(begin)
    while piece := stream.read(MIB):
        digest.update(piece)
    stream.seek(here)
    return digest.hexdigest()


def _parts(begin: list[bytes], stream: BinaryIO, length: int | None) -> Iterator[bytes]:
    """What ``begin`` holds (it is taken out) and the rest of ``stream``, cut."""
    number = 1
    ahead = begin.pop()
    while True:
        size = part_size(number, length)
        data, ahead = ahead[:size], ahead[size:]
        if len(data) < size:
            data += _fill(stream, size - len(data))
        if not data:
            return
        yield data
        number += 1


def _fill(stream: BinaryIO, size: int) -> bytes:
    """``size`` bytes, fewer only at the end. What is in memory already is not copied; of other streams no more is asked
    for at a time than comes, for many of them make room for all that is asked for."""
    at_once = size if isinstance(stream, io.BytesIO) else MIB
    pieces: list[bytes] = []
    while size > 0 and (piece := stream.read(min(size, at_once))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode("ascii")


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
        """Always."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # Buffer is not in 3.11
        """The next bytes; asked for again from where the connection broke. Raises DestinationError, also where the
        object was replaced meanwhile."""
        piece = self._read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def readall(self) -> bytes:
        """All bytes that are left. Raises as ``readinto``."""
        pieces: list[bytes] = []
        while piece := self._read(_CHUNK):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Give the connection back."""
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
        problem = f"at byte {self._at}, {ATTEMPTS} times: {failure}"
        hint = "check the network and the server; backupd retries later"
        raise self._bucket.words.failed(self._doing, problem, hint) from failure

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
                f"{self._bucket.words.label}: {self._key} was replaced while it was read",
                hint="read it again from its beginning",
            ) from error
        body, begin, size, etag = answer
        if begin != self._at or (self._etag and etag != self._etag):
            body.close()
            problem = f"asked for bytes from {self._at}, got those from {begin}"
            hint = "this server does not know ranges; use one that does"
            raise self._bucket.words.failed(self._doing, problem, hint)
        self._etag = etag or "-"
        self._end = size if self._end is None else min(self._end, size)
        if self._at < self._end:
            self._body = body
        else:
            body.close()

    def _ask(self, client: S3Client) -> tuple[StreamingBody, int, int, str]:
        """The body, its first byte's offset, the size of the object, its ETag."""
        fields = self._bucket.where(self._key)
        if self._at or self._end is not None:
            last = "" if self._end is None else str(max(self._end, self._at + 1) - 1)
            fields["Range"] = f"bytes={self._at}-{last}"
        if self._version:
            fields["VersionId"] = self._version
        if self._etag not in {"", "-"}:
            fields["IfMatch"] = self._etag
        answer = client.get_object(**fields)
        answered = answer.get("ContentRange", "")
        begin, size = 0, answer["ContentLength"]
        if answered:
            span, _slash, total = answered.removeprefix("bytes ").partition("/")
            begin, size = int(span.partition("-")[0]), int(total)
        return answer["Body"], begin, size, answer.get("ETag", "")

    def _drop(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


def _is_answer(error: ClientError) -> bool:
    """The destination knows the key, and there is nothing at that offset, or something else by now."""
    return status_of(error) in {412, 416} or code_of(error) in {"InvalidRange", "PreconditionFailed"}
