"""megatron-core's GPTModel, patched, returns the log-probs of its own logits."""

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel

from aligner.distributed import model_utils as mu
from aligner.errors import ConfigError
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.forward.schedule import placed_positions
from aligner.models.gpt.forward.token_layout import LayoutRules, build_layout
from aligner.models.gpt.layers.attention import SegmentParams
from aligner.models.gpt.role.settings import RoleSettings

pytestmark = pytest.mark.integration

CHUNK = 5


@pytest.fixture(autouse=True)
def _patched(monkeypatch):
    monkeypatch.setattr(GPTModel, "forward", GPTModel.forward)
    mu.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=99)
    mu.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=CHUNK)


@pytest.fixture(scope="module")
def gpt(tiny_nemo):
    return load_from_nemo(MegatronGPTActorModel, RoleSettings(), restore_path=tiny_nemo).gpt


def inputs():
    tokens = torch.randint(0, 250, (2, 7), generator=torch.Generator().manual_seed(3))
    return tokens, torch.arange(7).expand(2, 7), None


def test_the_fused_forward_equals_the_logits(gpt):
    tokens = inputs()[0]
    parameters = dict(gpt.named_parameters())
    gradients = []
    for fused in (True, False):
        if fused:
            logprobs = gpt(*inputs(), labels=tokens, return_logprobs_for_linear_ce_fusion=True)
        else:
            logits = gpt(*inputs())  # as megatron-core has it
            assert logits.shape[:2] == tokens.shape
            logprobs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        factors = torch.arange(1.0, 1 + logprobs.numel()).view_as(logprobs)
        grads = torch.autograd.grad((logprobs * factors).sum(), list(parameters.values()))
        by_name = dict(zip(parameters, grads, strict=True))
        gradients.append({"log-probs": logprobs.detach(), **by_name})
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_patching_twice_changes_the_chunk_only_and_log_probs_need_labels(gpt):
    assert GPTModel._linear_ce_fusion_chunk_size == CHUNK
    assert GPTModel._original_forward_for_linear_ce_fusion is not GPTModel.forward
    assert gpt.output_layer.__class__.__name__ == "ColumnParallelLinear"
    with pytest.raises(ConfigError, match="labels=None"):
        gpt(*inputs(), return_logprobs_for_linear_ce_fusion=True)


def test_packed_sequences_equal_padded_ones(gpt):
    lengths = np.array([7, 3, 1, 5])
    tokens = torch.randint(0, 250, (4, 7), generator=torch.Generator().manual_seed(5))
    layout = build_layout(tokens, lengths, LayoutRules(True, sequence_multiple=1, row_multiple=1))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    params = SegmentParams(segments=layout.segments, cu_seqlens_q=ends, max_seqlen_q=7)
    fused = {"return_logprobs_for_linear_ce_fusion": True}
    ids, positions = layout.input_ids, layout.positions
    with torch.no_grad(), placed_positions(gpt, layout):
        packed = gpt(ids, positions, None, labels=ids, packed_seq_params=params, **fused)
    position = torch.arange(7).expand(4, 7)
    with torch.no_grad():
        padded = gpt(tokens, position, None, labels=tokens, **fused)
    inside = position[:, 1:] < torch.from_numpy(lengths)[:, None]
    torch.testing.assert_close(packed, padded * inside, rtol=1e-5, atol=1e-5)
