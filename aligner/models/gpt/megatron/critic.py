"""Critic on megatron-core: a GPT model whose output layer is replaced by a scalar head."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from aligner.config import CriticConfig, ModelConfig, RSModelConfig, TrainedModelConfig
from aligner.logprobs.output_layer import OutputLayerBypass, ValueHead
from aligner.losses.interfaces import PublishedLoss
from aligner.models.gpt.forward import schedule
from aligner.models.gpt.forward.token_layout import LayoutRules, framed_outputs
from aligner.models.gpt.megatron.model import MegatronGPTModel
from aligner.models.gpt.role.model import ValueModel
from aligner.models.gpt.role.settings import SectionType
from aligner.models.interfaces import CriticModelInterface
from aligner.parallel.groups import joined_parallel
from aligner.types import Denominators, LossFunction, TokenOutputs


class MegatronGPTCriticModel(MegatronGPTModel, ValueModel, CriticModelInterface):
    """Critic on megatron-core.

    The output layer is removed, so that no logits ``[S, B, V]`` are computed. The head is a part of
    the megatron-core model and therefore of its optimizer, schedule and gradient norm.
    """

    role_name = "critic"
    config_types: ClassVar[tuple[SectionType, ...]] = (
        CriticConfig,
        ModelConfig,
        RSModelConfig,
        TrainedModelConfig,
    )
    # `infer` of a reward model that shares the backbone.
    rewards_of: Callable[[Mapping[str, Tensor]], Tensor] | None = None

    def add_head(self, gpt: GPTModel) -> None:
        """Replace the output layer by `ValueHead` on the last pipeline stage."""
        gpt.share_embeddings_and_output_weights = False  # no output layer
        if gpt.post_process:
            gpt.output_layer = OutputLayerBypass()
            head = ValueHead(self.architecture.hidden_size, outputs=self.head_outputs)
            gpt.rm_head = head.to(next(gpt.parameters()).device)

    def token_outputs(
        self, gpt: GPTModel, hidden: Tensor, microbatch: schedule.Microbatch, with_entropy: bool
    ) -> TokenOutputs:
        """Compute the head's outputs for every token (see `framed_outputs`)."""
        assert not with_entropy  # only a policy has an entropy
        outputs = gpt.rm_head(schedule.full_hidden_states(gpt, hidden, vocab_parallel=False))
        return framed_outputs(outputs, microbatch.layout, right_shift=self.right_shift)

    def loss_step(self, loss_fn: LossFunction, denominators: Denominators) -> schedule.ForwardStep:
        """Bind `forward_step_value` to this role's head and loss."""
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
        self, batch: Mapping[str, Tensor], micro_batches: schedule.MicroBatches | None = None
    ) -> Tensor:
        """Compute values (see `ValueModel`). An update may reuse the pass (see `ForwardReuse`)."""
        if micro_batches is not None or not self._trains_in_one_pass(batch):
            return super().get_values(batch, micro_batches)

        def head(hidden: Tensor, microbatch: schedule.Microbatch) -> tuple[Tensor]:
            self.forward_reuse.keep(microbatch, hidden)
            with torch.no_grad():
                outputs = self.token_outputs(self.gpt, hidden, microbatch, False)
            return (outputs.values_or_logprobs,)

        values = self.empty_frame(batch)
        self.infer_frames(batch, head, [values], self.settings.micro_batch_size, with_graph=True)
        return values

    def _trains_in_one_pass(self, batch: Mapping[str, Tensor]) -> bool:
        """Return whether an update on these rows has one micro-batch and no random numbers."""
        # Experts are excluded, because they count tokens in training.
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
        """Return ``values`` float32 [B, S], and ``rewards`` if a reward model shares the backbone.

        ``batch``: see `get_values`.
        """
        values = {"values": self.get_values(batch)}
        if self.rewards_of is None:
            return values
        return {**values, "rewards": self.rewards_of(batch)}


def forward_step_value(
    state: Any,
    global_valid_seqs: Tensor,
    global_valid_toks: Tensor,
    data_iterator: Iterator[schedule.Microbatch | Mapping[str, Tensor]],
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
    """Run the next micro-batch through a stage of a critic, as megatron-core's schedule requires.

    Args:
        global_valid_seqs: valid sequences of the global batch, a denominator of the loss.
        global_valid_toks: valid tokens of the global batch, a denominator of the loss.
        data_iterator: this rank's micro-batches, each a `Microbatch` or a mapping of columns:
            ``input_ids`` int64 ``[b, S]``, ``input_lengths`` int64 ``[b]`` and those of the loss.
        model: this pipeline stage of the model, with or without megatron-core's wrapper.
        value_head: `ValueHead`, or None before the last stage.
        loss_fn: loss of the values, with the interface of this library or NeMo-RL.
        pack_sequences: pack the sequences of a mapping into one row without padding.
        cp_normalize: False multiplies the loss by the context-parallel size. By default, the sum of
            the gradients over context-parallel ranks is the gradient of the loss.
        right_shift: see `framed_outputs`.

    The other arguments are ignored. Returns the stage's output, and a function that computes loss
    and metrics from the last stage's output.
    """

    def outputs(hidden: Tensor, microbatch: schedule.Microbatch) -> TokenOutputs:
        assert value_head is not None, "the last stage contains the head"
        rows = schedule.full_hidden_states(unwrap_model(model), hidden, vocab_parallel=False)
        return framed_outputs(value_head(rows), microbatch.layout, right_shift=right_shift)

    del state, defer_fp32_logits, policy_cfg
    denominators = Denominators(valid_tokens=global_valid_toks, valid_seqs=global_valid_seqs)
    loss_fn = loss_fn if isinstance(loss_fn, LossFunction) else PublishedLoss(loss_fn)
    head = schedule.loss_head(outputs, loss_fn, denominators)
    factor = 1 if cp_normalize else parallel_state.get_context_parallel_world_size()

    def multiplied_head(
        hidden: Tensor, microbatch: schedule.Microbatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = head(hidden, microbatch)
        return loss * factor, {**metrics, "loss": metrics["loss"] * factor}

    microbatch = next(data_iterator)
    if not isinstance(microbatch, schedule.Microbatch):
        # All rows as one micro-batch, in the layout of this process's groups.
        is_split = unwrap_model(model).config.sequence_parallel
        parallel = joined_parallel(sequence_parallel=is_split)
        rules = LayoutRules.of(parallel, packed=pack_sequences, sequence_length_round=1)
        rows = microbatch["input_ids"].shape[0]
        (microbatch,) = schedule.split_microbatches(microbatch, [(0, rows)], rules)
    return schedule.forward_step(
        iter([microbatch]), model, head=head if factor == 1 else multiplied_head
    )
