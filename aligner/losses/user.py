"""Policy losses of users: classes that the option ``model.ppo.loss`` names.

Every process imports the class by its path. The process that reads the configuration also tests the
loss on a synthetic batch before any model is built.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.importing import accepted_keywords, check_call, construct, load_function, user_errors
from aligner.losses.interfaces import loss_and_metrics
from aligner.types import Denominators, TokenOutputs

KEY = "model.ppo.loss"
_ROWS = 4  # number of rows in the synthetic batch


class PolicyLoss(Protocol):
    """Interface of a user's loss: the class that the option ``model.ppo.loss`` names.

    The loss is computed over one micro-batch of ``B`` sequences, also if the model computes packed
    or dynamic micro-batches. ``S`` is the number of tokens of the longest sequence, prompt
    included. Shorter sequences are padded. Position ``t`` describes token ``t``.

    The constructor gets keyword arguments: all of ``model.ppo.loss_kwargs``, and those options of
    the built-in loss (fields of `aligner.losses.policy.PPOPolicyLoss`) that are parameters of the
    constructor. If the attribute ``needs_entropy`` is true, ``outputs.entropy`` is computed. A loss
    must not keep state between calls.
    """

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Compute this micro-batch's contribution to the global batch's loss and metrics.

        Args:
            outputs: ``values_or_logprobs`` float32 [B, S], log-probs of the tokens under the
                current weights at the sampling temperature, with gradient. ``entropy`` float32
                [B, S] in nats, or None if the loss has no true attribute ``needs_entropy``.
            batch: ``token_mask`` float32 [B, S] (1 for generated tokens) and ``sample_mask``
                float32 [B] (0 for excluded samples). The loss is computed over tokens for which
                both masks are 1. At other tokens the columns may have any finite value.
                All float32 [B, S]: ``advantages``, ``prev_logprobs`` (of the policy that sampled
                the rollout, or if that is the current policy, the current log-probs, detached),
                ``generation_logprobs`` (of the sampling engine) and ``ref_logprobs`` (of the frozen
                reference, only if ``model.ppo.kl_loss.coef`` or a KL penalty in the reward is above
                0). ``input_ids`` int64 [B, S], ``input_lengths`` int64 [B].
            denominators: ``valid_tokens`` and ``valid_seqs``, float32 scalars: number of tokens
                and samples with mask 1 in the global batch, over all micro-batches and ranks. To
                compute a mean, divide a sum over this micro-batch by one of the two, so that the
                loss does not depend on the split into micro-batches.

        Returns:
            The loss, a scalar tensor with gradient, and scalar metrics under the same names in
            every call. Loss and metrics are summed over micro-batches and ranks. Metrics whose
            names end in ``_max`` or ``_min`` are combined by maximum or minimum. A metric
            ``name`` is logged as ``train_optim/name`` if `docs/metrics.md` lists it there, else as
            ``custom/name``.
        """
        ...


class UserPolicyLoss:
    """Adapter from a `PolicyLoss` to `aligner.types.LossFunction`.

    Pickling stores the import path and the options of the `PolicyLoss`, not the object.
    """

    rows_per_group: ClassVar[int] = 1

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Import the class ``name`` and construct a loss with the keywords ``options``."""
        self.name, self.options = name, dict(options)
        self._loss = _construct(load_function(name, key=KEY, kind="class"), name, self.options)
        self.needs_entropy = bool(getattr(self._loss, "needs_entropy", False))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.options)

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the user's loss, see `PolicyLoss`, and check what it returns."""
        logprobs = outputs.values_or_logprobs
        columns = {"prev_logprobs": logprobs.detach(), **batch}
        result = self._loss(outputs, columns, denominators)
        loss, metrics = loss_and_metrics(result, f"{KEY}={self.name}:", ConfigError)
        return loss, {**metrics, "loss": loss.detach()}


def user_policy_loss(
    name: str,
    kwargs: Mapping[str, Any],
    built_in: Mapping[str, Any],
    changed_settings: Mapping[str, tuple[str, ...]],
    *,
    has_reference: bool,
) -> UserPolicyLoss:
    """Construct the user's loss ``name`` and test it on a synthetic batch.

    ``name``: ``package.module:Class`` or ``path/to/file.py:Class``. ``kwargs``: arguments of the
    constructor. ``built_in``: options of the built-in loss, passed if the constructor has such
    parameters. ``changed_settings``: maps each setting (``key=value``) that is not the default to
    the options that it changes. The constructor or ``kwargs`` must name one of these options.
    ``has_reference``: whether batches contain ``ref_logprobs``.

    Raises ConfigError if the loss cannot be constructed, ignores a changed setting, raises an
    error, has no gradient, or depends on the split into micro-batches or on masked tokens.
    """
    factory = load_function(name, key=KEY, kind="class")
    option_names = accepted_keywords(factory, built_in)
    for setting, options in changed_settings.items():
        if not set(options) & (option_names | kwargs.keys()):
            raise ConfigError(
                f"{setting} is an option of the built-in loss, and {KEY}={name} does not read it. "
                f"Add {' or '.join(options)} to the parameters of its constructor, or remove "
                f"{setting} from the configuration"
            )
    arguments = {key: built_in[key] for key in sorted(option_names)} | dict(kwargs)
    loss = UserPolicyLoss(name, arguments)
    _test_loss(loss, has_reference)
    return loss


