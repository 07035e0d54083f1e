"""Reward models learn, and what learns from them gets better by a verifier's count.

The tiny model is random. The better answer begins with a digit
(`aligner.examples.tasks.form_pairs`).
"""

import subprocess
import sys
import threading
import time

import pytest
import torch
from recipes import run
from servers import bound_port, started
from test_reward_server import ROOT, STUB

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.form_pairs import form_pairs
from aligner.models.gpt import MegatronGPTRewardModel, load_from_nemo
from aligner.models.gpt.role.reward import SequenceForm
from aligner.rewards.sequences import SequenceEncoder


def train(folder, nemo, *overrides):
    """Validation metrics before and after, and the trained model's file."""
    first, *_, last = run(folder, nemo, "reward_tiny_cpu", *overrides)
    return first, last, folder / "reward_model.nemo"


BRIEF = [
    "trainer.reward_model.max_steps=40",
    "trainer.reward_model.val_check_interval=0",
    "trainer.reward_model.save_interval=0",
    "model.micro_batch_size=64",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_nemo):
    """The recipe itself. PPO learns from such a model in `test_pipeline_learns`."""
    return train(tmp_path_factory.mktemp("reward"), tiny_nemo)


def check_learned(before, after):
    assert before["val_optim/accuracy"] == 0.0  # a fresh head calls all pairs a tie
    assert after["val_optim/accuracy"] > 0.9
    assert after["val_optim/loss"] < 0.35


@pytest.mark.extended
@pytest.mark.parametrize("seed", [2, 3])
def test_a_preference_is_learned_from_other_seeds(tmp_path, tiny_nemo, seed):
    check_learned(*train(tmp_path, tiny_nemo, f"seed={seed}", *BRIEF)[:2])


def test_a_preference_is_learned_and_the_file_is_standardised(trained):
    """Of the very responses that it was measured on, mean 0 and deviation 1."""
    check_learned(*trained[:2])
    model = load_from_nemo(MegatronGPTRewardModel, restore_path=trained[2])
    assert model.sequence_form == SequenceForm(add_bos=False, end_id=byte_level_tokenizer().eos_id)
    rows = form_pairs(split="validation", size=128, seed=0, high=4, shots=1)
    encoder = SequenceEncoder(byte_level_tokenizer(), 256)
    chosen_and_rejected = [
        encoder.ids(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected")
    ]
    rewards = model.infer(encoder.collate(chosen_and_rejected))
    assert (rewards[0::2] > rewards[1::2]).float().mean() > 0.9
    torch.testing.assert_close(rewards.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(rewards.std(), torch.tensor(1.0), atol=1e-4, rtol=0)


def rated_rows(**arguments):
    """Form 1 or -1, and how long the answer is; one of the two is missing in every third row."""
    for index, row in enumerate(form_pairs(**arguments)):
        name = "chosen" if index % 2 else "rejected"
        ratings = {"form": 2.0 * (index % 2) - 1, "length": len(row[name]) - 2.5}
        if index % 3 == 0:
            ratings["form" if index % 2 else "length"] = None
        yield {"prompt": row["prompt"], "response": row[name], **ratings}


@pytest.mark.extended
def test_ratings_of_two_attributes_are_learned(tmp_path, tiny_nemo):
    before, after, path = train(
        tmp_path,
        tiny_nemo,
        f"data.train.source={__file__}:rated_rows",
        f"data.validation.source={__file__}:rated_rows",
        "data.attribute_columns=[form,length]",
        "trainer.reward_model.loss=regression",
        "trainer.reward_model.standardize_on=null",
        *BRIEF,
        "trainer.reward_model.max_epochs=6",
        "trainer.reward_model.max_steps=100",
        "model.optim.lr=4e-3",
    )
    assert after["val_optim/loss"] < before["val_optim/loss"] / 2
    model = load_from_nemo(MegatronGPTRewardModel, restore_path=path)
    assert model.attributes == ("form", "length")
    encoder = SequenceEncoder(byte_level_tokenizer(), 256)
    rows = list(rated_rows(split="validation", size=96, seed=0, high=4, shots=1))
    sequences = [encoder.ids(row["prompt"], row["response"]) for row in rows]
    ratings = model.infer(encoder.collate(sequences))
    assert ratings.shape == (96, 2)
    for column, name in enumerate(("form", "length")):
        rated = [number for number, row in enumerate(rows) if row[name] is not None]
        wanted = torch.tensor([float(rows[number][name]) for number in rated])
        assert torch.corrcoef(torch.stack((wanted, ratings[rated, column])))[0, 1] > 0.8


# What learns from it --------------------------------------------------------------------------


SERVER = [
    *("reward=server", "trainer.ppo.max_steps=2", "trainer.ppo.val_check_interval=0"),
    *("reward.function=aligner.rewards.regex_format:reward", 'reward.kwargs.pattern="[0-9].*"'),
]


def test_a_run_waits_for_a_killed_server_and_goes_on(tmp_path, tiny_nemo):
    """The server dies at the second request (validation was the first) and comes back."""
    restarted = []

    def restart():
        first.wait()
        time.sleep(1.0)
        restarted.append(subprocess.Popen([sys.executable, str(STUB), str(port), "digit"]))

    with bound_port() as port:
        command = [sys.executable, str(STUB), str(port), "digit", "1"]
        with started(command, r"^(\d+)$", cwd=ROOT, env={}) as (_, first):
            watcher = threading.Thread(target=restart, daemon=True)
            watcher.start()
            try:
                url = f"reward.server.url=http://127.0.0.1:{port}"
                lines = run(tmp_path, tiny_nemo, "ppo_tiny_cpu", *SERVER, url)
                assert len(restarted) == 1
            finally:
                for process in restarted:
                    process.kill()
                    process.wait(10)
    steps = [line for line in lines if "train_rollouts/rewards" in line]
    assert len(steps) == 2
    for step in steps:
        verified = step["train_rollouts/reward_parts/verified"]
        assert step["train_rollouts/rewards"] == pytest.approx(verified)
