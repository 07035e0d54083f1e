"""megatron-core's ``torch_dist`` checkpoints, read and written without megatron-core.

The directory holds ``.metadata`` (a pickle with the place of every box of every tensor),
``*.distcp`` (concatenated `torch.save` blobs, one per box), ``common.pt`` and ``metadata.json``.
``.metadata`` goes through an unpickler that admits the names such a file needs and nothing else;
blobs are loaded with ``weights_only=True``.
"""

import functools
import io
import json
import pathlib
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from aligner.checkpoint.nemo.archive import ArchiveReader, ArchiveWriter
from aligner.errors import CheckpointError

DATA_FILE = "__0_0.distcp"
_HEADER_BYTES = 30  # of a record of a zip file, before its name
_CRC_CHUNK = 1 << 20
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class _Inert:
    """Stands for recorded save plans, which differ between versions and are not needed to read."""

    def __init__(self, *args: Any) -> None:
        del args

    def __setstate__(self, state: Any) -> None:
        del state


_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("collections", "OrderedDict"): dict,
    **{
        ("torch", name): getattr(torch, name)
        for name in (
            *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
            *("int64", "int32", "int16", "int8", "uint8", "bool"),
        )
    },
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{
        ("pathlib", name): pathlib.PurePosixPath
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **{("torch.distributed.checkpoint.planner", name): _Inert for name in _PLANNER},
    **{
        ("megatron.core.dist_checkpointing.strategies.torch", name): _Inert
        for name in ("MCoreSavePlan", "MCoreMetadata")
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Resolve an admitted name; anything else is an attempt to run code."""
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise CheckpointError(
                f".metadata refers to {module}.{name}, which checkpoint metadata never needs; "
                "refused as malicious"
            ) from None


def read_metadata(data: bytes) -> dcp.Metadata:
    """Unpickle ``.metadata`` safely."""
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f".metadata of the checkpoint is damaged: {error!r}") from error
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f".metadata holds a {type(metadata).__name__}, not metadata")
    return metadata


def check_records(stream: IO[bytes], name: str) -> None:
    """Compare the CRC-32 of every record of a `torch.save` file; leaves the stream at its start.

    A file of which no record agrees was written without CRCs, which is warned of once. Files of
    torch before its zip format (1.6) have none.

    Raises:
        CheckpointError: a record differs.
    """
    try:
        with zipfile.ZipFile(stream) as file:
            infos = file.infolist()
            wrong = [info.filename for info in infos if not _agrees(file, info, stream)]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError, zlib.error):
        infos, wrong = [], []  # torch raises its own error, or reads the older format
    stream.seek(0)
    if wrong and len(wrong) == len(infos):
        _warn_without_crc()
    elif wrong:
        raise CheckpointError(f"{name} is damaged: the CRC-32 of {wrong[0]} differs; copy it anew")


@functools.cache
def _warn_without_crc() -> None:
    warnings.warn(
        "weights were written without CRC-32 (torch.serialization.set_crc32_options), so that "
        "damage to them cannot be seen",
        stacklevel=3,
    )


def _agrees(file: zipfile.ZipFile, info: zipfile.ZipInfo, stream: IO[bytes]) -> bool:
    crc = 0
    if info.compress_type != zipfile.ZIP_STORED:
        with file.open(info) as record:
            return record.read() is not None  # zipfile compares
    stream.seek(record_start(stream, info))
    left = info.file_size
    while left:
        data = stream.read(min(left, _CRC_CHUNK))
        if not data:
            return False
        crc, left = zlib.crc32(data, crc), left - len(data)
    return crc == info.CRC


def record_start(stream: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Offset of a record's bytes in its zip file."""
    stream.seek(info.header_offset)
    header = stream.read(_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack("<HH", header[-4:])
    return info.header_offset + _HEADER_BYTES + int(name_bytes) + int(extra_bytes)


def load_tensor_file(stream: IO[bytes], name: str, device: str = "cpu") -> Any:
    """`torch.load` without running code; ``io.BytesIO`` is admitted for ``_extra_state``."""
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(stream, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} is damaged or holds more than tensors; refused ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{name} is damaged: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


class TorchDistSource:
    """Tensors of a torch_dist directory inside an archive, read box by box on demand."""

    def __init__(self, archive: ArchiveReader, folder: str) -> None:
        self._archive = archive
        self._folder = folder
        self._metadata = read_metadata(archive.read(f"{folder}/.metadata"))
        self._tensors = {
            key: entry
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }
        self._storage: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in self._metadata.storage_data.items()
        }
        self._last_box: tuple[str, int, Tensor] | None = None
        self.shapes = {key: tuple(entry.size) for key, entry in self._tensors.items()}

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Tensor ``key`` with its leading axes fixed at ``index``."""
        entry = self._tensors[key]
        lead = len(index)
        result = torch.empty(entry.size[lead:], dtype=entry.properties.dtype)
        filled = 0
        for box in entry.chunks:
            start, size = tuple(box.offsets), tuple(box.sizes)
            local = tuple(i - s for i, s in zip(index, start, strict=False))
            if any(not 0 <= i < n for i, n in zip(local, size, strict=False)):
                continue
            part = self._read_box(key, start, size)[local]
            where = tuple(slice(s, s + n) for s, n in zip(start[lead:], size[lead:], strict=True))
            if part.shape == result.shape:
                return part
            result[where] = part
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(f"{key} is incomplete in the checkpoint's .metadata")
        return result

    def _read_box(self, key: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        info = self._storage.get((key, start))
        if info is None:
            raise CheckpointError(f".metadata has no place for box {start} of {key}")
        if self._last_box is not None and self._last_box[:2] == (info.relative_path, info.offset):
            return self._last_box[2]
        name = f"{self._folder}/{pathlib.PurePosixPath(info.relative_path).name}"
        blob = self._archive.read_range(name, info.offset, info.length)
        stream = io.BytesIO(blob)
        check_records(stream, f"{name} ({key})")
        box = load_tensor_file(stream, f"{name} ({key})")
        if not isinstance(box, Tensor) or tuple(box.shape) != size:
            raise CheckpointError(f"box {start} of {key} in {name} is not a tensor of shape {size}")
        # Whole stacks may lie in one box: keep the last for the next layer.
        self._last_box = (info.relative_path, info.offset, box)
        return box


def write_torch_dist(
    archive: ArchiveWriter,
    folder: str,
    boxes: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]],
) -> None:
    """Write a torch_dist checkpoint into an archive, one box at a time.

    ``boxes`` yields ``(key, global shape, offset of the box, tensor of the box)``, tensors of any
    shape and dtype; boxes of one key must tile it. Nothing but the current box is held in memory.
    """
    archive.add_directory(folder)
    tensors: dict[str, dcp.TensorStorageMetadata] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    with archive.open(f"{folder}/{DATA_FILE}") as stream:
        origin = stream.tell()
        for key, shape, offset, tensor in boxes:
            start = stream.tell() - origin
            stream.write(saved_bytes(tensor))
            length = stream.tell() - origin - start
            index = dcp.MetadataIndex(key, torch.Size(offset))
            storage[index] = _StorageInfo(DATA_FILE, start, length)
            entry = tensors.setdefault(
                key,
                dcp.TensorStorageMetadata(
                    dcp.TensorProperties(dtype=tensor.dtype), torch.Size(shape), []
                ),
            )
            entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offset), tensor.shape))
    metadata = dcp.Metadata(state_dict_metadata=dict(tensors), storage_data=storage)
    metadata.mcore_data = {key: {} for key in tensors}
    archive.add(f"{folder}/.metadata", pickle.dumps(metadata, protocol=4))
    archive.add(f"{folder}/common.pt", saved_bytes({}))
    archive.add(f"{folder}/metadata.json", json.dumps(_FORMAT).encode())


def saved_bytes(value: Any) -> bytes:
    """`torch.save` to bytes; a view is saved without the rest of its storage."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            value = value.clone()
        value = value.contiguous()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
