"""Two processes have the rollouts of one over agents that ask rank 0."""

import pytest
from ranks import run_ranks
from recipes import ROOT, settings

from aligner.observe.metrics import read_metrics

SCRIPT = ROOT / "examples" / "train_gpt_ppo.py"
AGENT = ROOT / "tests" / "unit" / "user_agents.py"


@pytest.mark.extended
def test_two_processes(tmp_path, tiny_nemo):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"name": "{n}"}}\n' for n in range(4)))

    def run(ranks):
        folder = tmp_path / str(ranks)
        arguments = [
            *("--config-name", "gpt_ppo", "reward=environment", "environment.kind=endpoint"),
            *(*settings(folder, tiny_nemo), f"environment.factory={AGENT}:graded"),
            *("environment.max_tokens=200", f"data.train.source={tmp_path / 'rows.jsonl'}"),
            *(f"trainer.devices={ranks}", "trainer.ppo.max_steps=2"),
            *("model.ppo.length_params.max_length=6", "model.ppo.num_rollout_samples=4"),
            *("model.global_batch_size=4", "model.micro_batch_size=2"),
            *("critic.global_batch_size=4", "critic.micro_batch_size=2"),
        ]
        run_ranks(SCRIPT, ranks, arguments, 200)
        lines = read_metrics(folder / "metrics.jsonl")
        return [line for line in lines if "train_rollouts/rewards" in line]

    one, two = run(1), run(2)
    assert len(one) == len(two) >= 1
    for key in ("turns", "rewards", "generation_length"):
        assert one[0][f"train_rollouts/{key}"] == two[0][f"train_rollouts/{key}"]
    assert two[0]["train_rollouts/turns"] == 2
