"""Log-probs of candidates, and the best ones: against the whole vocabulary in float64."""

import json

import numpy as np
import pytest
import torch
from settings import parsed

from aligner.algorithms.distill.build import check_teacher, train_distill
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import DistillRunConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.data.tokenizers.tokenizer import differing_token
from aligner.errors import ConfigError, DataError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.models.gpt.forward import token_logprobs as candidates
from aligner.models.gpt.forward.token_layout import LayoutRules, build_layout

VOCABULARY, PADDED, WIDTH, TEMPERATURE = 11, 16, 5, 0.7
LENGTHS = np.array([6, 4, 2])


def inputs(packed):
    """Hidden states of a layout, an output layer with padding rows, candidates and a mask."""
    generator = torch.Generator().manual_seed(4)
    layout = build_layout(torch.zeros(3, 6, dtype=torch.int64), LENGTHS, LayoutRules(packed, 1, 1))
    rows = layout.input_ids.numel()
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (3, 6, 4), generator=generator)
    position = torch.arange(6)
    mask = (position >= 1) & (position < torch.from_numpy(LENGTHS)[:, None])
    mask[0, 3] = False
    return layout, hidden.requires_grad_(), weight.requires_grad_(), ids, mask


def whole(layout, hidden, weight, mask):
    """Log-probs [3, 6, V] of what follows each row, 0 where the mask is."""
    rows, tokens = layout.predicted_tokens()
    logprobs = (hidden @ weight[:VOCABULARY].t() / TEMPERATURE).log_softmax(-1)[rows]
    frame = torch.zeros(18, VOCABULARY, dtype=torch.float64).index_copy(0, tokens, logprobs)
    return frame.view(3, 6, VOCABULARY) * mask[..., None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows_at_a_time", [1, 3, 1000])
def test_logprobs_and_gradients(packed, rows_at_a_time, monkeypatch):
    monkeypatch.setattr(candidates, "_LOGIT_BYTES", rows_at_a_time * PADDED * 4)
    layout, hidden, weight, ids, mask = inputs(packed)
    scale = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def slopes(logprobs, entropy):
        value = (logprobs * scale[..., :4]).sum() + (entropy * scale[..., 4]).sum()
        return torch.autograd.grad(value, (hidden, weight))

    projection = candidates.Projection(hidden, weight, VOCABULARY, None, TEMPERATURE)
    found = candidates.candidate_logprobs(projection, ids, mask.numpy(), layout, with_entropy=True)
    every = whole(layout, hidden, weight, mask)
    expected = every.gather(-1, ids), -(every.exp() * every).sum(-1)
    torch.testing.assert_close(found.values_or_logprobs, expected[0])
    torch.testing.assert_close(found.entropy, expected[1])
    for actual, right in zip(slopes(*found), slopes(*expected), strict=True):
        torch.testing.assert_close(actual, right)
    assert found.values_or_logprobs[0, 3].eq(0).all()


@pytest.mark.parametrize("rows_at_a_time", [2, 1000])
def test_the_best_of_a_part_of_the_vocabulary(rows_at_a_time, monkeypatch):
    """Ids from 9 on are not shared; padding rows, however large, are no tokens at all."""
    monkeypatch.setattr(candidates, "_LOGIT_BYTES", rows_at_a_time * PADDED * 4)
    layout, hidden, weight, _, mask = inputs(packed=True)
    weight.data[9:] *= 100
    projection = candidates.Projection(hidden, weight, 9, None, TEMPERATURE)
    logits, ids = candidates.best_candidates(projection, mask.numpy(), layout, count=3)
    rows, tokens = layout.predicted_tokens()
    best = (hidden @ weight[:9].t() / TEMPERATURE)[rows].topk(3)
    chosen = mask.flatten()[tokens]
    torch.testing.assert_close(logits.view(18, 3)[tokens[chosen]], best.values[chosen])
    assert ids.view(18, 3)[tokens[chosen]].equal(best.indices[chosen])
    assert not ids[~mask].any()


def files_with_ids(of_a, of_b):
    """The byte tokenizer's files, written anew, where A and B have the ids of these letters."""
    files = byte_level_tokenizer().files()
    content = json.loads(files["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary[of_a], vocabulary[of_b]
    return files | {"tokenizer.json": json.dumps(content).encode()}


def test_a_teacher_of_another_vocabulary_is_refused(tiny_nemo, tmp_path):
    tokenizer = byte_level_tokenizer()
    assert differing_token(tokenizer, byte_level_tokenizer()) is None
    same = tokenizer_from_files(files_with_ids("A", "B"))
    assert differing_token(same, tokenizer) is None  # other bytes, the same tokens
    other = files_with_ids("B", "A")
    (first,) = tokenizer.encode("A")
    assert (
        differing_token(tokenizer_from_files(other), tokenizer) == f"token {first} is 'B', and 'A'"
    )
    path = tmp_path / "teacher.nemo"
    save_nemo(path, random_weights(TINY_ARCHITECTURE), TINY_ARCHITECTURE, other)
    paths = {"model.restore_from_path": str(tiny_nemo), "teacher.restore_from_path": str(path)}
    config = parsed(paths, DistillRunConfig)
    with pytest.raises(ConfigError, match=r"another vocabulary than model.restore_from_path.*'B'"):
        check_teacher(config, byte_level_tokenizer())


@pytest.mark.integration
def test_prompts_too_long_for_the_student_are_limited_by_data_max_length(tiny_nemo, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "0123456789"}\n')
    run = {
        **{f"{role}.restore_from_path": str(tiny_nemo) for role in ("model", "teacher")},
        "data.train.source": str(tmp_path / "prompts.jsonl"),
        "trainer.distill.on_policy": True,
        "exp_manager.explicit_log_dir": str(tmp_path / "run"),
    }
    with pytest.raises(DataError, match=r"longer than max_length=5 .*: raise max_length$"):
        train_distill(parsed({**run, "data.max_length": 5}, DistillRunConfig))
    run["model.distill.length_params.max_length"] = 250
    with pytest.raises(ConfigError, match=r"longest prompt has 1\d tokens.* data.max_length=6 "):
        train_distill(parsed(run, DistillRunConfig))
