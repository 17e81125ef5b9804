"""What the configuration says about each destination. Its file describes the paths, which may be relative there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from backupd.model.text import parse_size


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


Rate = Annotated[int, BeforeValidator(_size), Field(ge=1024)]
"""Bytes a second, written as a size: ``20MB``."""

Address = tuple[tuple[str, ...], tuple[str, ...]]

StorageClass = Literal[
    "STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR", "GLACIER", "DEEP_ARCHIVE"
]


class BaseDestinationConfig(BaseModel):
    """What every kind of destination has. ``is_off_site`` is the answer, ``off_site`` what somebody wrote."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    off_site: bool | None = Field(
        None,
        examples=[True],
        description="Whether the destination is at another site than the servers. Default: false for folders, true for "
        "the other types.",
    )
    max_upload: Rate | None = Field(
        None,
        description="Maximum upload rate in bytes per second, shared by all jobs, copies and streams of this host.",
        examples=["20MB"],
    )
    max_download: Rate | None = Field(
        None,
        description="Maximum download rate in bytes per second, shared by all jobs of this host.",
        examples=["50MB"],
    )

    @property
    def is_off_site(self) -> bool:
        """Is the destination away from the servers' site? By what it is where the configuration does not say."""
        return True if self.off_site is None else self.off_site

    @property
    def address(self) -> Address:
        """Where it is: the namespace of the destinations, and the steps in it; what begins with those is inside of
        it."""
        raise NotImplementedError

    @property
    def takes_pieces(self) -> bool:
        """May pieces of a binary log that still grows be stored here? They are gone soon, and some classes charge for
        months."""
        return True

    def kept_in(self, *, logs: bool) -> str:
        """The storage class of objects, or of binary logs; "" where there are no classes."""
        del logs
        return ""


class FilesystemConfig(BaseDestinationConfig):
    """A folder on a mounted file system."""

    type: Literal["filesystem"] = Field(description="Kind of destination.", examples=["filesystem"])
    path: Path = Field(
        description="Absolute path of the folder. Its parent must exist; the folder is made at the first backup.",
        examples=["/srv/backups"],
    )

    @property
    def is_off_site(self) -> bool:
        """Only where the configuration says so: a mounted folder is near."""
        return bool(self.off_site)

    @property
    def address(self) -> Address:
        """The steps of the path."""
        return ("filesystem",), self.path.parts

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute() or ".." in path.parts:
            raise ValueError("must be an absolute path without '..'")
        if path == Path("/"):
            raise ValueError("must not be the root of the file system")
        return path


