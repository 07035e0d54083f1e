"""The `.nemo` container: a tar read in place and written in one atomic pass.

Nothing is ever unpacked: members are read through the tar, so a hostile member name has nowhere to
go and a failure leaves nothing behind. A gzip archive is inflated into an anonymous temporary file,
which vanishes with the process. An already unpacked directory reads the same way.
"""

import contextlib
import gzip
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Self

from aligner.errors import CheckpointError, CheckpointNotFoundError, StorageError

_KEY = "model.restore_from_path"
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = tarfile.BLOCKSIZE


@contextlib.contextmanager
def named_by(key: str) -> Iterator[None]:
    """Within the block a checkpoint that does not exist is one that ``key`` names.

    Outside of it that is ``model.restore_from_path``.
    """
    try:
        yield
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(str(error).replace(_KEY, key)) from error


class ArchiveReader:
    """Read-only view of a `.nemo` tar (plain or gzip) or of an unpacked directory.

    ``names`` are the regular files, POSIX style, without the leading ``./``. Use it as a context
    manager; streams from `open` are valid until it closes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._tar: tarfile.TarFile | None = None
        self._members: dict[str, tarfile.TarInfo] = {}
        if not self.path.exists():
            raise CheckpointNotFoundError(
                f"checkpoint {str(self.path)!r} does not exist; check {_KEY}"
            )
        if self.path.is_dir():
            self.names = frozenset(_directory_names(self.path))
            return
        self._stream = self._plain_tar_stream()
        try:
            self._tar = self._open_tar()
            self._members = self._checked_members(self._tar)
        except BaseException:
            self._stream.close()
            raise
        self.names = frozenset(self._members)

    def _plain_tar_stream(self) -> IO[bytes]:
        stream = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        if stream.read(2) != _GZIP_MAGIC:
            stream.seek(0)
            return stream
        inflated = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            with stream, gzip.open(self.path) as packed:
                shutil.copyfileobj(packed, inflated, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            inflated.close()
            raise CheckpointError(
                f"{str(self.path)!r} is a truncated or damaged gzip archive ({error}); copy it anew"
            ) from error
        except OSError as error:
            inflated.close()
            raise StorageError(
                f"no room to inflate {str(self.path)!r} under {tempfile.gettempdir()!r}: {error}; "
                "free space or set TMPDIR"
            ) from error
        inflated.seek(0)
        return inflated

    def _open_tar(self) -> tarfile.TarFile:
        try:
            return tarfile.open(fileobj=self._stream, mode="r:")
        except tarfile.TarError as error:
            raise CheckpointError(
                f"{str(self.path)!r} is not a .nemo archive (a tar, plain or gzip): {error}"
            ) from error

    def _checked_members(self, tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        try:
            infos = tar.getmembers()
        except (tarfile.TarError, ValueError) as error:
            raise CheckpointError(
                f"{str(self.path)!r} is truncated or damaged ({error}); copy it anew"
            ) from error
        members: dict[str, tarfile.TarInfo] = {}
        end = 0
        for info in infos:
            name = _safe_name(self.path, info)
            end = max(end, info.offset_data + -(-info.size // _BLOCK) * _BLOCK * info.isreg())
            if info.isdir():
                continue
            if name in members:
                raise CheckpointError(f"{str(self.path)!r} holds {name!r} twice; refused")
            members[name] = info
        self._stream.seek(end)
        if self._stream.read(_BLOCK) != bytes(_BLOCK):
            raise CheckpointError(
                f"{str(self.path)!r} is truncated (no end-of-archive mark); copy it anew"
            )
        return members

    def open(self, name: str) -> IO[bytes]:
        """Binary, seekable stream of member ``name``."""
        if name not in self.names:
            raise CheckpointError(
                f"{str(self.path)!r} holds no {name!r}; "
                + (
                    "it looks like a Hugging Face directory, and here a .nemo is needed: "
                    f"`aligner convert --input {self.path} --output FILE.nemo` makes one"
                    if "config.json" in self.names
                    else "is it a .nemo file?"
                )
            )
        if self._tar is None:
            return open(self.path / name, "rb")
        stream = self._tar.extractfile(self._members[name])
        assert stream is not None  # only regular files are listed
        return stream

    def read(self, name: str) -> bytes:
        """All bytes of member ``name``."""
        with self.open(name) as stream:
            return stream.read()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """``length`` bytes of member ``name`` from ``offset`` on."""
        with self.open(name) as stream:
            stream.seek(offset)
            data = stream.read(length)
        if len(data) != length:
            raise CheckpointError(
                f"{name!r} of {str(self.path)!r} ends before byte {offset + length}; copy it anew"
            )
        return data

    def close(self) -> None:
        """Release the file."""
        if self._tar is not None:
            self._tar.close()
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _directory_names(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        if path.is_symlink():
            raise CheckpointError(f"checkpoint directory {str(root)!r} holds a link, {path.name!r}")
        if path.is_file():
            yield path.relative_to(root).as_posix()


def _safe_name(archive: Path, info: tarfile.TarInfo) -> str:
    """The member's normalised name; raises on names and kinds that no checkpoint has."""
    path = PurePosixPath(info.name)
    if path.is_absolute() or ".." in path.parts or "\\" in info.name or "\0" in info.name:
        raise CheckpointError(
            f"{str(archive)!r} holds the unsafe path {info.name!r}; refused as malicious"
        )
    if not (info.isreg() or info.isdir()) or info.issparse():
        raise CheckpointError(
            f"{str(archive)!r} holds {info.name!r}, which is a link or a device; refused as "
            "malicious"
        )
    return path.as_posix()


class ArchiveWriter:
    """Write a plain tar member by member, without temporary copies, byte for byte reproducible."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.add_directory("")

    def add_directory(self, name: str) -> None:
        """Add a directory entry; ``""`` is the root."""
        info = tarfile.TarInfo(f"./{name}".rstrip("/") + "/" if name else "./")
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        self._stream.write(_header(info))

    def add(self, name: str, data: bytes) -> None:
        """Add a file whose bytes are at hand."""
        with self.open(name) as stream:
            stream.write(data)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Stream a file of yet unknown size; its header is filled in when the block ends."""
        info = tarfile.TarInfo(f"./{name}")
        info.mode = 0o644
        start = self._stream.tell()
        self._stream.write(bytes(_BLOCK))
        yield self._stream
        end = self._stream.tell()
        info.size = end - start - _BLOCK
        self._stream.write(bytes(-info.size % _BLOCK))
        after = self._stream.tell()
        self._stream.seek(start)
        self._stream.write(_header(info))
        self._stream.seek(after)

    def finish(self) -> None:
        """Write the end-of-archive mark, padded as tar does."""
        self._stream.write(bytes(2 * _BLOCK))
        self._stream.write(bytes(-self._stream.tell() % tarfile.RECORDSIZE))


def _header(info: tarfile.TarInfo) -> bytes:
    header = info.tobuf(tarfile.GNU_FORMAT)
    if len(header) != _BLOCK:
        raise CheckpointError(f"member name {info.name!r} is too long for a .nemo archive")
    return header
