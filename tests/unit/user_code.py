"""A user's module in the current directory, and a configuration that can name what is in it."""

import sys

from aligner.config import parse_config


def directory_with(tmp_path, monkeypatch, module, text):
    """Body of a fixture: the current directory, with a module."""
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop(module, None)


def configured(critic=False, **overrides):
    values = {
        "model": {"restore_from_path": "m.nemo", "ppo": {"num_rollouts_per_prompt": 2}},
        "reward": {"function": "a.b:reward"},
        "data": {"train": {"source": "train.jsonl"}},
        "trainer": {"ppo": {"initial_policy_kl_penalty": 0.0, "normalize_advantages": False}},
        **({} if critic else {"critic": None}),
    }
    overrides = {"trainer__ppo__advantage__estimator": "gae" if critic else "rloo", **overrides}
    for key, value in overrides.items():
        *path, last = key.split("__")
        level = values
        for name in path:
            level = level.setdefault(name, {})
        level[last] = value
    return parse_config(values)
