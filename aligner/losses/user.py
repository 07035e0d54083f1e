"""A user's own policy loss, by the path that ``model.ppo.loss`` gives.

The class is imported by its path in the process that reads the configuration and in every worker,
and tried there on a made-up batch before any model is built.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.importing import check_call, describe_exception, load_function, named_by
from aligner.losses.interfaces import loss_and_metrics
from aligner.types import Denominators, TokenOutputs

KEY = "model.ppo.loss"
_ROWS = 4  # of the made-up batch


class PolicyLoss(Protocol):
    """Interface of the class of ``model.ppo.loss``: a loss over one micro-batch.

    ``B`` sequences of the micro-batch, ``S`` tokens of its longest one, prompt included, the rest
    filled up: the same padded form with packed and dynamic micro-batches and on every backend.
    Position ``t`` speaks of token ``t``.

    The constructor is called with keyword arguments: all of ``model.ppo.loss_kwargs``, and of the
    options of the built-in loss (`aligner.losses.policy.PPOPolicyLoss`, under the names
    of its fields) those that its signature names. An attribute ``needs_entropy`` that is true has
    ``outputs.entropy`` computed. A loss keeps nothing from one call to the next.
    """

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Loss and metrics of one micro-batch, as *shares* of those of the global batch.

        Args:
            outputs: ``values_or_logprobs`` float32 [B, S], log-probs of the tokens under the
                weights that are trained, over the sampling temperature, with gradient; ``entropy``
                float32 [B, S] in nats, or None where the loss does not need it.
            batch: ``token_mask`` float32 [B, S] (1 where the token was generated),
                ``sample_mask`` float32 [B] (1 where the sample counts): a token counts where both
                are 1, and anything finite may stand elsewhere. ``advantages``,
                ``prev_logprobs`` (of the policy that produced the rollout; on-policy the
                present ones, detached), ``generation_logprobs`` (of the sampling engine) and,
                where ``model.ppo.kl_loss.coef`` or a KL in the reward is above 0,
                ``ref_logprobs`` (of the frozen reference), all float32 [B, S]. ``input_ids``
                int64 [B, S], ``input_lengths`` int64 [B].
            denominators: ``valid_tokens`` and ``valid_seqs``, float32 scalars: tokens and samples
                that count in the whole global batch, over all micro-batches and data-parallel
                ranks. A mean is a sum over this micro-batch divided by one of them, never by what
                this micro-batch has; then the loss does not depend on how rows are split.

        Returns:
            The loss, a scalar tensor with gradient, and scalars under the same names in every
            call. They are added up over micro-batches and ranks as the loss is; of names that end
            in ``_max`` or ``_min`` the extreme is taken. Names that `aligner.observe.metric_names`
            knows below ``train_optim/`` are written there, others below ``custom/``.
        """
        ...


