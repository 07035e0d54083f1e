"""Runs that are ended at any moment and continued, against one that was left alone.

SIGKILL goes to the whole group. SIGTERM to the group, or only to the first process, and the run
must then save and end by itself.

The moments are spread evenly over the time of a run, not only over its saves. Where the steps are
short (everything that scores with a function, and games) a slow reward or game makes them last.
"""

import signal
import time
from dataclasses import dataclass

from aligner.examples.tasks.tiny_model import write_tiny_nemo
from campaigns.harness import TINY, Campaign, Run, learned

_KILLS = 3
_TEACHER = "{campaign}/teacher.nemo"


@dataclass(frozen=True)
class _Case:
    name: str
    script: str
    recipe: str
    section: str
    steps: int
    settings: tuple[str, ...] = ()


_SLOW = ("reward.function=campaigns.slow_reward:reward", "++reward.kwargs.seconds=0.2")
_GAME = "ppo_tiny_guessing_cpu"
_SLOW_GAME = (
    *("environment.factory=campaigns.slow_game:SlowGame", "+environment.kwargs.seconds=0.05"),
    *("model.ppo.num_rollout_samples=16", "model.global_batch_size=16"),
    *("model.micro_batch_size=8", "critic.global_batch_size=16", "critic.micro_batch_size=8"),
)
_GROUPS = ("model.ppo.num_rollouts_per_prompt=4",)
_LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4")
_ADAPTIVE = (
    *("trainer.ppo.kl_controller.mode=adaptive", "trainer.ppo.kl_controller.horizon=200"),
    *("trainer.ppo.initial_policy_kl_penalty=0.05", "model.ppo.ppo_epochs=2"),
    *("model.optim.sched.name=linear", "trainer.ppo.critic_warmup_steps=2"),
)
_PAIR = (
    *("trainer.devices=2", "model.micro_batch_size=8", "critic.micro_batch_size=8"),
    *("model.ppo.rollout_micro_batch_size=16",),
)
_CASES = (
    _Case("ppo", "ppo", "ppo_tiny_cpu", "ppo", 6, _SLOW),
    _Case("ppo_adaptive", "ppo", "ppo_tiny_cpu", "ppo", 6, (*_SLOW, *_ADAPTIVE)),
    _Case("ppo_lora", "ppo", "ppo_tiny_cpu", "ppo", 6, (*_SLOW, *_LORA)),
    _Case("ppo_two_ranks", "ppo", "ppo_tiny_cpu", "ppo", 6, (*_SLOW, *_PAIR)),
    _Case("conversations", "ppo", _GAME, "ppo", 6, _SLOW_GAME),
    _Case("conversations_two_ranks", "ppo", _GAME, "ppo", 6, (*_SLOW_GAME, *_PAIR)),
    _Case("rloo", "reinforce", "rloo_tiny_cpu", "ppo", 6, (*_SLOW, *_GROUPS)),
    _Case("grpo", "reinforce", "grpo_tiny_cpu", "ppo", 6, (*_SLOW, *_GROUPS)),
    _Case("rs", "rs", "rs_tiny_cpu", "rs", 6, _SLOW),
    _Case("sft", "sft", "sft_tiny_cpu", "sft", 60),
    _Case("sft_lora", "sft", "sft_tiny_cpu", "sft", 50, _LORA),
    _Case("reward", "reward", "reward_tiny_cpu", "reward_model", 50),
    _Case("dpo", "dpo", "dpo_tiny_cpu", "dpo", 25),
    _Case("dpo_lora", "dpo", "dpo_tiny_cpu", "dpo", 25, _LORA),
    _Case("kto", "dpo", "kto_tiny_cpu", "dpo", 25),
    _Case(
        "distill",
        "distill",
        "distill_tiny_cpu",
        "distill",
        25,
        (f"teacher.restore_from_path={_TEACHER}",),
    ),
)
# Name, signal, whether the whole group gets it.
_WAYS = (
    ("KILL", signal.SIGKILL, True),
    ("TERM", signal.SIGTERM, True),
    ("TERM to one", signal.SIGTERM, False),
)


def run_campaign(campaign: Campaign) -> None:
    """Run each case once without interruptions, and once with interruptions."""
    write_tiny_nemo(campaign.folder / "teacher.nemo", seed=1, hidden_size=128, scale=0.06)
    for case in campaign.while_time(_CASES):
        script = f"train_gpt_{case.script}"
        alone, cut = campaign.fresh(f"{case.name}_alone"), campaign.fresh(f"{case.name}_cut")

        def arguments(folder: object, case: _Case = case) -> list[str]:
            return [
                *("--config-name", f"recipes/{case.recipe}"),
                *(f"model.restore_from_path={TINY}", f"exp_manager.explicit_log_dir={folder}"),
                *("exp_manager.create_tensorboard_logger=false",),
                *(f"trainer.{case.section}.max_steps={case.steps}",),
                *(f"trainer.{case.section}.save_interval={max(2, case.steps // 12)}",),
                *(f"trainer.{case.section}.val_check_interval={max(3, case.steps // 3)}",),
                "data.validation.arguments.size=16",
                *(setting.format(campaign=campaign.folder) for setting in case.settings),
            ]

        uninterrupted = Run(
            script, arguments(alone), log=campaign.folder / f"{case.name}.log"
        ).finish(240)
        if uninterrupted.status:
            campaign.record(
                case.name, False, f"left alone: {uninterrupted.verdict}: {uninterrupted.last}"
            )
            continue
        moments = []
        for number in range(1, _KILLS + 1):
            log = campaign.folder / f"{case.name}_cut_{number}.log"
            life = Run(script, arguments(cut), log=log)
            end = time.monotonic() + campaign.rng.uniform(0.3, uninterrupted.seconds * 0.8)
            while not life.poll() and time.monotonic() < end:
                time.sleep(0.005)
            how, ending, whole_group = campaign.rng.choice(_WAYS)
            life.send(ending, whole_group)
            outcome = life.finish(60)
            metrics = cut / "metrics.jsonl"
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            moments.append(f"{how} {outcome.seconds:.1f} s, line {lines}")
            if outcome.survivors or outcome.timed_out or outcome.verdict == "TRACEBACK":
                note = f"{outcome.verdict}, {len(outcome.survivors)} processes left; {outcome.last}"
                campaign.record(f"{case.name} {how}", False, note)
        last = Run(script, arguments(cut), log=campaign.folder / f"{case.name}_last.log")
        outcome = last.finish(240)
        if outcome.status:
            campaign.record(case.name, False, f"ended at {moments}; then {outcome.last}")
            continue
        equal = [x == y for x, y in zip(learned(alone), learned(cut), strict=True)]
        note = f"ended at {moments} of {uninterrupted.seconds:.1f} s; "
        note += f"metrics, samples, weights {equal}"
        campaign.record(case.name, all(equal), note)
