"""`.nemo` checkpoints: reads all formats that NeMo wrote, and writes the format torch_dist."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint import canonical
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


class NemoCheckpoint:
    """Model in an open `.nemo` archive. Tokenizer and weights are read when they are first used."""

    def __init__(self, archive: ArchiveReader) -> None:
        self._archive = archive
        self.config: Config = parse_config(archive.read(CONFIG_FILE))
        self.tokenizer_files: dict[str, bytes] = read_tokenizer_files(archive, self.config)

    def extract_artifacts(self, folder: Path) -> None:
        """Copy the files that users added (NeMo's ``register_artifact``) into ``folder``."""
        extract_artifacts(self._archive, self.config, folder)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the files in the archive. Raises `TokenizerError` if there are none."""
        path = str(self._archive.path)
        if not self.tokenizer_files:
            raise TokenizerError(
                f"{path!r} contains no tokenizer files (its configuration has tokenizer="
                f"{self.config.get('tokenizer')}). Convert the model again from a directory with "
                "tokenizer files"
            )
        return tokenizer_from_files(self.tokenizer_files, origin=path)

    @functools.cached_property
    def architecture(self) -> GPTArchitecture:
        """Architecture that ``model_config.yaml`` and the tokenizer describe."""
        size = self.config.get("vocab_size") or self.tokenizer.vocab_size
        return architecture_from_config(self.config, size)

    @functools.cached_property
    def weights(self) -> LazyWeights:
        """Canonical weights (`aligner.checkpoint.canonical`), read when indexed."""
        return read_weights(self._archive, self.architecture)


@contextlib.contextmanager
def open_nemo(path: str | os.PathLike[str]) -> Iterator[NemoCheckpoint]:
    """Open a `.nemo` file or an unpacked directory. No file is extracted and no code runs."""
    with ArchiveReader(path) as archive:
        yield NemoCheckpoint(archive)


def save_nemo(
    path: str | os.PathLike[str],
    weights: canonical.Weights,
    architecture: GPTArchitecture,
    tokenizer_files: Mapping[str, bytes],
    extra_config: Mapping[str, Any] | None = None,
    artifacts: Mapping[str, Path] | None = None,
) -> None:
    """Write a `.nemo` file, all of it or nothing. Equal models give equal bytes.

    Args:
        path: path of the file. An existing file is replaced once the new file is on the disk.
        weights: canonical weights, read one tensor at a time. A reward head is written too.
        architecture: architecture of the model.
        tokenizer_files: result of ``Tokenizer.files()``.
        extra_config: additional keys for ``model_config.yaml``. Keys of the architecture and the
            tokenizer take precedence.
        artifacts: additional files, as dotted key of ``model_config.yaml`` → path.
    """
    canonical.check_names(weights, architecture, "the model to be saved")
    config = {**(extra_config or {}), **config_from_architecture(architecture)}
    with atomic_file(path) as stream:
        archive = ArchiveWriter(stream)
        config["tokenizer"] = write_tokenizer_files(archive, tokenizer_files)
        write_artifacts(archive, config, artifacts or {})
        archive.add(CONFIG_FILE, dump_config(config))
        write_torch_dist(archive, WEIGHTS_FOLDER, _chunks(weights, architecture))
        archive.finish()


def _chunks(
    weights: canonical.Weights, architecture: GPTArchitecture
) -> Iterator[tuple[str, canonical.Shape, tuple[int, ...], Tensor]]:
    shapes = canonical.expected_shapes(architecture)
    for name in [*shapes, *canonical.REWARD_HEAD]:
        if name not in weights:  # only a head, or the output layer that a head replaces
            continue
        tensor = weights[name]
        if name in shapes:
            canonical.check_shape(name, tensor.shape, shapes[name])
        key, index, stack = _stack_position(name, architecture)
        part = canonical.split(name, tensor, architecture, tp_rank=0, tp_size=1)
        shape = (*stack, *part.shape)
        offset = (*index, *(0 for _ in part.shape))
        yield f"model.{key}", shape, offset, part[(None,) * len(stack)]


def _stack_position(
    name: str, architecture: GPTArchitecture
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return where a torch_dist checkpoint stores a canonical tensor.

    The checkpoint stacks the tensors of all layers, and of all experts, under one key. Returns this
    key, the tensor's index [layer] or [layer, expert] in the stack, and the shape of the stack.
    """
    match = canonical.LAYER.match(name)
    if match is None:
        return name, (), ()
    layer, suffix = "", match[2]
    index: canonical.Shape = (int(match[1]),)
    stack: canonical.Shape = (architecture.num_layers,)
    is_dense = int(match[1]) in architecture.layers_without_experts
    if architecture.layers_without_experts:  # layers of two kinds are not stacked
        layer, index, stack = f"{match[1]}.", (), ()
    if architecture.num_moe_experts is None or is_dense:
        # megatron-core stores the norms before dense blocks under Transformer Engine's names.
        suffix = suffix.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    suffix = suffix.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    expert = canonical.EXPERT.search(suffix)
    if expert is not None and architecture.num_moe_experts is not None:
        index += (int(expert[1]),)
        stack += (architecture.num_moe_experts,)
        suffix = suffix.replace(f".local_experts.{expert[1]}.", ".experts.")
    return f"decoder.layers.{layer}{suffix}", index, stack
