"""Runs that are continued with another configuration: what defines a run may not change."""

import shutil

from campaigns.harness import PPO, Campaign, run

_STEPS = "trainer.ppo.max_steps=2"
# Overrides, and whether the run goes on with them.
_CHANGES = {
    **dict.fromkeys(
        (
            *("model.micro_batch_size=4", "critic.micro_batch_size=4", "model.optim.lr=1e-4"),
            *("exp_manager.samples_per_step=2", "trainer.ppo.save_interval=1"),
            *("model.ppo.num_rollout_samples=16", "reward.time_limit_s=30"),
            "trainer.devices=2 model.micro_batch_size=4 critic.micro_batch_size=4",
        ),
        True,
    ),
    **dict.fromkeys(
        (
            *("seed=7", "data.shuffle=false", "data.train.arguments.size=32"),
            *("model.ppo.ratio_eps=0.3", "trainer.ppo.discount_factor=0.5"),
            *("trainer.ppo.gae_lambda=0.5", "trainer.ppo.initial_policy_kl_penalty=0.5"),
            *("model.ppo.length_params.max_length=3", "model.ppo.sampling_params.temperature=0.5"),
            *("reward.kwargs.pattern='[a-z].*'", "data.train.arguments.shots=2"),
            *("data.train.arguments.high=9", "model.optim.weight_decay=0.5", "critic.value_clip=9"),
        ),
        False,
    ),
}


def run_campaign(campaign: Campaign) -> None:
    """Run one step, then resume copies with one changed key each."""
    base = campaign.fresh("base")
    first = run(campaign, "train_gpt_ppo", [*PPO, f"exp_manager.explicit_log_dir={base}"])
    campaign.record("the first step", first.status == 0, first.last)
    if first.status:
        return
    for change, may in campaign.while_time(list(_CHANGES.items())):
        folder = campaign.fresh("changed")
        shutil.copytree(base, folder)
        log_dir = f"exp_manager.explicit_log_dir={folder}"
        outcome = run(
            campaign, "train_gpt_ppo", [*PPO, log_dir, _STEPS, *change.split()], timeout_s=120
        )
        key = change.partition("=")[0]
        good = outcome.verdict == ("ok" if may else "refused") and (may or key in outcome.output)
        campaign.record(change, good, f"{outcome.verdict}: {outcome.last}")
        if may or not good:
            continue
        accepted = f"exp_manager.resume_changed=[{key}]"
        outcome = run(
            campaign, "train_gpt_ppo", [*PPO, log_dir, _STEPS, change, accepted], timeout_s=120
        )
        note = f"{outcome.verdict}: {outcome.last}"
        campaign.record(f"{change}, accepted", outcome.verdict == "ok", note)
