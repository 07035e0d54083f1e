"""Read and write megatron-core's ``torch_dist`` checkpoints, without megatron-core.

A tensor is stored in chunks, rectangular parts. ``*.distcp`` contain the `torch.save` bytes of the
chunks. ``.metadata`` is a pickle with file and offset of each chunk. It is read by an unpickler
that admits few names.
"""

import io
import json
import pathlib
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from aligner.checkpoint.nemo.archive import ArchiveReader, ArchiveWriter
from aligner.checkpoint.nemo.tensor_file import Record, StoredTensor, load_tensors
from aligner.errors import CheckpointError, raised_as

DATA_FILE = "__0_0.distcp"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class _Inert:
    """Placeholder for pickled save plans, which are not used."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_METADATA = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
)
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
    **{(dcp.__name__, name): getattr(dcp, name) for name in _METADATA},
    **{("pathlib", name): pathlib.PurePosixPath for name in _PATHS},
    **{("torch.distributed.checkpoint.planner", name): _Inert for name in _PLANNER},
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Inert,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _Inert,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return an admitted class. Other names are refused, because they could run code."""
        text = f".metadata refers to {module}.{name}, which is refused as malicious"
        with raised_as(CheckpointError, text, KeyError):
            return _ADMITTED[module, name]


def read_metadata(data: bytes) -> dcp.Metadata:
    """Unpickle ``.metadata`` without running code in it."""
    # A damaged pickle can raise almost any class of error.
    with raised_as(CheckpointError, ".metadata of the checkpoint is damaged"):
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f".metadata contains a {type(metadata).__name__}, expected Metadata")
    return metadata


class TorchDistSource:
    """Tensors of a torch_dist directory in an archive. A chunk is read when it is used."""

    def __init__(self, archive: ArchiveReader, folder: str) -> None:
        self._archive, self._folder = archive, folder
        metadata = read_metadata(archive.read(f"{folder}/.metadata"))
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }
        # (key, offset of the chunk in the tensor) → file, and position in the file.
        self._storage: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in metadata.storage_data.items()
        }
        self._chunks: dict[tuple[str, tuple[int, ...]], StoredTensor] = {}
        self.shapes = {key: tuple(entry.size) for key, entry in self._tensors.items()}

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return ``tensor[index]`` of the tensor ``key``. Check its `records` before using it."""
        entry, lead = self._tensors[key], len(index)
        result = torch.empty(entry.size[lead:], dtype=entry.properties.dtype)
        filled = 0
        for chunk, local in self._chunks_at(entry, index):
            start, size = chunk.offsets[lead:], chunk.sizes[lead:]
            part = self._chunk(key, chunk).tensor(local)
            # A chunk that covers the tensor is not copied.
            if part.shape == result.shape:
                return part
            result[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))] = part
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(
                f".metadata of the checkpoint lacks a part of {key}. Copy the checkpoint again"
            )
        return result

    def records(self, key: str, index: tuple[int, ...] = ()) -> list[Record]:
        """Return the records that a caller must `check` before it uses values of `read`."""
        chunks = self._chunks_at(self._tensors[key], index)
        return [record for chunk, _ in chunks for record in self._chunk(key, chunk).records()]

    def _chunks_at(
        self, entry: dcp.TensorStorageMetadata, index: tuple[int, ...]
    ) -> Iterator[tuple[dcp.ChunkStorageMetadata, tuple[int, ...]]]:
        """Yield each chunk with elements at ``index``, and this index relative to the chunk."""
        for chunk in entry.chunks:
            local = tuple(i - start for i, start in zip(index, chunk.offsets, strict=False))
            if all(0 <= i < size for i, size in zip(local, chunk.sizes, strict=False)):
                yield chunk, local

    def _chunk(self, key: str, chunk: dcp.ChunkStorageMetadata) -> StoredTensor:
        identity = key, tuple(chunk.offsets)
        if identity in self._chunks:
            return self._chunks[identity]
        text = f".metadata names no file for the chunk at offset {identity[1]} of {key}"
        with raised_as(CheckpointError, text, KeyError):
            info = self._storage[identity]
        # A part of the file has the format of `torch.save`.
        name = f"{self._folder}/{pathlib.PurePosixPath(info.relative_path).name}"
        content = self._archive.view(name)[info.offset : info.offset + info.length]
        if len(content) != info.length:
            raise CheckpointError(
                f"{name!r} of {str(self._archive.path)!r} ends before byte "
                f"{info.offset + info.length}. Copy it again"
            )
        tensor = load_tensors(content, f"{name} ({key})")
        if not isinstance(tensor, StoredTensor) or tensor.view.shape != chunk.sizes:
            raise CheckpointError(
                f"the chunk at offset {identity[1]} of {key} in {name} is not a tensor of shape "
                f"{tuple(chunk.sizes)}. Copy the checkpoint again"
            )
        self._chunks[identity] = tensor
        return tensor


def write_torch_dist(
    archive: ArchiveWriter,
    folder: str,
    chunks: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]],
) -> None:
    """Write a torch_dist checkpoint into the directory ``folder`` of an archive.

    ``chunks`` yields (key, global shape, offset of the chunk, chunk), of any shape and dtype. The
    chunks of a key must tile the tensor. Only one chunk is in memory at a time.
    """
    archive.add_directory(folder)
    tensors: dict[str, dcp.TensorStorageMetadata] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    with archive.open(f"{folder}/{DATA_FILE}") as stream:
        origin = stream.tell()
        for key, shape, offset, tensor in chunks:
            start = stream.tell() - origin
            stream.write(saved_bytes(tensor))
            length = stream.tell() - origin - start
            index = dcp.MetadataIndex(key, torch.Size(offset))
            storage[index] = _StorageInfo(DATA_FILE, start, length)
            properties = dcp.TensorProperties(dtype=tensor.dtype)
            empty_entry = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
            entry = tensors.setdefault(key, empty_entry)
            entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offset), tensor.shape))
    # Write the files that describe the chunks.
    metadata = dcp.Metadata(state_dict_metadata=dict(tensors), storage_data=storage)
    # An empty entry tells megatron-core that the tensor was not reshaped.
    metadata.mcore_data = {key: {} for key in tensors}
    archive.add(f"{folder}/.metadata", pickle.dumps(metadata, protocol=4))
    archive.add(f"{folder}/common.pt", saved_bytes({}))
    archive.add(f"{folder}/metadata.json", json.dumps(_FORMAT).encode())


def saved_bytes(value: Any) -> bytes:
    """Return the bytes that `torch.save` writes, for a view without the rest of its storage."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()
        value = value.contiguous()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
