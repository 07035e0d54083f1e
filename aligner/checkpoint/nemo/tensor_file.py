"""Tensors of a file that `torch.save` wrote, mapped into memory instead of read.

Only the pickle is read: torch's restricted unpickler rebuilds the tensors as views of the file's
mapping, whose pages are read when they are touched and are one copy for all processes of a machine.
`torch.save` keeps a CRC-32 of every record of its zip file. That of a tensor's record is compared
when the tensor is first read, or in a thread before that.

Exceptions: records that are compressed or byte-swapped are read when the file is opened, and so are
all files of torch before its zip format (1.6), which have no CRC-32.
"""

import functools
import io
import pickle
import struct
import sys
import threading
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._weights_only_unpickler import Unpickler

from aligner.checkpoint.nemo.archive import ViewStream
from aligner.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # mark, bytes of the name, bytes of the extra field
_MARK = b"PK\x03\x04"
_THREAD_BYTES = 1 << 20  # checking fewer takes less time than starting a thread


class Record:
    """Bytes of one record, and the comparison of their CRC-32, which is made once.

    Args:
        content: the bytes, uint8.
        crc: the CRC-32 that the file gives; None: nothing is compared.
        name: of the record and its file, for the error.
    """

    def __init__(self, content: memoryview, crc: int | None, name: str) -> None:
        self.content, self._crc, self._name = content, crc, name
        self._found: int | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Compute the CRC-32 in a thread, which needs no lock of the interpreter for that."""
        if self._thread is None and self._found is None and len(self.content) >= _THREAD_BYTES:
            self._thread = threading.Thread(target=self.is_whole, daemon=True)
            self._thread.start()

    def is_whole(self) -> bool:
        """Return whether the CRC-32 is the file's."""
        if self._crc is None:
            return True
        if self._found is None:
            self._found = zlib.crc32(self.content)
        return self._found == self._crc

    def check(self) -> None:
        """Wait for the thread, or compute the CRC-32 in this one.

        Raises:
            CheckpointError: it is not the file's.
        """
        if self._thread is not None:
            self._thread.join()
        if not self.is_whole():
            raise CheckpointError(
                f"{self._name} is damaged: its CRC-32 is not that which was written; copy the file "
                "anew"
            )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of any shape and dtype in a file; ``view`` is unchecked memory of the file."""

    view: Tensor
    record: Record | None = None  # None: its bytes have been read and compared already

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.view.shape

    def begin(self) -> None:
        """Check its record in a thread, so that `read` waits less."""
        if self.record is not None:
            self.record.begin()

    def read(self, index: tuple[int, ...] = ()) -> Tensor:
        """The tensor with its leading axes fixed at ``index``, its record checked.

        A view of the file where the bytes are aligned to the dtype, as they are in rank files.
        """
        if self.record is not None:
            self.record.check()
        part = self.view[index]
        return part.clone() if part.data_ptr() % part.element_size() else part


def load_tensors(content: memoryview, name: str) -> Any:
    """Open a file of `torch.save` without running code.

    Args:
        content: the file, in memory that may be written to.
        name: of the file, for errors.

    Returns:
        What was saved, on the CPU. A tensor, or the tensors that are values of a mapping, are
        `StoredTensor`; they stay valid while they are held.

    Raises:
        CheckpointError: it is damaged, or holds more than tensors.
    """
    try:
        with torch.serialization.safe_globals([io.BytesIO]):  # of ``_extra_state``
            if bytes(content[: len(_MARK)]) != _MARK:
                stream = ViewStream(content)
                return _stored(torch.load(stream, map_location="cpu", weights_only=True), {})
            with zipfile.ZipFile(ViewStream(content)) as file:
                return _load_zip(file, content, name)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} is damaged or holds more than tensors; refused ({_first_line(error)})"
        ) from error
    except Exception as error:  # a damaged file raises nearly anything
        raise CheckpointError(f"{name} is damaged: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or repr(error)


def _load_zip(file: zipfile.ZipFile, content: memoryview, name: str) -> Any:
    infos = {info.filename: info for info in file.infolist()}
    root = next(each for each in infos if each.endswith("/data.pkl")).removesuffix("data.pkl")
    records = {
        path: Record(_bytes_of(file, info, content), info.CRC, f"{path} of {name}")
        for path, info in infos.items()
    }
    # The pickle and other short records are needed at once, and show whether there are CRCs.
    short = [record for path, record in records.items() if not path.startswith(f"{root}data/")]
    if not any(record.is_whole() for record in short):
        _warn_without_crc()
        records = {path: Record(each.content, None, name) for path, each in records.items()}
    else:
        for record in short:
            record.check()
    order = records.get(f"{root}byteorder")
    is_swapped = order is not None and bytes(order.content).decode() != sys.byteorder
    storages: dict[str, torch.TypedStorage] = {}
    checked_by: dict[int, Record] = {}

    def storage(identity: tuple[Any, ...]) -> torch.TypedStorage:
        """The storage that the pickle refers to: its kind, key, device and number of elements."""
        _, kind, key, _, count = identity
        if key not in storages:
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            path, size = f"{root}data/{key}", count * dtype.itemsize
            record = records[path]
            if len(record.content) < size:
                raise CheckpointError(f"{path} of {name} is damaged: it has too few bytes")
            values = torch.empty(0, dtype=torch.uint8)
            if size:
                values = torch.frombuffer(record.content, dtype=torch.uint8, count=size)
            if is_swapped:
                record.check()
                values = values.clone()
                values.untyped_storage().byteswap(dtype)
            untyped = values.untyped_storage()
            checked_by[untyped.data_ptr()] = record
            storages[key] = torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
        return storages[key]

    pickled = io.BytesIO(records[f"{root}data.pkl"].content)
    unpickler = Unpickler(pickled, encoding="utf-8")
    unpickler.persistent_load = storage
    return _stored(unpickler.load(), checked_by)


def _stored(value: Any, records: Mapping[int, Record]) -> Any:
    """``value`` with `StoredTensor` for its tensors; ``records``: by the address of a storage."""

    def stored(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        is_plain = each.layout == torch.strided
        address = each.untyped_storage().data_ptr() if is_plain else 0
        return StoredTensor(each, records.get(address))

    if isinstance(value, Mapping):
        return {key: stored(each) for key, each in value.items()}
    return stored(value)


def _bytes_of(file: zipfile.ZipFile, info: zipfile.ZipInfo, content: memoryview) -> memoryview:
    """Bytes of a record, where they are in the file's ``content`` unless they are compressed."""
    if info.compress_type != zipfile.ZIP_STORED:
        return memoryview(bytearray(file.read(info)))
    mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(content, info.header_offset)
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if mark != _MARK or start + info.file_size > len(content):
        raise zipfile.BadZipFile(f"{info.filename} is not where the file's directory says")
    return content[start : start + info.file_size]


@functools.cache
def _warn_without_crc() -> None:
    warnings.warn(
        "weights were written without CRC-32 (torch.serialization.set_crc32_options), so that "
        "damage to them cannot be seen",
        stacklevel=3,
    )
