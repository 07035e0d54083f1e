"""Reader and writer of `.nemo` archives: tar files, plain or gzip.

Members are read at their offset in the tar and never extracted, so that hostile member names have
no effect. `aligner.checkpoint.nemo.inflated` decompresses gzip archives.
"""

import contextlib
import functools
import hashlib
import io
import json
import mmap
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

from aligner.checkpoint.nemo.inflated import open_inflated
from aligner.errors import CheckpointError, CheckpointNotFoundError, json_object, raised_as
from aligner.hub import hub_remedy

CHECKSUMS = "checksums.json"  # member → SHA-256, for members without CRC-32
_KEY = "model.restore_from_path"
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = tarfile.BLOCKSIZE
# Only pages that are written need memory. Older Python versions lack the name of Linux's flag.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)


@contextlib.contextmanager
def path_given_by(key: str) -> Iterator[None]:
    """In the ``with`` block, errors name ``key`` instead of ``model.restore_from_path``."""
    try:
        yield
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(str(error).replace(_KEY, key)) from error


class ArchiveReader:
    """Read-only view of a `.nemo` tar (plain or gzip) or of an unpacked directory.

    ``names``: paths of the regular files, in POSIX style without the leading ``./``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._tar: tarfile.TarFile | None = None
        self._members: dict[str, tarfile.TarInfo] = {}
        self._mapped: dict[str, memoryview] = {}  # file in a directory, or "" for a tar → bytes
        if not self.path.exists():
            raise CheckpointNotFoundError(
                f"checkpoint {str(self.path)!r} does not exist. Check {_KEY}"
                f"{hub_remedy(str(self.path))}"
            )
        # A directory: refuse links, which could lead to files elsewhere.
        if self.path.is_dir():
            if not (self.path / "model_config.yaml").is_file():
                # Another directory, such as /, can be large and can change while it is listed.
                self.names = frozenset(path.name for path in self.path.iterdir() if path.is_file())
                return
            paths = list(self.path.rglob("*"))
            for path in paths:
                if path.is_symlink():
                    raise CheckpointError(
                        f"checkpoint directory {str(self.path)!r} contains the link {path.name!r}, "
                        "which could lead to another file. Replace the link by its file"
                    )
            files = (path.relative_to(self.path) for path in paths if path.is_file())
            self.names = frozenset(file.as_posix() for file in files)
            return
        # A tar, perhaps compressed: check all members before one is read.
        self._stream: IO[bytes] = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        if self._stream.read(2) == _GZIP_MAGIC:
            self._stream.close()
            self._stream = open_inflated(self.path)
        self._stream.seek(0)
        message = f"{str(self.path)!r} is not a .nemo archive (a tar, plain or gzip)"
        try:
            with raised_as(CheckpointError, message, tarfile.TarError):
                self._tar = tarfile.open(fileobj=self._stream, mode="r:")  # noqa: SIM115
            self._members = self._checked_members(self._tar)
        except BaseException:
            self._stream.close()
            raise
        self.names = frozenset(self._members)

    def _checked_members(self, tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        text, damage = f"{str(self.path)!r} is truncated or damaged", (tarfile.TarError, ValueError)
        with raised_as(CheckpointError, text, *damage, remedy="copy it again"):
            infos = tar.getmembers()
        members: dict[str, tarfile.TarInfo] = {}
        end = 0
        for info in infos:
            # Refuse names and kinds that no checkpoint has.
            path = PurePosixPath(info.name)
            name, problem = path.as_posix(), ""
            if path.is_absolute() or ".." in path.parts or "\\" in info.name or "\0" in info.name:
                problem = ", an unsafe path: refused as malicious"
            elif not (info.isreg() or info.isdir()) or info.issparse():  # sparse: not contiguous
                problem = ", a link or a device: refused as malicious"
            elif name in members:
                problem = " twice"
            if problem:
                raise CheckpointError(f"{str(self.path)!r} contains {name!r}{problem}")
            end = max(end, info.offset_data + -(-info.size // _BLOCK) * _BLOCK * info.isreg())
            if not info.isdir():
                members[name] = info
        # tarfile accepts a file that was cut between two members.
        self._stream.seek(end)
        if self._stream.read(_BLOCK) != bytes(_BLOCK):
            raise CheckpointError(
                f"{str(self.path)!r} is truncated (no end-of-archive mark). Copy it again"
            )
        return members

    def view(self, name: str) -> memoryview:
        """Return a view of member ``name``, mapped into memory. It stays valid after `close`.

        Processes share the memory. Writing to the view changes a copy of the page, not the file.
        Raises `CheckpointError` if there is no such member.
        """
        if name not in self.names:
            raise CheckpointError(
                f"{str(self.path)!r} contains no {name!r}. "
                + (
                    "It looks like a Hugging Face directory, but a .nemo is required. Convert it: "
                    f"`aligner convert --input {self.path} --output FILE.nemo`"
                    if "config.json" in self.names
                    else "Give a .nemo file"
                )
            )
        # A directory has a mapping for each file, a tar one mapping for all members.
        if self._tar is None:
            if name not in self._mapped:
                with open(self.path / name, "rb") as stream:
                    self._mapped[name] = _mapping(stream)
            return self._mapped[name]
        info = self._members[name]
        if "" not in self._mapped:
            self._mapped[""] = _mapping(self._stream)
        return self._mapped[""][info.offset_data : info.offset_data + info.size]

    def read(self, name: str) -> bytes:
        """Return all bytes of member ``name``.

        Raises `CheckpointError` if the bytes do not match their digest in `CHECKSUMS`. Files of an
        unpacked archive are not checked, because users may edit them.
        """
        if self._tar is None and name in self.names:
            return (self.path / name).read_bytes()
        data = bytes(self.view(name))
        if self._digests.get(name, _digest(data)) != _digest(data):
            raise CheckpointError(
                f"{name!r} of {str(self.path)!r} is damaged: its checksum differs. Copy it again. "
                f"If you changed the member on purpose, remove it from {CHECKSUMS}"
            )
        return data

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in member ``name``. Raises `CheckpointError` if it is damaged."""
        data = bytes(self.view(name)) if name == CHECKSUMS else self.read(name)
        text = f"{name} of {str(self.path)!r} is damaged"
        return json_object(data, CheckpointError, text, "copy the file again")

    @functools.cached_property
    def _digests(self) -> dict[str, Any]:
        listed = self.read_json(CHECKSUMS) if CHECKSUMS in self.names else {}
        absent = sorted(set(listed) - self.names)
        if absent:
            raise CheckpointError(
                f"{str(self.path)!r} lacks {absent[0]!r}, which {CHECKSUMS} lists. Copy it again"
            )
        return listed

    def close(self) -> None:
        """Close the file. Results of `view` stay valid."""
        self._mapped = {}
        if self._tar is not None:
            self._tar.close()
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ViewStream(io.RawIOBase):
    """Seekable stream of the bytes of a memoryview."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._position = view, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill ``target`` with the next bytes. Return the number of bytes."""
        part = self._view[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to ``offset`` from the beginning, the current position or the end."""
        self._position = offset + (0, self._position, len(self._view))[whence]
        return self._position


def _mapping(stream: IO[bytes]) -> memoryview:
    if os.fstat(stream.fileno()).st_size == 0:  # empty files cannot be mapped
        return memoryview(b"")
    # Writable, because torch requires it. Private, so that the file never changes.
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    return memoryview(mmap.mmap(stream.fileno(), 0, flags=flags, prot=protection))


class ArchiveWriter:
    """Writer of a plain tar, member by member. Equal members give equal bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digests: dict[str, str] = {}
        self.add_directory("")

    def add_directory(self, name: str) -> None:
        """Add a directory entry. ``""`` is the root."""
        info = tarfile.TarInfo(f"./{name}".rstrip("/") + "/" if name else "./")
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        self._stream.write(_header(info))

    def add(self, name: str, data: bytes) -> None:
        """Add a file and its checksum."""
        self._digests[name] = _digest(data)
        with self.open(name) as stream:
            stream.write(data)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a new member, open for writing. Its size may be unknown until the block ends."""
        info = tarfile.TarInfo(f"./{name}")
        info.mode = 0o644
        start = self._stream.tell()
        self._stream.write(bytes(_BLOCK))  # space for the header, which contains the size
        yield self._stream
        end = self._stream.tell()
        info.size = end - start - _BLOCK
        self._stream.write(bytes(-info.size % _BLOCK))
        next_member = self._stream.tell()
        self._stream.seek(start)
        self._stream.write(_header(info))
        self._stream.seek(next_member)

    def finish(self) -> None:
        """Write `CHECKSUMS` and the end-of-archive mark of a tar."""
        self.add(CHECKSUMS, json.dumps(self._digests, sort_keys=True).encode())
        self._stream.write(bytes(2 * _BLOCK))
        self._stream.write(bytes(-self._stream.tell() % tarfile.RECORDSIZE))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _header(info: tarfile.TarInfo) -> bytes:
    # TarInfo's defaults are time 0 and no owner, so that equal models give equal bytes.
    header = info.tobuf(tarfile.GNU_FORMAT)
    if len(header) != _BLOCK:
        raise CheckpointError(f"the file name {info.name!r} is too long for a .nemo. Shorten it")
    return header
