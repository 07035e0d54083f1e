"""A reward model elsewhere, on Ray, gives the rewards it gives beside the policy."""

import pytest
import torch
from runs import ON_RAY, train

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights

pytestmark = [pytest.mark.ray, pytest.mark.ray_heavy, pytest.mark.timeout(1200)]


@pytest.fixture
def reward_nemo(tmp_path):
    """A reward model that nobody trained; its scores differ from one response to the next."""
    weights = random_weights(TINY_ARCHITECTURE, seed=5)
    head = torch.randn(1, TINY_ARCHITECTURE.hidden_size, generator=torch.Generator().manual_seed(6))
    weights |= {"rm_head.weight": head, "rm_head.bias": torch.zeros(1)}
    path = tmp_path / "reward_model.nemo"
    save_nemo(path, weights, TINY_ARCHITECTURE, byte_level_tokenizer().files())
    return path


@pytest.mark.parametrize(
    ("place", "roles"),
    [
        ("reward.model.workers=1", {"policy", "value", "reward"}),
        ("reward.model.share_body_with_critic=true", {"policy", "value"}),
    ],
    ids=["workers of its own", "the critic's body"],
)
def test_gives_the_local_runs_numbers(tmp_path, tiny_nemo, reward_nemo, ray, place, roles):
    reward = ["reward=model", f"reward.model.restore_from_path={reward_nemo}"]
    steps = "trainer.ppo.max_steps=2"
    local = train(tmp_path / "local", tiny_nemo, *reward, steps)
    on_ray = train(tmp_path / "ray", tiny_nemo, *reward, steps, ON_RAY, place)
    assert local[0][1]["train_rollouts/rewards_std"] > 0.1  # there was something to compare
    assert on_ray == local
    logs = [path.name for path in (tmp_path / "ray" / "workers").iterdir()]
    assert len(logs) == len(roles)
    assert all(any(role in name for name in logs) for role in roles)
