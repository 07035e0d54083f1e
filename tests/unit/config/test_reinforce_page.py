"""Every row of the table in docs/reinforce.md, as it is written, is the algorithm it names."""

import re
from pathlib import Path

import pytest
from recipes import ROOT, composed

from aligner.config import RunConfig, load_config

PAGE = (ROOT / "docs" / "reinforce.md").read_text()
ROWS = dict(re.findall(r"^\| (.+?) \| `(trainer\.[^`]+)` \|$", PAGE, re.MULTILINE))

GRPO = {"estimator": "grpo"}
DAPO = {**GRPO, "clip": (0.2, 0.28), "dynamic_sampling": True}
# What each is by its paper; what is not named here is as in NOTHING_ELSE.
PAPERS = {
    "REINFORCE (Williams, 1992)": {"estimator": "reinforce"},
    "REINFORCE with a baseline": {"estimator": "reinforce", "batch_baseline": True},
    "RLOO (Ahmadian et al., 2024)": {"estimator": "rloo", "kl_in_reward": "k1"},
    "GRPO (Shao et al., 2024)": {**GRPO, "aggregation": "sequence_mean", "kl_in_loss": "k3"},
    "Dr. GRPO (Liu et al., 2025)": {"estimator": "dr_grpo", "aggregation": "fixed_length"},
    "REINFORCE++ (Hu et al., 2025)": {"estimator": "reinforce_plus_plus", "kl_in_reward": "k1"},
    "REINFORCE++-baseline (Hu et al., 2025)": {
        **{"estimator": "reinforce_plus_plus_baseline", "kl_in_loss": "k2"}
    },
    "DAPO (Yu et al., 2025)": {**DAPO, "overlong": 16},
    "DAPO with overlong filtering instead": {**DAPO, "improper_end": "mask"},
    "GSPO (Zheng et al., 2025)": {
        **GRPO,
        **{"level": "sequence", "aggregation": "sequence_mean", "clip": (3e-4, 4e-4)},
    },
    "CISPO (MiniMax, 2025)": {**GRPO, "surrogate": "cispo", "clip": (1.0, 4.0)},
}
NOTHING_ELSE = {
    **{"batch_baseline": False, "kl_in_reward": None, "kl_in_loss": None, "level": "token"},
    **{"aggregation": "token_mean", "clip": (0.2, 0.2), "surrogate": "clip", "overlong": None},
    **{"dynamic_sampling": False, "improper_end": "keep", "whitened": False, "discount": 1.0},
    **{"dual_clip": None, "entropy_bonus": 0.0},
}
# Name and directory of the runs, in the order of the page.
RUNS = [
    *("REINFORCE: reinforce", "REINFORCE: reinforce", "RLOO: rloo", "GRPO: grpo"),
    *("Dr. GRPO: dr_grpo", "REINFORCE++: reinforce_plus_plus"),
    "REINFORCE++ with a baseline: reinforce_plus_plus_baseline",
    *("DAPO: dapo", "DAPO: dapo", "GSPO: gspo", "CISPO: cispo"),
]
NEEDED = ["model.restore_from_path=m.nemo", "reward.function=a.b", "data.train.source=x.jsonl"]


def test_the_page_has_every_algorithm():
    assert ROWS.keys() == PAPERS.keys()


@pytest.mark.parametrize(("name", "run"), zip(PAPERS, RUNS, strict=True))
def test_a_row_is_its_algorithm(name, run):
    config = load_config(composed("gpt_reinforce", *NEEDED, *ROWS[name].split()), RunConfig)
    trainer, ppo = config.trainer.ppo, config.model.ppo
    assert f"{config.algorithm}: {Path(config.exp_manager.explicit_log_dir).name}" == run
    assert {**NOTHING_ELSE, **PAPERS[name]} == {
        "estimator": trainer.advantage.estimator,
        "batch_baseline": trainer.advantage.batch_baseline,
        "kl_in_reward": trainer.kl_estimator if trainer.initial_policy_kl_penalty else None,
        "kl_in_loss": ppo.kl_loss.estimator if ppo.kl_loss.coef else None,
        "aggregation": ppo.loss_aggregation,
        "clip": ppo.ratio_eps_range,
        "level": ppo.ratio_level,
        "surrogate": ppo.surrogate,
        "dynamic_sampling": trainer.dynamic_sampling.enabled,
        "overlong": trainer.reward.overlong_cache,
        "improper_end": trainer.improper_end.mode,
        "whitened": trainer.normalize_advantages,
        "discount": trainer.discount_factor,
        "dual_clip": ppo.dual_clip,
        "entropy_bonus": ppo.entropy_bonus,
    }