class S3Config(BaseDestinationConfig):
    """A bucket of Amazon S3 or of anything that speaks like it.

    Only sealed parts of files and of binary logs go to ``storage_class`` and ``binlog_storage_class``; whatever is
    needed to know what there is (manifests, indexes, runbooks) is always STANDARD.
    """

    type: Literal["s3"] = Field(description="The kind of destination.", examples=["s3"])
    bucket: Annotated[str, Field(min_length=3, max_length=63)] = Field(
        description="The bucket.", examples=["acme-backups"]
    )
    prefix: Annotated[str, Field(pattern=r"^[^/\s].*[^/]$|^[^/\s]?$")] = Field(
        "", description="Prefix of all keys; backupd appends a slash.", examples=["prod"]
    )
    storage_class: StorageClass = Field(
        "STANDARD", description="The storage class of the objects of backups.", examples=["STANDARD_IA"]
    )
    binlog_storage_class: StorageClass = Field(
        "STANDARD",
        description="The storage class of archived binary logs that are complete. Pieces of a growing log are replaced "
        "soon and always use STANDARD.",
        examples=["STANDARD_IA"],
    )
    region: str | None = Field(None, description="The region.", examples=["eu-central-1"])
    endpoint_url: Annotated[str, Field(pattern=r"^https?://[^\s@]+$")] | None = Field(
        None, description="URL of an S3-compatible server. Default: AWS.", examples=["https://s3.example.com"]
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description=(
            "Addressing style: `virtual` puts the bucket name into the host name, `path` into the path. Most "
            "S3-compatible servers need `path`."
        ),
        examples=["path"],
    )
    ca_file: Path | None = None
    credentials_file: Path | None = None
    profile: str | None = Field(None, description="The profile in it.", examples=["backupd"])
    server_side_encryption: Literal["AES256", "aws:kms"] | None = Field(
        None, description="Server-side encryption, in addition to the encryption by backupd.", examples=["aws:kms"]
    )
    kms_key: str | None = Field(None, description="The key for aws:kms.", examples=["alias/backups"])
    object_lock: Literal["governance", "compliance"] | None = Field(
        None,
        description="Object lock mode: stored objects cannot be changed or deleted for `lock_days`. The bucket must "
        "have been created with object lock.",
        examples=["governance"],
    )
    lock_days: int | None = Field(
        None,
        ge=1,
        le=36500,
        examples=[14],
        description="Days of the lock, counted from the last backup that needs the object.",
    )
    capacity: Annotated[int, BeforeValidator(_size), Field(ge=1)] | None = Field(
        None,
        description="Capacity of the bucket, for the free-space forecast and alerts. backupd does not enforce it.",
        examples=["20TiB"],
    )
    delete: bool = Field(
        True,
        examples=[False],
        description="Whether this service deletes objects with its credentials. If false, it removes nothing: a "
        "lifecycle rule of the bucket, or an installation with other credentials, must remove expired objects.",
    )

    @property
    def address(self) -> Address:
        """Endpoint and bucket; the steps of the prefix."""
        endpoint = (self.endpoint_url or "").rstrip("/").lower()
        return ("s3", endpoint, self.bucket), tuple(part for part in self.prefix.split("/") if part)

    def kept_in(self, *, logs: bool) -> str:
        """The storage class that the configuration names for objects, or for whole binary logs."""
        return self.binlog_storage_class if logs else self.storage_class

    @property
    def takes_pieces(self) -> bool:
        """Not in classes that have to be thawed."""
        return self.binlog_storage_class not in ("GLACIER", "DEEP_ARCHIVE")

    @model_validator(mode="after")
    def _agrees(self) -> S3Config:
        if (self.object_lock is None) != (self.lock_days is None):
            raise ValueError("object_lock and lock_days belong together: give both")
        if self.kms_key is not None and self.server_side_encryption != "aws:kms":
            raise ValueError("kms_key needs server_side_encryption: aws:kms")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*[a-z0-9]", self.bucket):
            raise ValueError(f"{self.bucket!r} is not a bucket name: lower-case letters, digits, dots and dashes")
        if ".." in self.prefix.split("/") or "//" in self.prefix or not self.prefix.isprintable():
            raise ValueError(f"{self.prefix!r} cannot be a prefix of keys")
        return self


class SftpConfig(BaseDestinationConfig):
    """A folder on another host, by SSH."""

    type: Literal["sftp"] = Field(description="The kind of destination.", examples=["sftp"])
    host: str = Field(description="The host.", examples=["vault.example.com"])
    port: int = Field(22, ge=1, le=65535, description="Its port.", examples=[22])
    user: str = Field(description="The account there.", examples=["backupd"])
    path: Annotated[str, Field(pattern=r"^/.+")] = Field(
        description="The folder there, absolute.", examples=["/srv/backups"]
    )
    key_file: Path
    known_hosts: Path

    @field_validator("host", "user", "path")
    @classmethod
    def _plain(cls, text: str) -> str:
        if not text.isprintable() or text.startswith("-") or ".." in text.split("/"):
            raise ValueError("must be printable, must not begin with a dash and must not contain '..'")
        return text

    @property
    def address(self) -> Address:
        """User, host and port; the steps of the path."""
        steps = tuple(part for part in self.path.split("/") if part not in ("", "."))
        return ("sftp", self.user, self.host.lower(), str(self.port)), steps


DestinationConfig = FilesystemConfig | S3Config | SftpConfig
"""Every kind of destination that a configuration file may name."""
