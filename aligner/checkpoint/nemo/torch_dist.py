"""megatron-core's ``torch_dist`` checkpoints, read and written without megatron-core.

``.metadata`` is a pickle with the file and offset of every box (rectangular part) of every tensor,
read by an unpickler of few names. ``*.distcp`` are `torch.save` blobs, one for each box.
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
    """Placeholder for recorded save plans, which differ between versions and are not used."""

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
        """Resolve an admitted name. Any other name is an attempt to run code."""
        text = f".metadata refers to {module}.{name}, which is refused as malicious"
        with raised_as(CheckpointError, text, KeyError):
            return _ADMITTED[module, name]


def read_metadata(data: bytes) -> dcp.Metadata:
    """Unpickle ``.metadata`` safely."""
    # A damaged pickle raises nearly any type.
    with raised_as(CheckpointError, ".metadata of the checkpoint is damaged"):
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f".metadata contains a {type(metadata).__name__}, expected Metadata")
    return metadata


class TorchDistSource:
    """Tensors of a torch_dist directory inside an archive. Boxes are read on demand."""

    def __init__(self, archive: ArchiveReader, folder: str) -> None:
        self._archive, self._folder = archive, folder
        metadata = read_metadata(archive.read(f"{folder}/.metadata"))
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }
        # File and offset of each box, by key and offset of the box.
        self._storage: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (index.fqn, tuple(index.offset or ())): info
            for index, info in metadata.storage_data.items()
        }
        self._boxes: dict[tuple[str, tuple[int, ...]], StoredTensor] = {}
        self.shapes = {key: tuple(entry.size) for key, entry in self._tensors.items()}

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return tensor ``key`` with its leading axes fixed at ``index``, without CRC-32 checks."""
        entry, lead = self._tensors[key], len(index)
        result = torch.empty(entry.size[lead:], dtype=entry.properties.dtype)
        filled = 0
        for box, local in self._boxes_at(entry, index):
            start, size = box.offsets[lead:], box.sizes[lead:]
            part = self._box(key, box).tensor(local)
            # Without copying if one box covers the tensor.
            if part.shape == result.shape:
                return part
            result[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))] = part
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(f"{key} is incomplete in the checkpoint's .metadata")
        return result

    def records(self, key: str, index: tuple[int, ...] = ()) -> list[Record]:
        """Return the records whose checksums are compared before the tensors are used."""
        boxes = self._boxes_at(self._tensors[key], index)
        return [record for box, _ in boxes for record in self._box(key, box).records()]

    def _boxes_at(
        self, entry: dcp.TensorStorageMetadata, index: tuple[int, ...]
    ) -> Iterator[tuple[dcp.ChunkStorageMetadata, tuple[int, ...]]]:
        """Yield the boxes with elements at ``index``, and the index within each box."""
        for box in entry.chunks:
            local = tuple(i - start for i, start in zip(index, box.offsets, strict=False))
            if all(0 <= i < size for i, size in zip(local, box.sizes, strict=False)):
                yield box, local

    def _box(self, key: str, box: dcp.ChunkStorageMetadata) -> StoredTensor:
        identity = key, tuple(box.offsets)
        if identity in self._boxes:
            return self._boxes[identity]
        text = f".metadata states no file for box {identity[1]} of {key}"
        with raised_as(CheckpointError, text, KeyError):
            info = self._storage[identity]
        # Open the part of the file as a file of `torch.save`.
        name = f"{self._folder}/{pathlib.PurePosixPath(info.relative_path).name}"
        content = self._archive.view(name)[info.offset : info.offset + info.length]
        if len(content) != info.length:
            raise CheckpointError(
                f"{name!r} of {str(self._archive.path)!r} ends before byte "
                f"{info.offset + info.length}. Copy it again"
            )
        tensor = load_tensors(content, f"{name} ({key})")
        if not isinstance(tensor, StoredTensor) or tensor.view.shape != box.sizes:
            raise CheckpointError(
                f"the shard at offset {identity[1]} of {key} in {name} is not a tensor of shape "
                f"{tuple(box.sizes)}"
            )
        self._boxes[identity] = tensor
        return tensor


def write_torch_dist(
    archive: ArchiveWriter,
    folder: str,
    boxes: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]],
) -> None:
    """Write a torch_dist checkpoint into an archive.

    ``boxes`` yields the chunks of tensors, ``(key, global shape, offset, chunk)``, of any shape and
    dtype. The chunks of a key must tile the tensor. Only one chunk is in memory at a time.
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
            properties = dcp.TensorProperties(dtype=tensor.dtype)
            whole = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
            entry = tensors.setdefault(key, whole)
            entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offset), tensor.shape))
    # Write the files that describe the boxes.
    metadata = dcp.Metadata(state_dict_metadata=dict(tensors), storage_data=storage)
    # megatron-core reads this attribute. Empty entries mean that no tensor was reshaped.
    metadata.mcore_data = {key: {} for key in tensors}
    archive.add(f"{folder}/.metadata", pickle.dumps(metadata, protocol=4))
    archive.add(f"{folder}/common.pt", saved_bytes({}))
    archive.add(f"{folder}/metadata.json", json.dumps(_FORMAT).encode())


def saved_bytes(value: Any) -> bytes:
    """Return the bytes of `torch.save`. A view is saved without the rest of its storage."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()
        value = value.contiguous()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
