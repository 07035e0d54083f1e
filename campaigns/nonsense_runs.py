"""Settings that are nonsense, in real runs of one step: learned, or refused by name."""

from campaigns.harness import PPO, Campaign, run

_LORA = "model.peft.peft_scheme=lora"
_ADAPTIVE = "trainer.ppo.kl_controller.mode=adaptive"
_PACKING = "model.sequence_packing.enabled=true"
_CASES = (
    *("model.optim.lr=inf", "model.optim.lr=1e300", "model.optim.betas=[1.0,1.0]"),
    *("model.optim.betas=[0.0,0.0]", "model.optim.eps=0", "model.optim.sched.min_lr=inf"),
    *("model.optim.sched.warmup_steps=1e18", "trainer.ppo.reward.scale=nan"),
    *("trainer.ppo.reward.clip=1e-320", "trainer.ppo.gradient_clip_val=1e-320"),
    f"trainer.ppo.kl_controller.target=1e-320 {_ADAPTIVE}",
    *("trainer.ppo.max_steps=0", "trainer.ppo.max_epochs=1e18 trainer.ppo.max_steps=1"),
    *("trainer.ppo.save_interval=" + "9" * 300, "exp_manager.save_top_k=1e18"),
    *("exp_manager.samples_per_step=1e18", "exp_manager.monitor=val_rollout/acuracy"),
    *("exp_manager.monitor=''", "seed=1e300", "seed=18446744073709551616"),
    *("seed=9223372036854775807", "model.ppo.sampling_params.temperature=1e-320"),
    *("model.ppo.sampling_params.temperature=1e30", "model.ppo.sampling_params.top_k=1e18"),
    *("model.ppo.sampling_params.top_p=1e-320", "model.ppo.sampling_params.end_strings=['']"),
    *("model.ppo.length_params.max_length=1e18", "model.ppo.rollout_micro_batch_size=1e18"),
    *("model.ppo.forward_micro_batch_size=1e18", "model.ppo.num_rollout_samples=1e9"),
    *("model.ppo.truncated_importance_sampling=1e-320", "model.ppo.ratio_eps=0"),
    *("model.micro_batch_size=1e18", "critic.value_clip=0", "critic.restore_from_path=nope.nemo"),
    *("model.tokenizer=/dev/null", "model.restore_from_path=/dev/zero"),
    *("model.restore_from_path=/", "data.train.limit=1", "data.max_prompt_length=1"),
    *("data.prompt_column=''", "data.train.source=/dev/zero", "data.train.source=os:getcwd"),
    *("data.train.source=aligner.errors:AlignerError", "data.train.source=[]", "data.chat=true"),
    *("reward.function=os:abort", "reward.function=:", "reward.function=a:b:c"),
    *("reward.function=builtins:print", "reward.function=subprocess:run"),
    *("reward.kwargs={}", "reward.time_limit_s=1e-9", "reward.time_limit_s=inf"),
    *("reward.max_concurrency=1000", f"{_LORA} model.peft.lora_tuning.adapter_dim=1e9"),
    *(f"{_LORA} model.peft.lora_tuning.target_modules=[]",),
    *(f"{_LORA} model.peft.restore_from_path=nope", "trainer.max_time=00:00:00:00"),
    *("trainer.max_time=00:00:99:99", "trainer.precision=bf16", "cluster.timeout_s=inf"),
    *("cluster.timeout_s=1e-9", f"{_PACKING} model.sequence_packing.train_mb_tokens=1"),
    *("model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=3"),
    *("model.context_parallel_size=2", "model.expert_model_parallel_size=2"),
    *("trainer.num_nodes=2", "trainer.ppo.limit_val_prompts=1e18"),
    *("trainer.ppo.critic_warmup_steps=1e18", "trainer.ppo.reward.overlong_cache=1e18"),
    *("model.ppo.num_rollouts_per_prompt=8",),
    *("exp_manager.explicit_log_dir=/dev/null", "exp_manager.explicit_log_dir=/proc/x"),
    "exp_manager.explicit_log_dir=" + "a" * 300,
)


def run_campaign(campaign: Campaign) -> None:
    """Run as many cases as there is time for."""
    for number, case in enumerate(campaign.while_time(_CASES)):
        folder = campaign.fresh(f"run_{number}")
        log_dir = [] if "explicit_log_dir" in case else [f"exp_manager.explicit_log_dir={folder}"]
        arguments = [*PPO, *log_dir, *case.split(" ")]
        outcome = run(campaign, "train_gpt_ppo", arguments, timeout_s=40, memory_gib=12)
        good = outcome.is_clean
        campaign.record(case[:90], good, f"{outcome.verdict}: {outcome.last}")
