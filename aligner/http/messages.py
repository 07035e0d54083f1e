"""Messages of JSON as pydantic models."""

import reprlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from aligner.errors import DataError

Message = TypeVar("Message", bound=BaseModel)


def parse_json(body: bytes | bytearray) -> Any:
    """The JSON value that ``body`` holds; `DataError` where it is none."""
    try:
        return from_json(body)
    except ValueError as error:
        raise DataError(f"not JSON: {bytes(body[:80])!r} ({error})") from error


def validated(kind: type[Message], value: Any) -> Message:
    """``value`` as a message; `DataError` with the first thing that is wrong with it."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise DataError(f"{place}: {first['msg']}; found {reprlib.repr(first['input'])}") from error
