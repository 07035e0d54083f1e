"""`.nemo` checkpoints: open any that NeMo wrote, save one that NeMo can read.

```
open_nemo(path) ── ArchiveReader ─┬─ model_config.yaml ── nemo_config ─────→ architecture
                                  ├─ <hex>_name ───────── nemo_tokenizer ──→ tokenizer
                                  └─ model_weights… ───── nemo_weights ────→ canonical weights
save_nemo(path, weights, …) ───── ArchiveWriter, the same parts in reverse, weights as torch_dist
```
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import (
    REWARD_HEAD,
    Shape,
    Weights,
    check_names,
    check_shape,
    expected_shapes,
    split,
)
from aligner.checkpoint.durable import atomic_file
from aligner.checkpoint.nemo.archive import ArchiveReader, ArchiveWriter
from aligner.checkpoint.nemo.artifacts import (
    extract_artifacts,
    read_tokenizer_files,
    write_artifacts,
    write_tokenizer_files,
)
from aligner.checkpoint.nemo.config import (
    Config,
    architecture_from_config,
    config_from_architecture,
    dump_config,
    parse_config,
)
from aligner.checkpoint.nemo.torch_dist import write_torch_dist
from aligner.checkpoint.nemo.weights import WEIGHTS_FOLDER, LazyWeights, read_weights
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import TokenizerError

CONFIG_FILE = "model_config.yaml"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


class NemoCheckpoint:
    """An open `.nemo`. Parts are read on first use; valid until the archive closes."""

    def __init__(self, archive: ArchiveReader) -> None:
        self._archive = archive
        self.config: Config = parse_config(archive.read(CONFIG_FILE))
        self.tokenizer_files: dict[str, bytes] = read_tokenizer_files(archive, self.config)

    def extract_artifacts(self, folder: Path) -> bool:
        """Copy files registered by users into ``folder``; whether there were any."""
        return extract_artifacts(self._archive, self.config, folder)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The packaged tokenizer."""
        path = str(self._archive.path)
        if not self.tokenizer_files:
            raise TokenizerError(
                f"{path!r} packages no tokenizer files (its configuration names "
                f"{self.config.get('tokenizer')}); convert it anew with its tokenizer"
            )
        return tokenizer_from_files(self.tokenizer_files, origin=path)

    @functools.cached_property
    def architecture(self) -> GPTArchitecture:
        """Architecture that ``model_config.yaml`` and the tokenizer describe."""
        known = self.config.get("vocab_size")
        return architecture_from_config(self.config, known or self.tokenizer.vocab_size)

    @functools.cached_property
    def weights(self) -> LazyWeights:
        """Canonical weights (`aligner.checkpoint.canonical`), each read when it is indexed."""
        return read_weights(self._archive, self.architecture)


@contextlib.contextmanager
def open_nemo(path: str | os.PathLike[str]) -> Iterator[NemoCheckpoint]:
    """Open a `.nemo` file or an unpacked directory; nothing is extracted, no code is run."""
    with ArchiveReader(path) as archive:
        yield NemoCheckpoint(archive)


def save_nemo(
    path: str | os.PathLike[str],
    weights: Weights,
    architecture: GPTArchitecture,
    tokenizer_files: Mapping[str, bytes],
    extra_config: Mapping[str, Any] | None = None,
    artifacts: Mapping[str, Path] | None = None,
) -> None:
    """Write a `.nemo`: atomic, and the same bytes for the same model.

    Args:
        path: destination, replaced only once the new file is complete and on disk.
        weights: canonical; read one tensor at a time. A reward head is carried along.
        architecture: what the weights are shaped by.
        tokenizer_files: as ``Tokenizer.files()`` gives them.
        extra_config: further keys for ``model_config.yaml``; keys that describe the architecture
            or the tokenizer are ours and win.
        artifacts: further files, by the configuration key that shall name them.
    """
    check_names(weights, architecture, "the model to be saved")
    config = {**(extra_config or {}), **config_from_architecture(architecture)}
    with atomic_file(path) as stream:
        archive = ArchiveWriter(stream)
        config["tokenizer"] = write_tokenizer_files(archive, tokenizer_files)
        write_artifacts(archive, config, artifacts or {})
        archive.add(CONFIG_FILE, dump_config(config))
        write_torch_dist(archive, WEIGHTS_FOLDER, _boxes(weights, architecture))
        archive.finish()


def _boxes(
    weights: Weights, architecture: GPTArchitecture
) -> Iterator[tuple[str, Shape, tuple[int, ...], Tensor]]:
    """Boxes of the distributed checkpoint: a layer of a stack each, the vocabulary padded."""
    shapes = expected_shapes(architecture)
    for name in [*shapes, *REWARD_HEAD]:
        if name not in weights:  # only a head, or the output layer it stands for
            continue
        tensor = weights[name]
        if name in shapes:
            check_shape(name, tensor.shape, shapes[name])
        key, index, stack = _stacked_place(name, architecture)
        part = split(name, tensor, architecture, tp_rank=0, tp_size=1)
        shape = (*stack, *part.shape)
        offset = (*index, *(0 for _ in part.shape))
        yield f"model.{key}", shape, offset, part[(None,) * len(stack)]


def _stacked_place(
    name: str, architecture: GPTArchitecture
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Key without layer and expert number, the numbers, and how many there are of each."""
    match = _LAYER.match(name)
    if match is None:
        return name, (), ()
    suffix = match[2]
    index: Shape = (int(match[1]),)
    stack: Shape = (architecture.num_layers,)
    if architecture.num_moe_experts is None:
        # megatron-core stores the norms before dense blocks under Transformer Engine's names.
        suffix = suffix.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    suffix = suffix.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    expert = _EXPERT.search(suffix)
    if expert is not None and architecture.num_moe_experts is not None:
        index += (int(expert[1]),)
        stack += (architecture.num_moe_experts,)
        suffix = _EXPERT.sub(".experts.", suffix)
    return f"decoder.layers.{suffix}", index, stack
