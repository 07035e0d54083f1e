"""Patches megatron-core's GPTModel, in the whole process, to return log-probs."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from aligner.distributed.model_utils.hidden_logprobs import from_parallel_hidden_states_to_logprobs
from aligner.errors import ConfigError
from aligner.logprobs.output_layer import bypassed_output_layer, output_weight

if TYPE_CHECKING:  # log-probs of plain tensors need no megatron-core
    from megatron.core.models.gpt import GPTModel


def patch_gpt_model_forward_for_linear_ce_fusion(*, chunk_size: int) -> None:
    """Add the argument ``return_logprobs_for_linear_ce_fusion`` to `GPTModel.forward`.

    ``chunk_size``: maximum number of tokens whose logits are in memory. A second call only changes
    ``chunk_size``.
    """
    from megatron.core.models.gpt import GPTModel

    GPTModel._linear_ce_fusion_chunk_size = chunk_size
    if GPTModel.forward is not _gpt_forward_with_linear_ce_fusion:
        GPTModel._original_forward_for_linear_ce_fusion = GPTModel.forward
        GPTModel.forward = _gpt_forward_with_linear_ce_fusion


def _gpt_forward_with_linear_ce_fusion(
    self: "GPTModel",
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor,
    decoder_input: Tensor | None = None,
    labels: Tensor | None = None,
    inference_context: Any = None,
    packed_seq_params: Any = None,
    extra_block_kwargs: dict | None = None,
    runtime_gather_output: bool | None = None,
    *,
    inference_params: Any | None = None,
    loss_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    return_logprobs_for_linear_ce_fusion: bool = False,
) -> Tensor:
    """Call the original ``forward``, or compute log-probs of ``labels``, float32 [B, S-1].

    With ``return_logprobs_for_linear_ce_fusion``, ``labels`` are the tokens, int64 [B, S], not
    shifted. For n packed sequences (labels [1, T]) the result is [n, max_seqlen_q - 1].
    """
    original_forward = partial(
        self._original_forward_for_linear_ce_fusion,
        input_ids,
        position_ids,
        attention_mask,
        decoder_input,
        inference_context=inference_context,
        packed_seq_params=packed_seq_params,
        extra_block_kwargs=extra_block_kwargs,
        runtime_gather_output=runtime_gather_output,
        inference_params=inference_params,
        loss_mask=loss_mask,
        padding_mask=padding_mask,
    )
    if not return_logprobs_for_linear_ce_fusion:
        return original_forward(labels=labels)
    if labels is None:
        raise ConfigError(
            "labels=None, but return_logprobs_for_linear_ce_fusion=True needs tokens. Pass "
            "labels=input_ids"
        )
    # Only the last pipeline stage (`post_process`) has an output layer.
    with bypassed_output_layer(self):
        hidden = original_forward()
    return _logprobs(self, hidden, labels, packed_seq_params) if self.post_process else hidden


def _logprobs(model: "GPTModel", hidden: Tensor, labels: Tensor, packed_seq_params: Any) -> Tensor:
    weight, tp_group = output_weight(model), model.pg_collection.tp
    start = weight.shape[0] * dist.get_rank(tp_group)
    packing = {}
    if packed_seq_params is not None:
        padded = packed_seq_params.cu_seqlens_q_padded
        packing = {
            "cu_seqlens_padded": packed_seq_params.cu_seqlens_q if padded is None else padded,
            "unpacked_seqlen": packed_seq_params.max_seqlen_q,
        }
    # Every rank computes its rows of the output layer.
    return from_parallel_hidden_states_to_logprobs(
        hidden.transpose(0, 1),
        None,
        weight,
        None,  # gathering of logits, which do not exist
        labels,
        start,
        start + weight.shape[0],
        tp_group,
        cp_group=model.pg_collection.cp,
        chunk_size=model._linear_ce_fusion_chunk_size,
        sequence_parallel=model.config.sequence_parallel,
        **packing,
    )
