"""The tiny recipe with vLLM's rollouts learns as it does with its own.

Measured by the reward of training rollouts (a token that begins with a digit), not by the numbers:
the two engines draw different random numbers.
"""

import pytest
from runs import train
from test_engine_kills import AHEAD, VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
LONG = [
    *("trainer.ppo.max_steps=30", "trainer.ppo.val_check_interval=0"),
    *("trainer.ppo.save_interval=10", "model.ppo.num_rollout_samples=64"),
    *("model.global_batch_size=64", "model.micro_batch_size=32"),
    *("critic.global_batch_size=64", "critic.micro_batch_size=32"),
    *("data.train.arguments.size=2048", "data.validation.arguments.size=64"),
]


@pytest.fixture(scope="module")
def own_engine(tmp_path_factory, fresh_nemo):
    return train(tmp_path_factory.mktemp("own") / "run", fresh_nemo, *LONG)[0]


@pytest.mark.parametrize("ahead", [[], AHEAD], ids=["in step", "one step ahead"])
def test_it_learns_as_with_its_own_rollouts(ahead, tmp_path, fresh_nemo, own_engine, ray):
    records = train(tmp_path / "run", fresh_nemo, *VLLM, *ahead, *LONG)[0]
    first, last = records[0], records[-1]
    assert first["val_rollouts/accuracy"] < 0.15
    assert last["val_rollouts/accuracy"] >= 0.9
    assert own_engine[-1]["val_rollouts/accuracy"] >= 0.9
    gaps = [record["sampler/logprob_gap_mean"] for record in records[1:]]
    if ahead:  # the sampler is an update behind, and the loss corrects for it
        assert max(gaps) > 1e-3
        assert all("train_optim/importance_weight" in record for record in records[1:])
    else:
        assert max(gaps) < 1e-3
