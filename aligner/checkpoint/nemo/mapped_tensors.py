"""Tensors of a `torch.save` file inside an archive, mapped instead of read.

Only the pickle is read: torch loads tensors without bytes, with the place of each storage's bytes
in the file. The tensors are then views of the archive's mapping, whose pages are read when they are
touched and are one copy for all processes of a machine. Files that cannot be mapped are read whole:
those that torch wrote before its zip format (1.6), and those with compressed, byte-swapped or moved
records.
"""

import struct
import sys
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from aligner.checkpoint.nemo.archive import ArchiveReader
from aligner.checkpoint.nemo.torch_dist import check_records, load_tensor_file, record_start

_LOCAL_HEADER = b"PK\x03\x04"


def load_mapped(archive: ArchiveReader, name: str) -> Any:
    """Load member ``name`` without running code; tensors of a state dict are mapped.

    They are on the CPU and stay valid when the archive closes.

    Raises:
        CheckpointError: the member is damaged, or holds more than tensors.
    """
    where = f"{name} of {str(archive.path)!r}"
    with archive.open(name) as stream:
        check_records(stream, where)
        records = _mappable_records(stream)
        stream.seek(0)
        if records is None:
            return load_tensor_file(stream, where)
        state = load_tensor_file(stream, where, "meta")
        if not _are_located(state):  # older torch locates them only under fake tensors
            stream.seek(0)
            with FakeTensorMode():
                state = load_tensor_file(stream, where)
    if not isinstance(state, Mapping):
        return state
    content, result = archive.map(name), {}
    for key, value in state.items():
        result[key] = value
        if isinstance(value, Tensor):
            mapped = _mapped(value, content, records)
            if mapped is None:  # torch raises its own error, or reads it nevertheless
                with archive.open(name) as stream:
                    return load_tensor_file(stream, where)
            result[key] = mapped
    return result


def _are_located(state: Any) -> bool:
    """Return whether torch gives the places of the bytes of a state dict's tensors."""
    tensors = state.values() if isinstance(state, Mapping) else ()
    return all(
        _start_of(tensor) is not None
        for tensor in tensors
        if isinstance(tensor, Tensor) and tensor.numel()
    )


def _start_of(tensor: Tensor) -> int | None:
    """Offset of the tensor's storage in its file."""
    found: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return found


def _mappable_records(stream: IO[bytes]) -> dict[int, int] | None:
    """Offsets of the storages of a file, and their bytes; None: it cannot be mapped."""
    if stream.read(len(_LOCAL_HEADER)) != _LOCAL_HEADER:
        return None
    records = {}
    try:
        with zipfile.ZipFile(stream) as file:
            for info in file.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    return None
                if info.filename.endswith("/byteorder"):
                    with file.open(info) as order:
                        if order.read(16).decode() != sys.byteorder:
                            return None
                records[record_start(stream, info)] = info.file_size
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, OSError):
        return None  # torch raises its own error
    return records


def _mapped(tensor: Tensor, content: memoryview, records: dict[int, int]) -> Tensor | None:
    """The tensor that one without bytes stands for, as a view of the file's; None: of no such."""
    if tensor.layout != torch.strided:
        return None
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    start, length = _start_of(tensor), tensor.untyped_storage().nbytes()
    if start is None or records.get(start, -1) < length or len(content) < start + length:
        return None
    found = torch.frombuffer(content, dtype=torch.uint8, count=length, offset=start)
    if start % tensor.dtype.itemsize:
        found = found.clone()  # of a file whose records are not aligned, as torch's are
    return found.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), int(tensor.storage_offset())
    )
