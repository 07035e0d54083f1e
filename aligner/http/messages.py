"""JSON messages as pydantic models."""

import reprlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from aligner.errors import DataError

Message = TypeVar("Message", bound=BaseModel)


def parse_json(body: bytes | bytearray) -> Any:
    """Parse ``body`` as JSON. Raises `DataError` if it is not JSON."""
    try:
        return from_json(body)
    except ValueError as error:
        raise DataError(f"not JSON: {bytes(body[:80])!r} ({error})") from error


def validated(kind: type[Message], value: Any) -> Message:
    """Return ``value`` as a message. Raises `DataError` with the first validation error."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the body"
        raise DataError(f"{key}: {first['msg']}, got {reprlib.repr(first['input'])}") from error
