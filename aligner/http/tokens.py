"""Bearer tokens of servers, from the environment or a file. No message shows a token."""

import contextlib
import os
import secrets
from pathlib import Path

from aligner.errors import ConfigError, raised_as


def read_token(variable: str | None, file: str | None, owner: str) -> str | None:
    """Read an access token from an environment variable or a file. Return None without either.

    ``owner``: description of the server, for the error message. Raises `ConfigError` if the token
    is missing or is not one line of printable ASCII.
    """
    if variable is not None:
        token, source = os.environ.get(variable), f"token_env={variable}"
    elif file is not None:
        path = Path(file).expanduser()
        token, source = None, f"token_file={path}"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            token = path.read_text()
    else:
        return None
    # Headers only transport printable ASCII.
    token = (token or "").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{source} contains no access token of {owner}. It must contain one line of printable "
            "ASCII"
        )
    return token


def new_token(file: str | None) -> str:
    """Return a random access token and write it to ``file``, if given, for the owner only."""
    token = secrets.token_urlsafe(24)
    if file is not None:
        path = Path(file).expanduser()
        with raised_as(ConfigError, f"token_file={path}: cannot be written", OSError):
            # O_EXCL: an existing file, or a link, is not overwritten.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"{token}\n")
    return token
