"""The user's policy loss, a class at the path ``model.ppo.loss``.

Every process imports the class by its path. The process that reads the configuration also tests the
loss on a synthetic batch before any model is built.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.importing import check_call, construct, load_function, named_by, user_errors
from aligner.losses.interfaces import loss_and_metrics
from aligner.types import Denominators, TokenOutputs

KEY = "model.ppo.loss"
_ROWS = 4  # of the synthetic batch


class PolicyLoss(Protocol):
    """Interface of a user's loss: the class that the option ``model.ppo.loss`` names.

    The loss is computed over one micro-batch of ``B`` sequences. ``S`` is the number of tokens of
    the longest sequence, with its prompt. Shorter sequences are padded. The shapes are the same
    with packed and dynamic micro-batches and on every backend. Position ``t`` describes token
    ``t``.

    The constructor is called with keyword arguments: all of ``model.ppo.loss_kwargs``, and the
    options of the built-in loss (fields of `aligner.losses.policy.PPOPolicyLoss`) that the
    signature names. If the attribute ``needs_entropy`` is true, ``outputs.entropy`` is computed. A
    loss must not keep state between calls.
    """

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Compute what one micro-batch adds to the global batch's loss and metrics.

        Args:
            outputs: ``values_or_logprobs`` float32 [B, S], log-probs of the tokens under the
                current weights at the sampling temperature, with gradient. ``entropy`` float32
                [B, S] in nats, or None unless the loss needs the entropy.
            batch: ``token_mask`` float32 [B, S] (1 if the token was generated) and
                ``sample_mask`` float32 [B] (1 if the sample counts). A token counts if both masks
                are 1. Elsewhere the other columns may be any finite value. ``advantages``,
                ``prev_logprobs`` (of the policy that produced the rollout, on-policy the current
                log-probs, detached), ``generation_logprobs`` (of the sampling engine) and, if
                ``model.ppo.kl_loss.coef`` or a KL in the reward is above 0, ``ref_logprobs`` (of
                the frozen reference), all float32 [B, S]. ``input_ids`` int64 [B, S],
                ``input_lengths`` int64 [B].
            denominators: ``valid_tokens`` and ``valid_seqs``, float32 scalars: tokens and samples
                that count in the whole global batch, over all micro-batches and data-parallel
                ranks. To compute a mean, divide a sum over this micro-batch by one of the two,
                never by a count of this micro-batch. The loss then does not depend on the split
                into micro-batches.

        Returns:
            The loss, a scalar tensor with gradient, and scalar metrics under the same names in
            every call. Loss and metrics are summed over micro-batches and ranks. Metrics whose
            names end in ``_max`` or ``_min`` are combined by maximum or minimum. Names below
            ``train_optim/`` in `docs/metrics.md` are written there, other names below ``custom/``.
        """
        ...


