"""Import of a user's Python files as modules ``aligner.user_files.<path of the file>``.

The name is the same in every process and contains the path of the file. Objects of its classes can
therefore be pickled, and its functions can be used with every start method of multiprocessing.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


def import_file(path: Path) -> ModuleType:
    """Import a file as a module, without adding its directory to ``sys.path``."""
    escaped = re.sub(rb"[^A-Za-z0-9]", lambda byte: b"_%02x" % byte[0][0], str(path).encode())
    return importlib.import_module(f"{__name__}.{escaped.decode()}")


class _Finder:
    """Finder of files whose escaped path is the name of a module in this package."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        package, _, escaped = name.rpartition(".")
        if package != __name__:
            return None
        file = re.sub(rb"_(..)", lambda code: bytes([int(code[1], 16)]), escaped.encode())
        return spec_from_file_location(name, file.decode())


sys.meta_path.insert(0, _Finder)
