"""What the reference says of given responses is asked once, kept, and replaced when it is stale."""

import io

import pytest
import torch
from loaded import load_policy
from rich.console import Console

from aligner.algorithms.preference.build import ReferenceLogprobs
from aligner.config import DPORunConfig, parse_config
from aligner.data.preferences import PairDataset, collate_pairs

pytestmark = pytest.mark.integration


def configuration(nemo, size=5, precision="32"):
    source = "aligner.examples.tasks.arithmetic:arithmetic_pairs"
    data = {"source": source, "arguments": {"size": size, "shots": 1, "wrong_by": [1, 999]}}
    model = {"restore_from_path": str(nemo), "micro_batch_size": 2, "global_batch_size": 4}
    trainer = {"precision": precision}
    return parse_config({"model": model, "data": {"train": data}, "trainer": trainer}, DPORunConfig)


@pytest.fixture(scope="module")
def policy(tiny_nemo):
    return load_policy(configuration(tiny_nemo).model)


@pytest.fixture
def ask(policy, tmp_path):
    """``ask(config)``: the pairs with their reference, and what was said on the console."""

    def asked(config, path=tmp_path / "kept.pt"):
        console = Console(file=io.StringIO(), width=200)
        pairs = PairDataset.load(config.data.train, policy.tokenizer, config.data)
        found = ReferenceLogprobs(policy, path, policy.tokenizer.pad_id, console)
        return found.of({"training": pairs}, config)["training"], console.file.getvalue()

    return asked


def columns(pairs, policy):
    batch = collate_pairs([pairs[index] for index in range(len(pairs))], policy.tokenizer.pad_id)
    return batch, batch["ref_logprobs"]


def test_every_response_gets_its_own_and_it_is_asked_once(policy, ask, tiny_nemo):
    pairs, said = ask(configuration(tiny_nemo))
    batch, reference = columns(pairs, policy)
    expected = policy.get_logprobs(batch)["logprobs"] * batch["token_mask"]
    assert torch.allclose(reference, expected, atol=1e-5)
    assert (reference[batch["token_mask"].bool()] < -1).all()
    assert "10 sequences, once" in said
    first, _ = ask(configuration(tiny_nemo))
    again, said = ask(configuration(tiny_nemo))
    assert said == ""
    assert torch.equal(columns(first, policy)[1], columns(again, policy)[1])


def test_a_stale_or_damaged_file_is_replaced(policy, ask, tiny_nemo, tmp_path):
    ask(configuration(tiny_nemo))
    for changed, named in (
        ({"size": 6}, "training examples"),
        ({"precision": "bf16"}, "precision"),
    ):
        pairs, said = ask(configuration(tiny_nemo, **changed))
        assert f"cannot be used: {named} changed" in said
        assert len(pairs) == changed.get("size", 5)
        assert ask(configuration(tiny_nemo, **changed))[1] == ""
    copy = tmp_path / "copy.nemo"
    copy.write_bytes(tiny_nemo.read_bytes())
    ask(configuration(copy))
    assert "cannot be used: model changed" in ask(configuration(tiny_nemo))[1]
    expected = columns(ask(configuration(tiny_nemo))[0], policy)[1]
    (tmp_path / "kept.pt").write_bytes((tmp_path / "kept.pt").read_bytes()[:-200])
    pairs, said = ask(configuration(tiny_nemo))
    assert "cannot be used: the file is damaged" in said
    assert torch.equal(columns(pairs, policy)[1], expected)
