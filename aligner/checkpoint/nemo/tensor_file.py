"""Memory-mapped tensors in files that `torch.save` wrote.

torch's restricted unpickler rebuilds the tensors as views of the mapped file. A tensor is a record
of the zip file. Its CRC-32 is computed in a thread while the tensor is copied. Files in the format
before torch 1.6 are read completely when they are opened, and have no CRC-32.
"""

import functools
import io
import pickle
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._weights_only_unpickler import Unpickler

from aligner.checkpoint.nemo.archive import ViewStream
from aligner.errors import CheckpointError, raised_as

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # mark, bytes of the name and of the extra field
_MARK = b"PK\x03\x04"
_THREAD_BYTES = 1 << 20  # for smaller records, starting a thread costs more than the CRC-32


class Record:
    """Bytes of a record in a zip file. ``crc``: CRC-32 that the file gives, None if it has none."""

    def __init__(self, content: memoryview, crc: int | None, name: str) -> None:
        self.content, self._crc, self._name = content, crc, name
        self._computed: Future[int] | None = None

    def begin(self, threads: Executor) -> None:
        """Start computing the CRC-32 of a large record in one of ``threads``."""
        if self._computed is None and self._crc is not None and len(self.content) >= _THREAD_BYTES:
            self._computed = threads.submit(zlib.crc32, self.content)

    def is_intact(self) -> bool:
        """Return whether the CRC-32 of the bytes matches. Waits for the thread of `begin`."""
        if self._crc is not None:
            computed = self._computed.result() if self._computed else zlib.crc32(self.content)
            if computed != self._crc:
                return False
            self._crc = None
        return True

    def check(self) -> None:
        """Raise `CheckpointError` if the record is damaged."""
        if not self.is_intact():
            raise CheckpointError(
                f"{self._name} is damaged: its bytes do not have the CRC-32 that the file gives. "
                "Copy the file again"
            )


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of any shape in a memory-mapped file, whose CRC-32 has not been checked yet."""

    view: Tensor
    record: Record | None = None  # None: the bytes have been compared already

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.view.shape

    def records(self) -> list[Record]:
        """Return the records that a caller must `Record.check` before it uses the values."""
        return [] if self.record is None else [self.record]

    def tensor(self, index: tuple[int, ...] = ()) -> Tensor:
        """Return ``view[index]``. Call `Record.check` on its `records` before using it."""
        part = self.view[index]  # its address may not be aligned to the dtype
        return part.clone() if part.data_ptr() % part.element_size() else part


def load_tensors(content: memoryview, name: str) -> Any:
    """Load ``content``, the bytes of a file that `torch.save` wrote, without running its code.

    ``content``: writable memory. ``name``: name of the file, for errors. Returns the saved tensor
    or mapping. Each tensor is a `StoredTensor` on the CPU. Raises `CheckpointError` if the file is
    damaged, or contains more than tensors.
    """
    # A damaged file can raise almost any class of error.
    with (
        raised_as(CheckpointError, f"{name} is damaged"),
        torch.serialization.safe_globals([io.BytesIO]),  # in ``_extra_state``
    ):
        try:
            if bytes(content[: len(_MARK)]) != _MARK:
                stream = ViewStream(content)
                return _stored(torch.load(stream, map_location="cpu", weights_only=True), {})
            with zipfile.ZipFile(ViewStream(content)) as file:
                return _load_zip(file, content, name)
        except pickle.UnpicklingError as error:
            reason = str(error).strip().split("\n")[0]  # the other lines advise to trust the file
            raise CheckpointError(
                f"{name} is damaged, or contains objects that are no tensors ({reason}). Copy the "
                "file again, or save only tensors in it"
            ) from error


def _load_zip(file: zipfile.ZipFile, content: memoryview, name: str) -> Any:
    # Find the records of the zip file. Their bytes are views of ``content``.
    infos = {info.filename: info for info in file.infolist()}
    root = next(path for path in infos if path.endswith("/data.pkl")).removesuffix("data.pkl")
    records = {
        path: Record(_bytes_of(file, info, content), info.CRC, f"{path} of {name}")
        for path, info in infos.items()
    }
    # Check all records but the tensors' now. If none has its CRC-32, the file was written without.
    data_folder = f"{root}data/"
    others = [record for path, record in records.items() if not path.startswith(data_folder)]
    if not any(record.is_intact() for record in others):
        _warn_without_crc()
        records = {path: Record(record.content, None, name) for path, record in records.items()}
    else:
        for record in others:
            record.check()
    byte_order = records.get(f"{root}byteorder")
    is_swapped = byte_order is not None and bytes(byte_order.content).decode() != sys.byteorder
    storages: dict[str, torch.TypedStorage] = {}
    record_at: dict[int, Record] = {}  # address of a storage → its record

    # Called by the unpickler with ("storage", type, key, device, number of elements).
    def storage(identity: tuple[Any, ...]) -> torch.TypedStorage:
        _, storage_type, key, _, count = identity
        if key not in storages:
            is_untyped = storage_type is torch.UntypedStorage
            dtype = torch.uint8 if is_untyped else storage_type.dtype
            path = f"{data_folder}{key}"
            size = count * dtype.itemsize
            record = records[path]
            if len(record.content) < size:
                raise CheckpointError(
                    f"{path} of {name} is damaged: it has {len(record.content)} of {size} bytes. "
                    "Copy the file again"
                )
            values = torch.empty(0, dtype=torch.uint8)
            if size:
                values = torch.frombuffer(record.content, dtype=torch.uint8, count=size)
            if is_swapped:
                record.check()
                values = values.clone()
                values.untyped_storage().byteswap(dtype)
            untyped = values.untyped_storage()
            record_at[untyped.data_ptr()] = record
            storages[key] = torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
        return storages[key]

    # Build the tensors, which use these storages.
    unpickler = Unpickler(io.BytesIO(records[f"{root}data.pkl"].content), encoding="utf-8")
    unpickler.persistent_load = storage
    return _stored(unpickler.load(), record_at)


def _stored(value: Any, records: Mapping[int, Record]) -> Any:
    def stored(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        is_strided = item.layout == torch.strided
        address = item.untyped_storage().data_ptr() if is_strided else 0
        return StoredTensor(item, records.get(address))

    is_mapping = isinstance(value, Mapping)
    return {key: stored(item) for key, item in value.items()} if is_mapping else stored(value)


def _bytes_of(file: zipfile.ZipFile, info: zipfile.ZipInfo, content: memoryview) -> memoryview:
    if info.compress_type != zipfile.ZIP_STORED:
        return memoryview(bytearray(file.read(info)))
    mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(content, info.header_offset)
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if mark != _MARK or start + info.file_size > len(content):
        raise zipfile.BadZipFile(f"the zip directory gives a wrong offset for {info.filename}")
    return content[start : start + info.file_size]


@functools.cache
def _warn_without_crc() -> None:
    warnings.warn(
        "weights were written without CRC-32 (torch.serialization.set_crc32_options), so that "
        "damage to the file cannot be detected",
        stacklevel=3,
    )
