"""Token rewards, and advantages with a critic (GAE, Schulman et al., 2016).

Per-token tensors are padded, [B, S]: position ``t`` describes token ``t`` and ``values[:, t]`` is
the value of the state before token ``t``. ``mask`` is 1 for tokens that the policy generated.
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
    """Compute ``r_t = R · [t is the last generated token] - β · kl_t``, float [B, S].

    ``rewards``: float [B], R of each sample, or float [B, S], a reward for each token instead.
    ``kl``: float [B, S], the estimated KL divergence, or None for no penalty. ``token_mask``:
    [B, S], 1 for generated tokens, the result is 0 elsewhere. ``turn_ids``: int64 [B, S], the turn
    that generated a token. The last token is then that of the last turn, not of the last column.
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
    """Number a row's generated tokens by turn, then column: int64 [B, S], -1 for other tokens."""
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
    ``t+1`` is the *next generated token*, also if masked tokens lie between the two. After the last
    generated token ``V`` and ``A`` are 0.

    ``values``, ``rewards``: float [B, S]. Masked positions may contain any value. ``mask``: [B, S].
    ``turn_ids``: int64 [B, S], index of the turn that generated the token. Tokens are ordered by
    turn, then by column. With ``turn_ids`` and ``timestep="turn"``, γ and λ apply only from the
    last token of a turn to the first token of the next turn, and are 1 within a turn. Computes in
    float32, or in the dtype of ``values`` if wider.
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

    Each pass doubles the number of terms in ``y_t``, so ``log2(S)`` passes replace a loop over
    ``S``. Terms whose weight ``discount^(s-t)`` is below the rounding error are omitted.
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
    """Compute ``y_t = x_t + w_t · y_{t+1}`` for float ``x`` [B, S] and ``weights`` [B, S - 1].

    Each pass doubles the number of terms in ``y_t``, as in `discounted_sums`.
    """
    y, w = x.clone(), torch.nn.functional.pad(weights, (0, 1))
    step = 1
    while step < x.shape[1]:
        y = torch.cat([y[:, :-step] + w[:, :-step] * y[:, step:], y[:, -step:]], dim=1)
        w = torch.nn.functional.pad(w[:, :-step] * w[:, step:], (0, step))
        step *= 2
    return y
