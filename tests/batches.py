"""Batches of random tokens that PPO can train on."""

from collections.abc import Sequence

import torch


def ppo_batch(
    lengths: Sequence[int], prompts: Sequence[int], *, seed: int = 5, width: int | None = None
) -> dict[str, torch.Tensor]:
    """Rows of ``lengths`` tokens, of which the first ``prompts`` are not learned.

    Rows are filled up to ``width``, by default to the longest length. Every sample counts.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, longest = len(lengths), max(lengths)
    noise = torch.randn(rows, longest, generator=generator)
    ids = torch.randint(0, 256, (rows, longest), generator=generator)
    padding = (0, (width or longest) - longest)
    ids, noise = (torch.nn.functional.pad(tensor, padding) for tensor in (ids, noise))
    position = torch.arange(ids.shape[1])
    begins, ends = (torch.tensor(column)[:, None] for column in (prompts, lengths))
    return {
        "input_ids": ids,
        "input_lengths": ends[:, 0],
        "token_mask": ((position >= begins) & (position < ends)).float(),
        "sample_mask": torch.ones(rows),
        "advantages": noise,
        "returns": noise.flip(0),
        "values": torch.zeros_like(noise),
        "prev_logprobs": torch.full_like(noise, -5.5),
        "generation_logprobs": torch.full_like(noise, -5.5),
    }
