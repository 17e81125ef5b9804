"""The OpenAPI document, and a page made of it that needs no script and no other host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse

from api.auth import anybody, operations_of
from api.web.site import render
from backupd.model.access import Role

router = APIRouter(include_in_schema=False)
_METHODS = ("get", "post", "put", "patch", "delete")


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter, or one field of a body. ``where``: path, query, header or body."""

    name: str
    where: str
    kind: str
    required: bool
    text: str
    example: str


@dataclass(frozen=True, slots=True)
class Example:
    """``title``: ``Request``, or the status and what it means; ``body``: JSON."""

    title: str
    body: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. ``role``: empty where anybody may."""

    anchor: str
    method: str
    path: str
    title: str
    text: str
    role: str
    inputs: tuple[Named, ...]
    examples: tuple[Example, ...]


@router.get("/openapi.json", dependencies=[Depends(anybody)])
def document(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())


@router.get("/docs", dependencies=[Depends(anybody)])
def reference(request: Request) -> HTMLResponse:
    """Each operation with its parameters, its role and an example."""
    described = request.app.openapi()
    roles = {(method.lower(), path): str(role or "") for method, path, role in operations_of(request.app)}
    chapters: dict[str, list[Operation]] = {}
    for path, method, operation in _each(described):
        chapter = (operation.get("tags") or ["other"])[0]
        chapters.setdefault(chapter, []).append(_operation(described, path, method, operation, roles))
    return render(request, "docs.html", chapters=chapters, version=described["info"]["version"], roles=list(Role))


def _each(described: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, item in described["paths"].items():
        for method in _METHODS:
            if method in item:
                yield path, method, item[method]


def _operation(
    described: Mapping[str, Any],
    path: str,
    method: str,
    operation: Mapping[str, Any],
    roles: Mapping[tuple[str, str], str],
) -> Operation:
    inputs = [
        _named(described, one["name"], one["in"], one, required=one.get("required", False))
        for one in operation.get("parameters", ())
    ]
    examples = []
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(described, content.get("schema", {}))
        required = schema.get("required", ())
        inputs += [
            _named(described, name, "body", {**one, "schema": one}, required=name in required)
            for name, one in schema.get("properties", {}).items()
        ]
        examples += [Example(f"Request ({kind})", text) for text in _examples(content)]
    for status, answer in operation.get("responses", {}).items():
        if status.startswith("2"):
            for content in answer.get("content", {}).values():
                examples += [Example(f"{status} {answer.get('description', '')}", text) for text in _examples(content)]
    return Operation(
        operation.get("operationId", f"{method}-{path}"),
        method.upper(),
        path,
        operation.get("summary", path),
        operation.get("description", ""),
        roles.get((method, path), ""),
        tuple(inputs),
        tuple(examples),
    )


def _named(described: Mapping[str, Any], name: str, where: str, found: Mapping[str, Any], *, required: bool) -> Named:
    schema = _resolved(described, found.get("schema", {}))
    text = found.get("description") or schema.get("description", "")
    return Named(name, where, _kind(described, schema), required, text, _shown(found, schema))


def _shown(found: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    for one in (found, schema):
        if "example" in one:
            return str(one["example"])
        if one.get("examples"):
            examples = one["examples"]
            first = next(iter(examples.values())) if isinstance(examples, Mapping) else examples[0]
            return str(first.get("value", first) if isinstance(first, Mapping) else first)
    return ""


def _kind(described: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            found = [_kind(described, _resolved(described, one)) for one in schema[word]]
            return " | ".join(dict.fromkeys(kind for kind in found if kind != "null"))
    if schema.get("type") == "array":
        return f"list of {_kind(described, _resolved(described, schema.get('items', {})))}"
    kind = schema.get("format") or schema.get("type", "")
    return kind if isinstance(kind, str) else " | ".join(kind)


def _resolved(described: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _examples(content: Mapping[str, Any]) -> Iterator[str]:
    if "example" in content:
        yield _printed(content["example"])
    for one in content.get("examples", {}).values():
        yield _printed(one.get("value"))


def _printed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
