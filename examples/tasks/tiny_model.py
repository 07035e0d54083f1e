"""A small random model, whose file is identical in every run.

``python -m aligner.examples.tasks.tiny_model --output models/tiny.nemo`` writes the model. Layers,
heads, groups, widths and vocabulary are multiples of 4, so that every layout can be tried.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import expected_shapes
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer

TINY_ARCHITECTURE = GPTArchitecture(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=8,
    vocab_size=259,
    max_position_embeddings=256,
    make_vocab_size_divisible_by=16,
    family="llama",
)


def random_weights(
    architecture: GPTArchitecture, *, seed: int = 0, scale: float | None = None
) -> dict[str, Tensor]:
    """Return canonical float32 weights.

    Matrices are normal with the standard deviation ``scale`` (default: the architecture's
    ``init_std``), norms are the identity, biases are zero.
    """
    generator = torch.Generator().manual_seed(seed)
    identity = 0.0 if architecture.normalization == "layernorm1p" else 1.0
    std = architecture.init_std if scale is None else scale
    weights: dict[str, Tensor] = {}
    for name, shape in expected_shapes(architecture).items():
        if name.endswith("layernorm.weight"):
            weights[name] = torch.full(shape, identity)
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(shape)
        else:
            weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    return weights


def write_tiny_nemo(
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    hidden_size: int | None = None,
    scale: float | None = None,
) -> None:
    """Write the tiny Llama-like model with its byte-level tokenizer.

    ``hidden_size``: another width. ``scale``: as in `random_weights`. Large weights give a model
    with low entropy, such as a teacher.
    """
    architecture = TINY_ARCHITECTURE
    if hidden_size is not None:
        architecture = dataclasses.replace(architecture, hidden_size=hidden_size)
    weights = random_weights(architecture, seed=seed, scale=scale)
    save_nemo(path, weights, architecture, byte_level_tokenizer().files())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--hidden-size", type=int, help="another width, for example of a teacher")
    parser.add_argument("--scale", type=float, help="standard deviation of the weights")
    options = parser.parse_args(arguments)
    write_tiny_nemo(
        options.output, seed=options.seed, hidden_size=options.hidden_size, scale=options.scale
    )
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
