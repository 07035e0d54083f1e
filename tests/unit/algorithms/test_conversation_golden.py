"""Conversations of the tiny policy are those of a record: tokens, masks, rewards and advantages.

``python tests/unit/algorithms/test_conversation_golden.py`` writes the record again, where a change
of numbers is meant.
"""

import hashlib
import json
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import golden_games
import pytest
import torch
from conversations import prompts_of
from loaded import load_policy
from settings import parsed
from test_credit import assign, credit

from aligner.algorithms.rollout.endpoint import EndpointRollouts
from aligner.algorithms.rollout.environments import EnvironmentReward, EnvironmentRollouts
from aligner.algorithms.rollout.inputs import open_environments
from aligner.algorithms.rollout.rollout import score
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.data.tokenizers.loading import with_chat_template

pytestmark = pytest.mark.integration

RECORD = Path(__file__).parent / "conversation_golden.json"
GAME = {"factory": f"{golden_games.__file__}:Game"}
AGENT = {"factory": f"{golden_games.__file__}:agent", "kind": "endpoint"}
# Shows some letters of earlier answers otherwise, so that a turn may begin another sequence.
REWRITES = (
    "{% for m in messages %}{% set shown = m.content if m.role == 'user' else "
    "m.content | replace('o', '0') | replace('t', '7') | replace('i', '1') "
    "| replace('\ufffd', '?') %}"
    "{{ m.role }}: {{ shown }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
COLUMNS = (
    *("input_lengths", "prompt_lengths", "position_ids", "is_end", "token_mask"),
    *("sample_mask", "turn_ids", "turn_rewards", "is_scored"),
    *("prompts", "responses", "reward_parts", "end_reasons", "forks", "failures"),
)
LOGPROBS = "generation_logprobs"  # sums of rows, as the last bits differ between processors
TURNS = [{"name": str(number), "turns": 1 + number % 4} for number in range(6)]


def rows(*troubles):
    return [
        {"name": str(number), "turns": 3, "trouble": trouble, "marker": trouble}
        for number, trouble in enumerate(troubles)
    ]


# Name: settings of the environment, rows, chat template. Rows with trouble have one sample each, so
# that it is known which of them meets it.
CASES = {
    "turns": (GAME, TURNS, None),
    "turns_few_slots": ({**GAME, "concurrency": 2}, TURNS, None),
    "max_turns": ({**GAME, "max_turns": 2}, TURNS, None),
    "max_tokens": ({**GAME, "max_tokens": 40}, TURNS, None),
    "tools": ({"factory": f"{golden_games.__file__}:Tools"}, TURNS, None),
    "rewritten": (GAME, TURNS, REWRITES),
    "kept_history": ({**GAME, "rewritten_history": "keep"}, TURNS, REWRITES),
    "fails": (GAME, rows(None, "raises", "dies", "unscored"), None),
    "hangs": ({**GAME, "timeout_s": 1.0}, rows("hangs", None), None),
    "failed_zero": ({**GAME, "failed": "zero"}, rows(None, "raises", None, None), None),
    "agents": (AGENT, TURNS, REWRITES),
    "agents_few_slots": ({**AGENT, "concurrency": 2, "max_turns": 3}, TURNS, REWRITES),
    "agents_fail": (
        {**AGENT, "timeout_s": 3.0},
        rows(None, "raises", "hangs", "unscored"),
        REWRITES,
    ),
}


def for_full_batches(set_attribute):
    """Let batches wait for slow conversations, because rounding depends on the batch size."""
    for kind in (EnvironmentRollouts, EndpointRollouts):
        set_attribute(kind, "gather_s", 30.0)


def digest(values):
    """Hash of numbers; equal ones have the same text."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def configuration(path, environment):
    rollout = {"num_rollout_samples": 8, "length_params": {"max_length": 6}}
    sizes = {"global_batch_size": 8, "micro_batch_size": 4}
    ppo = {**rollout, "num_rollouts_per_prompt": 2}
    return parsed(
        {
            "model": {"restore_from_path": path, **sizes, "ppo": ppo},
            "critic": sizes,
            "reward": {"kind": "environment"},
            "environment": {"max_tokens": 250, "concurrency": 4, **environment},
        }
    )


@cache
def loaded(path):
    """Tokenizer, architecture and policy of a file."""
    policy = load_policy(configuration(path, {"factory": "a:b"}).model)
    with open_nemo(path) as checkpoint:
        return checkpoint.tokenizer, checkpoint.architecture, policy


def played(path, environment, rows, template, folder):
    """Record of a rollout, with advantages of trajectories and of turns, in groups of two.

    Columns of numbers for each token are digests, except tokens and log-probs.
    """
    tokenizer, architecture, policy = loaded(path)
    if template is not None:
        file = folder / "template.jinja"
        file.write_text(template)
        tokenizer = with_chat_template(tokenizer, str(file), key="environment.chat_template")
    rows = [
        {**row, "marker": str(folder / row["marker"])} if row.get("marker") else row for row in rows
    ]
    per_prompt = 1 if "trouble" in rows[0] else 2
    data, columns = prompts_of(rows, per_prompt, first=40), dict.fromkeys(rows[0])
    with ExitStack() as closing:
        config = configuration(path, environment)
        source = open_environments(config, tokenizer, architecture, columns, closing)
        batch = source.collect(policy, data, seed=5, per_prompt=per_prompt)
    score(EnvironmentReward(), batch)
    result = {}
    for by in ("trajectory", "turn"):
        assign(credit("grpo", by), batch)
        result[f"{by}_advantages"] = digest(batch["advantages"].tolist())
    result["input_ids"] = [
        ids[:length].tolist()
        for ids, length in zip(batch["input_ids"], batch["input_lengths"], strict=True)
    ]
    for name in COLUMNS:
        column = batch.get(name)
        if torch.is_tensor(column):
            column = column.tolist() if column.ndim == 1 else digest(column.tolist())
        result[name] = column
    result[LOGPROBS] = batch[LOGPROBS].double().sum(1).tolist()
    return json.loads(json.dumps(result))


@pytest.mark.parametrize("name", CASES)
def test_conversations_are_those_of_the_record(name, tiny_nemo, tmp_path, monkeypatch):
    for_full_batches(monkeypatch.setattr)
    batch = played(str(tiny_nemo), *CASES[name], tmp_path)
    record = json.loads(RECORD.read_text())[name]
    assert batch.keys() == record.keys()
    record[LOGPROBS] = pytest.approx(record[LOGPROBS], abs=1e-3)
    differing = [column for column, values in batch.items() if values != record[column]]
    assert not differing, {column: (batch[column], record[column]) for column in differing}


if __name__ == "__main__":
    for_full_batches(setattr)
    lines = []
    for name, case in CASES.items():
        with TemporaryDirectory() as folder:
            batch = played(sys.argv[1], *case, Path(folder))
        lines.append(f"{json.dumps(name)}: {json.dumps(batch)}")
    RECORD.write_text("{" + ",\n".join(lines) + "}\n")
