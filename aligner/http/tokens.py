"""Bearer tokens: where they come from. They are never shown in a message."""

import contextlib
import os
import secrets
from pathlib import Path

from aligner.errors import ConfigError


def read_token(variable: str | None, file: str | None, owner: str) -> str | None:
    """The token of an environment variable or a file; None: neither is named.

    Args:
        variable: name of the environment variable, of the key ``token_env``.
        file: path of the file, of the key ``token_file``.
        owner: whose token it is, for messages.

    Raises:
        ConfigError: there is none, or it is no line of printable ASCII.
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
    token = (token or "").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{source} holds no token of {owner}; it must be one line of printable ASCII"
        )
    return token


def new_token(file: str | None) -> str:
    """A random token; ``file``: written there, for its owner alone to read. None: nowhere.

    Raises:
        ConfigError: the file cannot be written.
    """
    token = secrets.token_urlsafe(24)
    if file is not None:
        path = Path(file).expanduser()
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"token_file={path}: cannot be written: {error}") from error
        with os.fdopen(handle, "w") as opened:
            opened.write(f"{token}\n")
    return token
