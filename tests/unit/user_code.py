"""A user's module in the current directory, and a configuration that can name what is in it."""

import sys

from settings import parsed


def directory_with(tmp_path, monkeypatch, module, text):
    """Body of a fixture: the current directory, with a module."""
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop(module, None)


def configured(critic=False, **overrides):
    """A configuration of PPO or RLOO. Keys of ``overrides`` have "__" between their parts."""
    settings = {
        "model.ppo.num_rollouts_per_prompt": 2,
        "trainer.ppo.initial_policy_kl_penalty": 0.0,
        "trainer.ppo.normalize_advantages": False,
        "trainer.ppo.advantage.estimator": "gae" if critic else "rloo",
        **({} if critic else {"critic": None}),
    }
    return parsed(settings | {key.replace("__", "."): each for key, each in overrides.items()})