class UserPolicyLoss:
    """A `PolicyLoss` as an `aligner.types.LossFunction`, which travels to workers by its path."""

    rows_per_group: ClassVar[int] = 1

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Import the class ``name`` and call it with ``options``.

        Raises:
            ConfigError: it cannot be imported or constructed, or does not make a loss.
        """
        self.name, self.options = name, dict(options)
        self._loss = _construct(load_function(name, key=KEY, kind="class"), name, self.options)
        self.needs_entropy = bool(getattr(self._loss, "needs_entropy", False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by path: a file's classes are not importable by their module elsewhere."""
        return type(self), (self.name, self.options)

    def __call__(
        self, outputs: TokenOutputs, batch: Mapping[str, Tensor], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metric shares of one micro-batch; see `PolicyLoss.__call__`."""
        logprobs = outputs.values_or_logprobs
        columns = {"prev_logprobs": logprobs.detach(), **batch}
        result = self._loss(outputs, columns, denominators)
        loss, metrics = loss_and_metrics(result, f"{KEY}={self.name}:", ConfigError)
        return loss, {**metrics, "loss": loss.detach()}


def user_policy_loss(
    name: str,
    kwargs: Mapping[str, Any],
    built_in: Mapping[str, Any],
    given: Mapping[str, tuple[str, ...]],
    *,
    has_reference: bool,
) -> UserPolicyLoss:
    """The loss ``name``, tried on a made-up batch.

    Args:
        name: ``package.module:Class`` or ``path/to/file.py:Class``.
        kwargs: ``model.ppo.loss_kwargs``.
        built_in: options of the built-in loss, of which the constructor gets those it names.
        given: settings that are not at their default, as ``key=value``, and the names of the
            options that they set; one that the constructor does not name is refused.
        has_reference: whether the run has ``ref_logprobs``.

    Raises:
        ConfigError: it cannot be imported or constructed, raises, has no gradient, depends on how
            rows are split into micro-batches, or on tokens that do not count.
    """
    factory = load_function(name, key=KEY, kind="class")
    taken = named_by(factory, built_in)
    for setting, options in given.items():
        if not set(options) & (taken | kwargs.keys()):
            raise ConfigError(
                f"{setting} is an option of the built-in loss, and {KEY}={name} does not read it; "
                f"name {' or '.join(options)} in its constructor, or leave the key out"
            )
    loss = UserPolicyLoss(name, {**{key: built_in[key] for key in sorted(taken)}, **kwargs})
    _try(loss, has_reference)
    return loss


def _construct(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    remedy = (
        "Give what it needs in model.ppo.loss_kwargs; options of the built-in loss come by "
        "themselves"
    )
    check_call(factory, options, f"{KEY}={name}: its constructor", remedy)
    try:
        loss = factory(**options)
    except ConfigError as error:
        raise ConfigError(f"{KEY}={name}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{KEY}={name}: its constructor raised {describe_exception(error)}; it was given "
            f"{dict(options)}"
        ) from error
    remedy = "Write it as __call__(self, outputs, batch, denominators)"
    if not callable(loss):
        raise ConfigError(f"{KEY}={name}: {type(loss).__name__} cannot be called. {remedy}")
    check_call(loss, (), f"{KEY}={name}: its __call__", remedy, positional=3)
    return loss


# Trying it --------------------------------------------------------------------------------------


def _try(loss: UserPolicyLoss, has_reference: bool) -> None:
    """Call it on made-up rows: all at once, in two parts, and with others where nothing counts."""
    whole, gradient = _shares(loss, _made_up(has_reference), [slice(None)])
    parts, of_parts = _shares(loss, _made_up(has_reference), [slice(0, 2), slice(2, _ROWS)])
    other, of_other = _shares(loss, _made_up(has_reference, 2.0), [slice(None)])
    named = f"{KEY}={loss.name}"
    if not _close(whole, other) or not _close(gradient, of_other):
        raise ConfigError(
            f"{named}: it reads tokens that do not count: with other numbers there the loss is "
            f"{other.item():g} and not {whole.item():g} (or the gradients differ). A token counts "
            "where batch['token_mask'] and batch['sample_mask'] are both 1; put 0 elsewhere with "
            "torch.where before taking exp or a sum"
        )
    if not _close(whole, parts) or not _close(gradient, of_parts):
        raise ConfigError(
            f"{named}: it depends on how rows are split into micro-batches. Of 4 made-up rows at "
            f"once the loss is {whole.item():g}, of two and two it adds up to {parts.item():g} "
            "(or the gradients differ). Divide sums by denominators.valid_tokens or "
            "denominators.valid_seqs, not by what a micro-batch has"
        )


def _shares(
    loss: UserPolicyLoss, made: tuple[TokenOutputs, dict[str, Tensor]], parts: list[slice]
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of ``parts`` (scalar), and gradient of the log-probs float32 [B, S]."""
    outputs, batch = made
    logprobs, entropy = outputs.values_or_logprobs, outputs.entropy
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    denominators = Denominators(mask.sum(), batch["sample_mask"].sum())
    total = torch.zeros(())
    for part in parts:
        # As wide as the longest row, which micro-batches are cut to.
        width = int(batch["input_lengths"][part].max())
        rows = {
            name: column[part, :width] if column.ndim == 2 else column[part]
            for name, column in batch.items()
        }
        of_tokens = None if not loss.needs_entropy or entropy is None else entropy[part, :width]
        try:
            share, _ = loss(TokenOutputs(logprobs[part, :width], of_tokens), rows, denominators)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{KEY}={loss.name}: raised {describe_exception(error)} on a made-up batch of "
                f"{len(rows['sample_mask'])} rows with the columns {', '.join(sorted(rows))}"
            ) from error
        total = total + share
    if not total.requires_grad:
        raise ConfigError(
            f"{KEY}={loss.name}: the loss has no gradient; compute it from "
            "outputs.values_or_logprobs, without detach or item"
        )
    (gradient,) = torch.autograd.grad(total, [logprobs], allow_unused=True)
    if gradient is None or not (total.isfinite() & gradient.isfinite().all()):
        raise ConfigError(
            f"{KEY}={loss.name}: on a made-up batch the loss is {total.item():g} and its gradient "
            f"{'absent' if gradient is None else 'not finite'}; compute it from "
            "outputs.values_or_logprobs"
        )
    return total.detach(), gradient


def _made_up(has_reference: bool, uncounted: float = 0.0) -> tuple[TokenOutputs, dict[str, Tensor]]:
    """Four rows of up to six tokens; ``uncounted`` is added where tokens do not count."""
    generator = torch.Generator().manual_seed(0)
    prompts, lengths = torch.tensor([2, 2, 1, 3]), torch.tensor([5, 4, 4, 6])
    position = torch.arange(6)
    token_mask = (position >= prompts[:, None]) & (position < lengths[:, None])
    sample_mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    idle = ~(token_mask & sample_mask.bool()[:, None])
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


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)
