"""Token rewards, the overlong penalty, generalised advantage estimation (Schulman et al., 2016).

Per-token tensors are padded, [B, S]: position ``t`` speaks of token ``t`` and ``values[:, t]`` is
the value of the state before it. ``mask`` is 1 where the policy generated the token.
"""

import torch
from torch import Tensor

from aligner.errors import ConfigError


def token_rewards(rewards: Tensor, kl: Tensor | None, token_mask: Tensor, beta: float) -> Tensor:
    """``r_t = R · [t is the last generated token] - β · kl_t``, and 0 where the mask is 0.

    ``rewards``: float [B], one per sample. ``kl``: float [B, S], or None where no KL is charged.
    ``token_mask``: [B, S]. A row without a generated token gets no reward. Returns float [B, S].
    (The place of the reward is that of verl, OpenRLHF, NeMo-RL and NeMo-Aligner; TRL's PPO puts it
    one column later.)
    """
    assert rewards.ndim == 1, rewards.shape
    assert token_mask.ndim == 2, token_mask.shape
    assert token_mask.shape[0] == rewards.shape[0], (token_mask.shape, rewards.shape)
    generated = token_mask.bool()
    if kl is None:
        result = rewards.new_zeros(token_mask.shape)
    else:
        assert kl.shape == token_mask.shape, (kl.shape, token_mask.shape)
        result = torch.where(generated, -beta * kl, 0).to(rewards.dtype)
    if token_mask.shape[1] == 0:
        return result
    position = torch.arange(token_mask.shape[1], device=token_mask.device)
    last = torch.where(generated, position, -1).amax(dim=1, keepdim=True)
    at_last = torch.where(last >= 0, rewards.unsqueeze(1), 0)
    return result.scatter_add_(1, last.clamp(min=0), at_last)


def generalized_advantage_estimate(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, 0 where the mask is 0.

    ``δ_t = r_t + γ·V_{t+1} - V_t``, ``A_t = δ_t + γλ·A_{t+1}``, ``return_t = A_t + V_t``, where
    ``t+1`` is the *next generated token*: value and advantage are carried across holes in the mask
    (as verl and NeMo-RL; OpenRLHF and NeMo-Aligner take a hole for a step with reward 0 and value
    0). After the last generated token both are 0.

    ``values``, ``rewards``: float [B, S]; where the mask is 0 they may hold anything.
    ``mask``: [B, S]. Computed in float32 at least. Returns two float [B, S], neither whitened.
    """
    assert values.ndim == 2, values.shape
    assert values.shape == rewards.shape == mask.shape, (values.shape, rewards.shape, mask.shape)
    dtype = torch.promote_types(values.dtype, torch.float32)
    generated = mask.bool()
    batch, length = mask.shape
    # Rows without their holes: the n-th generated token goes to column n. The rest lands in one
    # more column, which then holds the zero value and advantage after the end. In place where
    # possible: at this size the time goes into fresh memory, not arithmetic.
    column = generated.cumsum(1, dtype=torch.int64).sub_(1).masked_fill_(~generated, length)
    value, delta = torch.zeros(2, batch, length + 1, dtype=dtype, device=values.device)
    value.scatter_(1, column, values.to(dtype))
    delta.scatter_(1, column, rewards.to(dtype))
    value[:, length] = delta[:, length] = 0
    delta[:, :-1].add_(value[:, 1:], alpha=gamma).sub_(value[:, :-1])
    advantages = discounted_sums(delta, gamma * lam).gather(1, column)
    returns = (advantages + values).masked_fill_(~generated, 0)
    return advantages, returns


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """``y[:, t] = sum_{s >= t} discount^(s-t) · x[:, s]`` for float [B, S].

    By doubling: after pass ``k`` every ``y_t`` covers ``2^k`` terms, so ``log2(S)`` passes over
    contiguous memory replace a loop over ``S``, and sums are pairwise (better rounded than the
    loop's). Terms whose weight is below the rounding error are left out.
    """
    length = x.shape[1]
    negligible = torch.finfo(x.dtype).eps * 1e-3
    y, spare = x.clone(), torch.empty_like(x)
    step = 1
    while step < length and abs(discount) ** step > negligible:
        torch.add(y[:, :-step], y[:, step:], alpha=discount**step, out=spare[:, :-step])
        spare[:, -step:] = y[:, -step:]  # no term this far behind them
        y, spare = spare, y
        step *= 2
    return y


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + γ·G_{t+1}`` over generated tokens, carried across holes; 0 where masked.

    ``rewards``: float [B, S], where the mask is 0 they may hold anything. ``mask``: [B, S].
    Computed in float32 at least. (verl's convention; OpenRLHF discounts a hole like a step.)
    """
    # Without values, and with λ = 1, an advantage is the return.
    zero = torch.zeros((), dtype=rewards.dtype, device=rewards.device).expand_as(rewards)
    return generalized_advantage_estimate(zero, rewards, mask, gamma, 1.0)[0]


def soft_overlong_penalty(lengths: Tensor, is_end: Tensor, max_length: int, cache: int) -> Tensor:
    """Term added to the reward: 0 for short responses, down to -1 for those at the limit.

    DAPO's soft punishment (Yu et al., 2025, eq. 13): over the last ``cache`` tokens before
    ``max_length`` it falls linearly from 0 to -1::

        min(0, (max_length - cache - length) / cache)

    A response that did not end was cut, so it is longer than the limit: -1 whatever its length.
    With ``cache=0`` nothing else is punished. (verl and OpenRLHF go only by the length; the same
    where every response that did not end has the full length.)

    ``lengths``: int64 [B], generated tokens. ``is_end``: bool [B], the response ended by itself.
    ``max_length``: most tokens a response may have. Returns float32 [B].
    """
    check_overlong(max_length, cache)
    assert lengths.shape == is_end.shape, (lengths.shape, is_end.shape)
    over = (lengths - (max_length - cache)).clamp(min=0).float()
    soft = -(over / max(1, cache)).clamp(max=1.0)
    return torch.where(is_end.bool(), soft, -1.0)


def check_overlong(max_length: int, cache: int) -> None:
    """Refuse a cache that does not fit into the response."""
    if not 0 <= cache <= max_length:
        raise ConfigError(
            f"overlong cache={cache} must be between 0 and max_length={max_length}, both in tokens"
        )
