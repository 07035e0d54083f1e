"""Read uncompressed zarr version 2 arrays in C order, which older NeMo files contain.

The zarr library cannot read NeMo's dtype ``bfloat16``, because NumPy lacks this dtype.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.nemo.archive import ArchiveReader
from aligner.checkpoint.nemo.tensor_file import Record
from aligner.errors import CheckpointError, raised_as

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<f8": torch.float64,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "|u1": torch.uint8,
    "|i1": torch.int8,
    "|b1": torch.bool,
}
_HEADER = "/.zarray"


class ZarrSource:
    """Tensors of a zarr directory in an archive. A chunk is read when it is used."""

    def __init__(self, archive: ArchiveReader, folder: str) -> None:
        self._archive, self._folder = archive, folder
        prefix = f"{folder}/"
        self._headers = {
            name[len(prefix) : -len(_HEADER)]: _header(archive, name)
            for name in archive.names
            if name.startswith(prefix) and name.endswith(_HEADER)
        }
        self.shapes = {key: tuple(header["shape"]) for key, header in self._headers.items()}

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return ``tensor[index]`` of the tensor ``key``."""
        header, shape = self._headers[key], self.shapes[key]
        chunk, dtype, lead = tuple(header["chunks"]), _DTYPES[header["dtype"]], len(index)
        result = torch.full(shape[lead:], header["fill_value"] or 0, dtype=dtype)
        fixed = [range(i // n, i // n + 1) for i, n in zip(index, chunk, strict=False)]
        free = [range(math.ceil(s / n)) for s, n in zip(shape[lead:], chunk[lead:], strict=True)]
        for position in itertools.product(*fixed, *free):
            separator = header.get("dimension_separator", ".")
            name = f"{self._folder}/{key}/{separator.join(map(str, position)) or '0'}"
            if name not in self._archive.names:
                continue  # all elements are fill_value
            content = self._archive.read(name)
            if len(content) != math.prod(chunk) * dtype.itemsize:
                raise CheckpointError(
                    f"{name} has {len(content)} bytes, but a chunk of shape {chunk} has "
                    f"{math.prod(chunk) * dtype.itemsize}. Copy the checkpoint again"
                )
            data = torch.frombuffer(bytearray(content), dtype=dtype).view(chunk)
            data = data[tuple(i % n for i, n in zip(index, chunk, strict=False))]
            # The last chunk of an axis is stored completely, even if it exceeds the tensor.
            axes = zip(position[lead:], chunk[lead:], strict=True)
            target = result[tuple(slice(p * n, (p + 1) * n) for p, n in axes)]
            target.copy_(data[tuple(map(slice, target.shape))])
        return result

    def records(self, key: str, index: tuple[int, ...] = ()) -> list[Record]:
        """Return an empty list, because the format has no checksums."""
        del key, index
        return []


def _header(archive: ArchiveReader, name: str) -> dict[str, Any]:
    header = archive.read_json(name)
    text = f"{name} is not a zarr version 2 header"
    with raised_as(CheckpointError, text, KeyError, TypeError):
        shape, chunks = header["shape"], header["chunks"]
        is_supported = len(shape) == len(chunks) and header["dtype"] in _DTYPES
        is_uncompressed = header.get("compressor") is None and not header.get("filters")
        is_supported &= is_uncompressed and header.get("order", "C") == "C"
    if not is_supported:
        raise CheckpointError(
            f"{name}: dtype {header['dtype']!r} and compressor {header.get('compressor')!r} are "
            f"not supported. Supported: uncompressed zarr version 2 of dtype {', '.join(_DTYPES)}"
        )
    return header
