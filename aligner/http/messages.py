"""JSON messages as pydantic models."""

import reprlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from aligner.errors import DataError, raised_as

Message = TypeVar("Message", bound=BaseModel)


def parse_json(body: bytes | bytearray) -> Any:
    """Parse ``body`` as JSON. Raises `DataError` if this is impossible."""
    with raised_as(DataError, f"not JSON: {bytes(body[:80])!r}", ValueError):
        return from_json(body)


def validated(kind: type[Message], value: Any) -> Message:
    """Return ``value`` as an instance of ``kind``. Raises `DataError` for the first invalid key."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the body"
        raise DataError(f"{key}: {first['msg']}, got {reprlib.repr(first['input'])}") from error
