"""Agents of the real `openai` package, in their own environment, train a policy.

The tiny model is fine-tuned to call a tool and to repeat its result, and is then the policy of a
step of PPO over agents that know a base URL and a key.
"""

import json
from pathlib import Path

import pytest
import torch
from played import kept_batches, turns_of
from recipes import composed

from aligner.algorithms.ppo.trainer import train_ppo
from aligner.algorithms.supervised.build import train_sft
from aligner.config import SFTRunConfig, load_config
from aligner.observe.metrics import read_metrics
from aligner.serving.tools import in_text

pytestmark = pytest.mark.extended
HERE = Path(__file__).parent
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
FUNCTION = {"name": "double", "description": "Double a number.", "parameters": NUMBER}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "1", "function": {"name": "double", "arguments": {"number": 7}}}
CONVERSATION = [
    {"role": "user", "content": "7?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "14"},
    {"role": "assistant", "content": "14"},
]
QUIET = ["exp_manager.create_tensorboard_logger=false"]


@pytest.fixture(scope="module")
def calling_nemo(tiny_nemo, tmp_path_factory):
    """The tiny model with one conversation learned by heart."""
    folder = tmp_path_factory.mktemp("calling")
    row = json.dumps({"messages": in_text(CONVERSATION, TOOLS)})
    (folder / "rows.jsonl").write_text(f"{row}\n" * 16)
    given = [
        *(f"model.restore_from_path={tiny_nemo}", f"data.train.source={folder / 'rows.jsonl'}"),
        *("data.messages_column=messages", "trainer.sft.max_epochs=30", "model.optim.lr=1.0e-2"),
        *("model.global_batch_size=4", "model.micro_batch_size=4"),
        *(f"exp_manager.explicit_log_dir={folder / 'run'}", *QUIET),
    ]
    train_sft(load_config(composed("gpt_sft", *given), SFTRunConfig))
    return folder / "run" / "policy.nemo"


def test_a_step_of_ppo(packages, calling_nemo, tmp_path, monkeypatch):
    kept = kept_batches(monkeypatch)
    rows = [{"prompt": "7?", "tools": TOOLS, "streamed": turn} for turn in (1, 2)]
    saw = tmp_path / "saw.jsonl"
    with (tmp_path / "rows.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({**row, "saw": str(saw)}) + "\n")
    given = [
        *("reward=environment", "environment.kind=endpoint", "environment.max_tokens=250"),
        f"environment.command=[python,{HERE}/openai_agent.py]",
        *(f"model.restore_from_path={calling_nemo}", "model.ppo.length_params.max_length=32"),
        *(f"data.train.source={tmp_path / 'rows.jsonl'}", "environment.concurrency=4"),
        *("model.ppo.num_rollout_samples=8", "model.ppo.num_rollouts_per_prompt=4"),
        *("model.global_batch_size=8", "model.micro_batch_size=4", "trainer.ppo.max_steps=1"),
        *("critic.global_batch_size=8", "critic.micro_batch_size=4"),
        *(f"exp_manager.explicit_log_dir={tmp_path / 'run'}", *QUIET),
    ]
    train_ppo(load_config(composed("gpt_ppo", *given)))
    [batch] = kept
    seen = [json.loads(line) for line in saw.open()]
    assert {Path(one["prefix"]).name for one in seen} == {".venv-adapters"}
    check_rows(batch, [one["turns"] for one in seen])
    metrics = {}
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        metrics |= line
    assert 0 < metrics["sampler/logprob_gap_max"] < 1e-3
    assert metrics["train_optim/grad_norm"] > 0
    assert metrics["train_rollouts/forks"] == 0
    # What was learned by heart is said most of the time: a call, its result behind it.
    assert metrics["train_rollouts/reward_parts/called"] > 0.75
    assert metrics["train_rollouts/accuracy"] > 0.75


def check_rows(batch, conversations):
    """Rows are what the clients saw: ids that were read and sampled, log-probs, rewards."""
    found = list(turns_of(batch))
    ends = [len(turns[-1][0]) + len(turns[-1][1]) for turns in found]
    assert ends == batch["input_lengths"].tolist()
    assert torch.equal(batch["token_mask"], (batch["turn_ids"] > 0).float())
    given = sum(turn[3] for turns in found for turn in turns)
    assert batch["turn_rewards"].sum() == given
    assert len(found) == len(conversations) == 8
    for ours, theirs in zip(sorted(found), sorted(conversations), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (*one[:2], one[3]) == (*other[:2], other[3])
            assert one[2] == pytest.approx(other[2])
