"""The critic: a GPT body with a scalar head in place of the output layer."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from aligner.config import CriticConfig, ModelConfig, RSModelConfig, TrainedModelConfig
from aligner.logprobs.output_layer import OutputLayerBypass
from aligner.losses.interfaces import as_loss
from aligner.models.gpt.forward.schedule import (
    ForwardStep,
    Microbatch,
    MicroBatches,
    forward_step,
    full_hidden_states,
    loss_head,
    split_microbatches,
)
from aligner.models.gpt.forward.token_layout import LayoutRules
from aligner.models.gpt.megatron.model import MegatronGPTModel
from aligner.models.gpt.role.settings import SectionType
from aligner.models.gpt.role.value import ValueHead, ValueModel, framed_outputs
from aligner.models.interfaces import CriticModelInterface
from aligner.parallel.groups import joined_parallel
from aligner.types import Denominators, LossFunction, TokenOutputs


class MegatronGPTCriticModel(MegatronGPTModel, ValueModel, CriticModelInterface):
    """PPO's critic.

    The output layer is removed for good, so no ``[S, B, V]`` logits exist at any time. The head is
    a parameter of the megatron-core model itself: one optimizer, one schedule and one gradient norm
    for body and head.
    """

    role_name = "critic"
    config_types: ClassVar[tuple[SectionType, ...]] = (
        CriticConfig,
        ModelConfig,
        RSModelConfig,
        TrainedModelConfig,
    )
    rewards_of: Callable[[Mapping[str, Tensor]], Tensor] | None = None  # on the same backbone

    @property
    def head_outputs(self) -> int:
        """Number of the head's outputs for a token."""
        return 1

    def add_head(self, gpt: GPTModel) -> None:
        """Replace the output layer by `ValueHead` on the last pipeline stage."""
        gpt.share_embeddings_and_output_weights = False  # nothing is left to share them with
        if gpt.post_process:
            gpt.output_layer = OutputLayerBypass()
            head = ValueHead(self.architecture.hidden_size, outputs=self.head_outputs)
            gpt.rm_head = head.to(next(gpt.parameters()).device)  # the body is there already

    def token_outputs(
        self, gpt: GPTModel, hidden: Tensor, microbatch: Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Outputs of the head for every token; see `framed_outputs`."""
        assert not with_entropy  # a policy's matter
        numbers = gpt.rm_head(full_hidden_states(gpt, hidden, vocab_parallel=False))
        return framed_outputs(numbers, microbatch.layout, right_shift=self.right_shift)

    def loss_step(self, loss_fn: LossFunction, denominators: Denominators) -> ForwardStep:
        """`forward_step_value` with this role's head and loss."""
        return partial(
            forward_step_value,
            None,
            denominators.valid_seqs,
            denominators.valid_tokens,
            value_head=getattr(self.gpt, "rm_head", None),
            loss_fn=loss_fn,
            right_shift=self.right_shift,
        )

    def get_values(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """See `ValueModel.get_values`.

        Where these rows are all of the next update and one micro-batch of it, the update begins
        with this forward pass (`ForwardReuse`).
        """
        if micro_batches is not None or not self._trains_in_one_pass(batch):
            return super().get_values(batch, micro_batches)

        def head(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor]:
            self.forward_reuse.keep(microbatch, hidden)
            with torch.no_grad():
                outputs = self.token_outputs(self.gpt, hidden, microbatch, False)
            return (outputs.values_or_logprobs,)

        values = self.empty_frame(batch)
        self.infer_frames(batch, head, [values], self.settings.micro_batch_size, with_graph=True)
        return values

    def _trains_in_one_pass(self, batch: Mapping[str, Tensor]) -> bool:
        """Return whether an update on these rows is one pass that draws no random numbers.

        Left out is also what has more than one graph: pipeline stages, a backbone that a reward
        model shares, experts, which count their tokens in training.
        """
        rows = batch["input_ids"].shape[0]
        return (
            self.optimizer is not None
            and rows * self.parallel.dp_size == self.settings.global_batch_size
            and rows <= self.settings.micro_batch_size
            and self.settings.parallel.pipeline == 1
            and self.adapters is None
            and self.rewards_of is None
            and self.architecture.num_moe_experts is None
            and not self.drops_out
        )

    infer = get_values

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values float32 [B, S] under ``values``, and ``rewards`` of one that shares the backbone.

        ``batch`` as in `get_values`.
        """
        values = {"values": self.get_values(batch)}
        if self.rewards_of is None:
            return values
        return {**values, "rewards": self.rewards_of(batch)}


def forward_step_value(
    state: Any,
    global_valid_seqs: Tensor,
    global_valid_toks: Tensor,
    data_iterator: Iterator[Microbatch | Mapping[str, Tensor]],
    model: nn.Module,
    *,
    value_head: nn.Module | None,
    loss_fn: Any,
    pack_sequences: bool = False,
    defer_fp32_logits: bool | None = None,
    cp_normalize: bool = True,
    policy_cfg: Mapping[str, Any] | None = None,
    right_shift: bool = True,
) -> tuple[Tensor, Callable[..., Any]]:
    """megatron-core's forward step of a critic: hidden states, values, loss.

    Args:
        state: not read; the schedule keeps no state here.
        global_valid_seqs: sequences that count in the global batch, the loss's denominator or
        global_valid_toks: tokens that do.
        data_iterator: this rank's micro-batches, laid out or as columns: ``input_ids`` int64
            ``[b, S]``, ``input_lengths`` int64 ``[b]`` and what the loss reads.
        model: this stage of the body, wrapped or not.
        value_head: `ValueHead`; None on the stages before the last, which have none.
        loss_fn: what the values are trained with, one of this library's or a published one.
        pack_sequences: lay columns out in one row without padding; a micro-batch that has a
            layout keeps it.
        defer_fp32_logits: not read; no logits are made, and values are float32.
        cp_normalize: False multiplies the loss by the context-parallel size, which the gradient's
            sum over those ranks otherwise counts once.
        policy_cfg: not read; its packing and layout are in the other arguments.
        right_shift: see `framed_outputs`.

    Returns:
        The stage's output, and the closure that makes loss and metrics of the last one's.
    """

    def outputs(hidden: Tensor, microbatch: Microbatch) -> TokenOutputs:
        assert value_head is not None, "the last stage holds the head"
        rows = full_hidden_states(unwrap_model(model), hidden, vocab_parallel=False)
        return framed_outputs(value_head(rows), microbatch.layout, right_shift=right_shift)

    del state, defer_fp32_logits, policy_cfg
    denominators = Denominators(valid_tokens=global_valid_toks, valid_seqs=global_valid_seqs)
    head = loss_head(outputs, as_loss(loss_fn), denominators)
    repeats = 1 if cp_normalize else parallel_state.get_context_parallel_world_size()

    def repeated(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = head(hidden, microbatch)
        return loss * repeats, {**metrics, "loss": metrics["loss"] * repeats}

    microbatch = next(data_iterator)
    if not isinstance(microbatch, Microbatch):
        # All rows as one micro-batch, in the layout of this process's groups.
        is_split = unwrap_model(model).config.sequence_parallel
        parallel = joined_parallel(sequence_parallel=is_split)
        rules = LayoutRules.of(parallel, packed=pack_sequences, sequence_length_round=1)
        rows = microbatch["input_ids"].shape[0]
        (microbatch,) = split_microbatches(microbatch, [(0, rows)], rules)
    return forward_step(iter([microbatch]), model, head=head if repeats == 1 else repeated)