def _construct(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    remedy = "Set arguments in model.ppo.loss_kwargs. Options of the built-in loss are passed on"
    loss = construct(factory, options, f"{KEY}={name}", remedy)
    remedy = "Write it as __call__(self, outputs, batch, denominators)"
    if not callable(loss):
        raise ConfigError(f"{KEY}={name}: {type(loss).__name__} cannot be called. {remedy}")
    check_call(loss, (), f"{KEY}={name}: its __call__", remedy, positional=3)
    return loss


# Test of the loss -------------------------------------------------------------------------------


def _test_loss(loss: UserPolicyLoss, has_reference: bool) -> None:
    """Raise ConfigError if masked tokens or the split into micro-batches change the loss."""

    def evaluate(masked_shift: float, *parts: slice) -> tuple[Tensor, Tensor]:
        return _evaluate(loss, *_synthetic_batch(has_reference, masked_shift), parts)

    def agree(actual: tuple[Tensor, Tensor]) -> bool:
        pairs = zip(expected, actual, strict=True)
        return all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in pairs)

    # All rows at once, in two micro-batches, and with other values at masked tokens.
    expected = evaluate(0.0, slice(None))
    split = evaluate(0.0, slice(0, 2), slice(2, _ROWS))
    shifted = evaluate(2.0, slice(None))
    problem = ""
    if not agree(shifted):
        problem = (
            f"reads masked tokens: other values there change the loss from {expected[0].item():g} "
            f"to {shifted[0].item():g} (or change the gradients). A token is masked unless "
            "batch['token_mask'] and batch['sample_mask'] are both 1. Set masked positions to 0 "
            "with torch.where before exp or a sum"
        )
    elif not agree(split):
        problem = (
            f"depends on how rows are split into micro-batches: the loss of 4 "
            f"synthetic rows is {expected[0].item():g}, but the sum over 2 micro-batches of 2 rows "
            f"is {split[0].item():g} (or the gradients differ). Divide sums by "
            "denominators.valid_tokens or denominators.valid_seqs, not by a count of a micro-batch"
        )
    if problem:
        raise ConfigError(f"{KEY}={loss.name} {problem}")


def _evaluate(
    loss: UserPolicyLoss, outputs: TokenOutputs, batch: dict[str, Tensor], parts: Iterable[slice]
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the row ranges ``parts``, and its gradient, float32 [B, S]."""
    # Sum the losses of the micro-batches.
    logprobs, entropy = outputs.values_or_logprobs, outputs.entropy
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    denominators = Denominators(mask.sum(), batch["sample_mask"].sum())
    total = torch.zeros(())
    for part in parts:
        # Micro-batches are cut to the longest row.
        width = int(batch["input_lengths"][part].max())
        rows = {
            name: column[part, :width] if column.ndim == 2 else column[part]
            for name, column in batch.items()
        }
        part_entropy = None if not loss.needs_entropy or entropy is None else entropy[part, :width]
        columns = ", ".join(sorted(rows))
        call = f"a synthetic batch of {len(rows['sample_mask'])} rows with the columns {columns}"
        with user_errors(f"{KEY}={loss.name}", call):
            share, _ = loss(TokenOutputs(logprobs[part, :width], part_entropy), rows, denominators)
        total = total + share
    # Check loss and gradient.
    gradient: Tensor | None = None
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, [logprobs], allow_unused=True)
    if gradient is None or not (total.isfinite() & gradient.isfinite().all()):
        raise ConfigError(
            f"{KEY}={loss.name}: on a synthetic batch the loss is {total.item():g} and has "
            f"{'no gradient' if gradient is None else 'a gradient that is not finite'}. Compute "
            "the loss from outputs.values_or_logprobs, without detach or item"
        )
    return total.detach(), gradient


def _synthetic_batch(
    has_reference: bool, masked_shift: float
) -> tuple[TokenOutputs, dict[str, Tensor]]:
    """Return four rows of up to six tokens. ``masked_shift`` is added at masked positions."""
    generator = torch.Generator().manual_seed(0)
    # Masks: row 2 is excluded.
    prompts, lengths = torch.tensor([2, 2, 1, 3]), torch.tensor([5, 4, 4, 6])
    position = torch.arange(6)
    token_mask = (position >= prompts[:, None]) & (position < lengths[:, None])
    sample_mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    shift = masked_shift * ~(token_mask & sample_mask.bool()[:, None])
    # Random columns, shifted at masked positions.
    reference = ["ref_logprobs"] if has_reference else []
    batch = {
        name: -torch.rand(_ROWS, 6, generator=generator) - 0.5 + shift
        for name in ("logprobs", "prev_logprobs", "generation_logprobs", *reference)
    }
    logprobs = batch.pop("logprobs").requires_grad_()
    entropy = torch.rand(_ROWS, 6, generator=generator) + 0.5 + shift
    batch["advantages"] = torch.randn(_ROWS, 6, generator=generator) + shift
    batch |= {
        "input_ids": torch.randint(3, 9, (_ROWS, 6), generator=generator),
        "input_lengths": lengths,
        "token_mask": token_mask.float(),
        "second_moment_mask": token_mask.float(),
        "sample_mask": sample_mask,
    }
    return TokenOutputs(logprobs, entropy.requires_grad_()), batch