class UserPolicyLoss:
    """Adapter of a `PolicyLoss` to `aligner.types.LossFunction`.

    Pickling stores the import path and the options of the `PolicyLoss`, not the object.
    """

    rows_per_group: ClassVar[int] = 1

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Import the class ``name`` and call it with ``options``, else raise ConfigError."""
        self.name, self.options = name, dict(options)
        self._loss = _construct(load_function(name, key=KEY, kind="class"), name, self.options)
        self.needs_entropy = bool(getattr(self._loss, "needs_entropy", False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by path, because other processes cannot import a file's classes by module."""
        return type(self), (self.name, self.options)

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute what a micro-batch adds to loss and metrics, see `PolicyLoss.__call__`."""
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
    """Construct the loss ``name`` and test it on a synthetic batch.

    ``name``: ``package.module:Class`` or ``path/to/file.py:Class``. ``kwargs``: passed to the
    constructor. ``built_in``: options of the built-in loss, passed if the signature names them.
    ``changed_settings``: options that each non-default setting (``key=value``) changes, one of
    which the constructor or ``kwargs`` must name. ``has_reference``: batches contain
    ``ref_logprobs``.

    Raises ConfigError if the loss cannot be constructed, ignores a changed setting, raises, has no
    gradient, or depends on the split into micro-batches or on masked tokens.
    """
    factory = load_function(name, key=KEY, kind="class")
    option_names = named_by(factory, built_in)
    for setting, options in changed_settings.items():
        if not set(options) & (option_names | kwargs.keys()):
            raise ConfigError(
                f"{setting} is an option of the built-in loss, and {KEY}={name} does not read it. "
                f"Add {' or '.join(options)} to the parameters of its constructor, or leave out "
                f"{setting}"
            )
    arguments = {key: built_in[key] for key in sorted(option_names)} | dict(kwargs)
    loss = UserPolicyLoss(name, arguments)
    _test_loss(loss, has_reference)
    return loss


def _construct(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    remedy = (
        "Give the missing arguments in model.ppo.loss_kwargs. Options of the built-in loss are "
        "passed automatically"
    )
    loss = construct(factory, options, f"{KEY}={name}", remedy)
    remedy = "Write it as __call__(self, outputs, batch, denominators)"
    if not callable(loss):
        raise ConfigError(f"{KEY}={name}: {type(loss).__name__} cannot be called. {remedy}")
    check_call(loss, (), f"{KEY}={name}: its __call__", remedy, positional=3)
    return loss


# Test of the loss -------------------------------------------------------------------------------


def _test_loss(loss: UserPolicyLoss, has_reference: bool) -> None:
    """Compare the loss of four rows with two micro-batches and with other uncounted tokens."""

    def evaluate(uncounted: float, *parts: slice) -> tuple[Tensor, Tensor]:
        return _evaluate(loss, *_synthetic_batch(has_reference, uncounted), parts)

    # Both the loss and the gradients must agree.
    def agree(actual: tuple[Tensor, Tensor]) -> bool:
        pairs = zip(expected, actual, strict=True)
        return all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in pairs)

    # All rows at once, in two micro-batches, and with shifted uncounted tokens.
    expected = evaluate(0.0, slice(None))
    split = evaluate(0.0, slice(0, 2), slice(2, _ROWS))
    shifted = evaluate(2.0, slice(None))
    problem = ""
    if not agree(shifted):
        problem = (
            f"reads tokens that do not count: other values at these tokens "
            f"change the loss from {expected[0].item():g} to {shifted[0].item():g} (or change the "
            "gradients). A token counts if batch['token_mask'] and batch['sample_mask'] are both "
            "1. Set all other positions to 0 with torch.where before exp or a sum"
        )
    elif not agree(split):
        problem = (
            f"depends on how rows are split into micro-batches: the loss of 4 "
            f"synthetic rows is {expected[0].item():g}, the sum over two micro-batches of 2 rows "
            f"is {split[0].item():g} (or the gradients differ). Divide sums by "
            "denominators.valid_tokens or denominators.valid_seqs, not by a count of a micro-batch"
        )
    if problem:
        raise ConfigError(f"{KEY}={loss.name} {problem}")


def _evaluate(
    loss: UserPolicyLoss, outputs: TokenOutputs, batch: dict[str, Tensor], parts: Iterable[slice]
) -> tuple[Tensor, Tensor]:
    """Sum the losses of ``parts``, and compute the gradient of the log-probs, float32 [B, S]."""
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
    has_reference: bool, uncounted: float
) -> tuple[TokenOutputs, dict[str, Tensor]]:
    """Return four rows of up to six tokens. ``uncounted`` is added to tokens that do not count."""
    generator = torch.Generator().manual_seed(0)
    # Masks: row 2 does not count.
    prompts, lengths = torch.tensor([2, 2, 1, 3]), torch.tensor([5, 4, 4, 6])
    position = torch.arange(6)
    token_mask = (position >= prompts[:, None]) & (position < lengths[:, None])
    sample_mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    idle = ~(token_mask & sample_mask.bool()[:, None])
    # Random columns, shifted at tokens that do not count.
    reference = ["ref_logprobs"] if has_reference else []
    batch = {
        name: -torch.rand(_ROWS, 6, generator=generator) - 0.5 + uncounted * idle
        for name in ("logprobs", "prev_logprobs", "generation_logprobs", *reference)
    }
    logprobs = batch.pop("logprobs").requires_grad_()
    entropy = torch.rand(_ROWS, 6, generator=generator) + 0.5 + uncounted * idle
    batch["advantages"] = torch.randn(_ROWS, 6, generator=generator) + uncounted * idle
    batch |= {
        "input_ids": torch.randint(3, 9, (_ROWS, 6), generator=generator),
        "input_lengths": lengths,
        "token_mask": token_mask.float(),
        "second_moment_mask": token_mask.float(),
        "sample_mask": sample_mask,
    }
    return TokenOutputs(logprobs, entropy.requires_grad_()), batch
