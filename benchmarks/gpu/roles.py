"""Roles of a named shape with random weights, and batches for them."""

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.config import LengthParams, OptimConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.models.gpt import MegatronGPTModel
from aligner.models.gpt.role.settings import RoleSettings

Role = TypeVar("Role", bound=MegatronGPTModel)


def build(cls: type[Role], architecture: GPTArchitecture, **settings: Any) -> Role:
    """Build a trainable role on the device, in bfloat16 by default."""
    arguments: dict[str, Any] = {"precision": "bf16", "optim": OptimConfig(lr=1e-6), **settings}
    role = cls(
        {"vocab_size": architecture.vocab_size},
        settings=RoleSettings(**arguments),
        architecture=architecture,
        tokenizer=byte_level_tokenizer(),
        initialize=False,
    )
    with torch.no_grad():
        for name, parameter in role.gpt.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, architecture.init_std)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return role


def parameters_of(role: MegatronGPTModel) -> int:
    """Count the parameters, tied parameters once."""
    return sum(parameter.numel() for parameter in role.gpt.parameters())


def batch(rows: int, length: int, prompt: int, vocab: int) -> dict[str, Tensor]:
    """Return full rows of random tokens on the device. The first ``prompt`` are not learned."""
    generator = torch.Generator().manual_seed(0)
    # Made on the host, where rows that begin alike are found: the dry device has no random numbers.
    ids = np.random.default_rng(0).integers(0, vocab, (rows, length))
    inside = (torch.arange(length) >= prompt).expand(rows, length).float()
    columns = {
        "input_ids": torch.tensor(ids),
        "input_lengths": torch.full((rows,), length),
        "token_mask": inside.contiguous(),
        "sample_mask": torch.ones(rows),
        "advantages": torch.randn(rows, length, generator=generator),
        "returns": torch.randn(rows, length, generator=generator),
        "values": torch.zeros(rows, length),
        "prev_logprobs": torch.full((rows, length), -12.0),
        "generation_logprobs": torch.full((rows, length), -12.0),
    }
    return {name: accelerator.to_device(column) for name, column in columns.items()}


def generation_settings(in_flight: int, new_tokens: int) -> dict[str, Any]:
    """Return settings of an actor: ``new_tokens`` for each of ``in_flight`` prompts."""
    return {
        "length_params": LengthParams(max_length=new_tokens, min_length=new_tokens),
        "rollout_micro_batch_size": in_flight,
        "optim": None,
    }
