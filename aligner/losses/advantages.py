"""Token rewards, and advantages with a critic (GAE, Schulman et al., 2016).

Per-token tensors are padded, [B, S]: position ``t`` describes token ``t`` and ``values[:, t]`` is
the value of the state before token ``t``. ``mask`` is 1 if the policy generated the token.
`aligner.losses.groups` computes advantages without a critic.
"""

from typing import Literal

import torch
from torch import Tensor


def token_rewards(
    rewards: Tensor,
    kl: Tensor | None,
    token_mask: Tensor,
    beta: float,
    *,
    turn_ids: Tensor | None = None,
) -> Tensor:
    """Compute ``r_t = R · [t is the last generated token] - β · kl_t``, 0 at masked positions.

    ``rewards``: float [B], one per sample, or [B, S], one per token, which keep their positions.
    ``kl``: float [B, S], or None without a KL penalty. ``token_mask``: [B, S]. A row without a
    generated token gets no reward. ``turn_ids``: int64 [B, S], only for conversations: the last
    token is the last token of the last turn. Returns float [B, S].
    """
    assert rewards.ndim in (1, 2), rewards.shape
    assert token_mask.ndim == 2, token_mask.shape
    assert token_mask.shape[: rewards.ndim] == rewards.shape, (token_mask.shape, rewards.shape)
    generated = token_mask.bool()
    if kl is None:
        result = rewards.new_zeros(token_mask.shape)
    else:
        assert kl.shape == token_mask.shape, (kl.shape, token_mask.shape)
        result = torch.where(generated, -beta * kl, 0).to(rewards.dtype)
    if rewards.ndim == 2:
        return result + torch.where(generated, rewards, 0)
    if token_mask.shape[1] == 0:
        return result
    last = _in_time(generated, turn_ids).argmax(dim=1, keepdim=True)
    at_last = torch.where(generated.any(1, keepdim=True), rewards.unsqueeze(1), 0)
    return result.scatter_add_(1, last, at_last)


def _in_time(generated: Tensor, turn_ids: Tensor | None) -> Tensor:
    """Return int64 [B, S], the rank of each generated token by turn and column, else -1."""
    if turn_ids is None:
        return generated.cumsum(1, dtype=torch.int64).sub_(1).masked_fill_(~generated, -1)
    latest = torch.iinfo(turn_ids.dtype).max
    order = turn_ids.masked_fill(~generated, latest).argsort(dim=1, stable=True)
    return order.argsort(dim=1).masked_fill_(~generated, -1)


def generalized_advantage_estimate(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    *,
    turn_ids: Tensor | None = None,
    timestep: Literal["token", "turn"] = "turn",
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns, float [B, S] each, not whitened, 0 where the mask is 0.

    ``δ_t = r_t + γ·V_{t+1} - V_t``, ``A_t = δ_t + γλ·A_{t+1}``, ``return_t = A_t + V_t``. Here
    ``t+1`` is the *next generated token*: value and advantage are carried across holes in the mask.
    After the last generated token both are 0.

    ``values``, ``rewards``: float [B, S], any value at masked positions. ``mask``: [B, S].
    ``turn_ids``: int64 [B, S], index of the turn that generated a token, in any column. Tokens
    follow in the order of turns. With ``turn_ids`` and ``timestep="turn"``, γ and λ apply only
    between the last token of a turn and the first token of the next turn. The computation is in
    float32 at least.
    """
    assert values.ndim == 2, values.shape
    assert values.shape == rewards.shape == mask.shape, (values.shape, rewards.shape, mask.shape)
    dtype = torch.promote_types(values.dtype, torch.float32)
    generated = mask.bool()
    batch, length = mask.shape
    # Close the holes: the n-th generated token goes to column n. All other tokens go to one
    # additional column, which then contains the zero value and advantage after the end. Operations
    # are in place if possible, because allocation costs more time than arithmetic at this size.
    column = _in_time(generated, turn_ids).masked_fill_(~generated, length)
    value, delta = torch.zeros(2, batch, length + 1, dtype=dtype, device=values.device)
    value.scatter_(1, column, values.to(dtype))
    delta.scatter_(1, column, rewards.to(dtype))
    value[:, length] = delta[:, length] = 0
    if turn_ids is None or timestep == "token":
        delta[:, :-1].add_(value[:, 1:], alpha=gamma).sub_(value[:, :-1])
        sums = discounted_sums(delta, gamma * lam)
    else:
        turn = turn_ids.new_zeros(batch, length + 1).scatter_(1, column, turn_ids)
        ends = turn[:, :-1] != turn[:, 1:]
        within = torch.ones_like(delta[:, :-1])
        delta[:, :-1] += within.masked_fill(ends, gamma) * value[:, 1:] - value[:, :-1]
        sums = weighted_sums(delta, within.masked_fill(ends, gamma * lam))
    advantages = sums.gather(1, column)
    returns = (advantages + values).masked_fill_(~generated, 0)
    return advantages, returns


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """Compute ``y[:, t] = sum_{s >= t} discount^(s-t) · x[:, s]`` for float [B, S].

    After pass ``k`` every ``y_t`` covers ``2^k`` terms, so that ``log2(S)`` passes replace a loop
    over ``S``, with smaller rounding errors. Terms with a weight below the rounding error are
    omitted.
    """
    length = x.shape[1]
    negligible = torch.finfo(x.dtype).eps * 1e-3
    y, spare = x.clone(), torch.empty_like(x)
    step = 1
    while step < length and abs(discount) ** step > negligible:
        torch.add(y[:, :-step], y[:, step:], alpha=discount**step, out=spare[:, :-step])
        spare[:, -step:] = y[:, -step:]  # the sequence ends before the next term
        y, spare = spare, y
        step *= 2
    return y


def weighted_sums(x: Tensor, weights: Tensor) -> Tensor:
    """Compute ``y_t = x_t + w_t · y_{t+1}`` by doubling, as in `discounted_sums`.

    ``x``: float [B, S]. ``weights``: float [B, S - 1].
    """
    y, w = x.clone(), torch.nn.functional.pad(weights, (0, 1))
    step = 1
    while step < x.shape[1]:
        y = torch.cat([y[:, :-step] + w[:, :-step] * y[:, step:], y[:, -step:]], dim=1)
        w = torch.nn.functional.pad(w[:, :-step] * w[:, step:], (0, step))
        step *= 2
    return y
