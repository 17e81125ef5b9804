"""What the configuration says about each destination."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class FilesystemConfig(BaseModel):
    """A folder on a mounted file system."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["filesystem"] = Field(description="Kind of destination.", examples=["filesystem"])
    path: Path = Field(
        description="Absolute path of the folder. Its parent must exist; the folder is made at the first backup.",
        examples=["/srv/backups"])

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute() or ".." in path.parts:
            raise ValueError("must be an absolute path without '..'")
        if path == Path("/"):
            raise ValueError("must not be the root of the file system")
        return path


DestinationConfig = FilesystemConfig
"""Every kind of destination that a configuration file may name."""
