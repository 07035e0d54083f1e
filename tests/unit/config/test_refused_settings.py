"""Every bad key or value is refused with its full dotted name and a remedy."""

import math
import sys

import pytest
import toy_kind
from settings import parsed, rows_of, tree

from aligner.config import (
    DistillRunConfig,
    DPORunConfig,
    EvaluateConfig,
    GenerateConfig,
    RSRunConfig,
    RunConfig,
    SFTRunConfig,
    parse_config,
)
from aligner.config.fields import MOST_SECONDS
from aligner.config.parse import arms_of, build, keys_below
from aligner.errors import ConfigError

RAY = "cluster.engine=ray trainer.devices=2"
OWN = "critic.tensor_model_parallel_size=2"
DTENSOR = "policy.backend=dtensor"
TP2 = "model.tensor_model_parallel_size=2"
LORA = "model.peft.peft_scheme=lora"
TUNING = f"{LORA} model.peft.lora_tuning"
CORRECTION = "model.ppo.correction"
WEIGHTS = f"{CORRECTION}.weights"
PACKED, DYNAMIC = "model.sequence_packing", "model.dynamic_batching"
PAIRED = f"{PACKED}.enabled=true data.max_length=21 {PACKED}"
BACKBONE = "reward.kind=model reward.model.restore_from_path=r.nemo reward.model"
GROUPS = "model.ppo.num_rollouts_per_prompt=4"
VLLM = f"generation.backend=vllm generation.vllm.python={sys.executable} cluster.engine=ray"
AHEAD = f"generation.async_rollouts=true {VLLM}"
GAME = "reward.kind=environment reward.function= environment.factory=a.b:Game"
AGENT = "reward.kind=environment reward.function= environment.kind=endpoint"
KEPT = "model.ppo.record_kept_tokens=8 model.ppo.sampling_params.top_p=0.8"
TOP_K = "model.ppo.sampling_params.top_k"
# In each row: settings | words of the message | ...
REFUSED = {
    RunConfig: rf"""
# Keys and kinds of values.
model.ppo.ratio_epss=0.1 | model.ppo.ratio_epss | Did you mean model.ppo.ratio_eps?
sead=1 | sead: unknown key | Did you mean seed?
trainer.precision=fp8 | trainer.precision | 32, bf16 | fp8
trainer.max_time=4h | trainer.max_time=4h: expected DD:HH:MM:SS
trainer.max_time='00:00:99:99' | trainer.max_time=00:00:99:99: expected DD:HH:MM:SS
trainer.max_time='99999999999999999999:00:00:00' | expected DD:HH:MM:SS
trainer.ppo.gae_lambda=1.5 | trainer.ppo.gae_lambda | between 0 and 1 | 1.5
model.optim.lr=0 | model.optim.lr | greater than 0
model.micro_batch_size=2.5 | model.micro_batch_size | an integer
seed=null | seed | an integer, got null
model.optim.betas=[1.0,1.0] | betas[0]: must be between 0 and 1 (exclusive)
model.ppo.ratio_eps=[0.1,0.2,0.3] | model.ppo.ratio_eps | list of 2
model.ppo=3 | model.ppo | expected a group of keys
# Workers and layouts.
cluster.address=a:1 | cluster.address=a:1 | local | cluster.engine=ray
{RAY} cluster.value_workers=2 | value_workers=2 | cluster.colocated=false
{RAY} cluster.value_workers=3 cluster.colocated=false {TP2} | value_workers=3 | multiple | Use 4
{DTENSOR} model.pipeline_model_parallel_size=2 trainer.devices=2
    | model.pipeline_model_parallel_size=2 | {DTENSOR} | =1, or
{DTENSOR} {TP2} model.sequence_parallel=true trainer.devices=2
    | model.sequence_parallel=true | Set model.sequence_parallel=false
{DTENSOR} model.context_parallel_size=2 trainer.devices=2
    | tensor_model_parallel_size | granularity=full | or policy.backend=megatron
{DTENSOR} model.num_layers_in_last_pipeline_stage=2 | stage=2 | policy.backend=megatron
{DTENSOR} model.freeze_moe_router=true | freeze_moe_router=true | policy.backend=megatron
generation.backend=vllm | cluster.engine=local cannot start vLLM's workers
generation.async_rollouts=true | generation.async_rollouts=true needs an engine | vllm
# The critic's layout.
trainer.devices=2 {OWN} | {OWN}: with cluster.engine=local | engine=ray
cluster.engine=ray {OWN} | trainer.devices x trainer.num_nodes=1 is not a multiple of
    | = 2, the critic's layout. Use 2
{RAY} {OWN} cluster.colocated=false cluster.value_workers=3
    | cluster.value_workers=3 is not a multiple of | the critic's layout. Use 4
{RAY} critic.context_parallel_size=2 {DTENSOR}
    | critic.context_parallel_size=2: {DTENSOR} | backend=megatron
{RAY} {OWN} {BACKBONE}.share_body_with_critic=true
    | share_body_with_critic=true needs a critic in the policy's layout
# Sizes of batches.
{PACKED}.enabled=true {DYNAMIC}.enabled=true | {PACKED}.enabled | {DYNAMIC}.enabled | exclude
{PACKED}.enabled=true {PACKED}.train_mb_tokens=1001 model.context_parallel_size=2 trainer.devices=2
    | {PACKED}.train_mb_tokens=1001 | multiple of 4 | 1000 or 1004
{DYNAMIC}.enabled=true {DYNAMIC}.logprob_mb_tokens=64 model.ppo.length_params.max_length=60
    data.max_prompt_length=10 | {DYNAMIC}.logprob_mb_tokens=64 | max_length=60 | at least 70
model.ppo.num_rollout_samples=127 | num_rollout_samples=127 is not a multiple
model.ppo.num_rollout_samples=96 model.global_batch_size=64
    | num_rollout_samples=96 | model.global_batch_size=64 | 64 or 128
critic.global_batch_size=48 | critic.global_batch_size=48 | 48 or 96
model.ppo.num_rollouts_per_prompt=7 | num_rollouts_per_prompt=7 | 63 or 70
model.micro_batch_size=24 | model.micro_batch_size=24 | 48 or 72
model.ppo.num_rollout_samples=1000000000 | must be between 1 and 1e+06, got 10
# Algorithm.
model.ppo.length_params.min_length=65 | min_length=65 | max_length=64
critic=null trainer.ppo.advantage.estimator=grpo {GROUPS}
    | trainer.ppo.normalize_advantages=true | estimator=grpo | Set it to false
trainer.ppo.kl_controller.mode=adaptive trainer.ppo.initial_policy_kl_penalty=0
    | kl_controller.mode=adaptive | initial_policy_kl_penalty=0 | fixed
model.ppo.kl_loss.coef=0.1 model.ppo.kl_loss.estimator=k1 | kl_loss.estimator=k1 | k2 | k3
trainer.ppo.dynamic_sampling.enabled=true {GROUPS} model.optim.sched.name=cosine
    | model.optim.sched.name=cosine | max_epochs | Set model.optim.sched.max_steps
model.ppo.loss_kwargs.weight=2 | loss_kwargs= | model.ppo.loss is null
exp_manager.resume_changed=[model.ppo.lss] | resume_changed: 'model.ppo.lss'
validation.samples_per_prompt=2 validation.use_greedy=true | samples_per_prompt=2 with
# Recorded tokens.
model.ppo.record_kept_tokens=8 | tokens=8: top_k=0 and top_p=1 keep all
{KEPT} {TOP_K}=9 | record_kept_tokens=8 is below | top_k=9 | Set it to 9
{KEPT} {VLLM} | record_kept_tokens=8 with | vllm: | but {TOP_K}=0
{KEPT} {VLLM} {TOP_K}=8 validation.top_k=0 | but validation.top_k=0. Set top_k
{KEPT} {VLLM} {TOP_K}=8 model.ppo.sampling_params.use_greedy=true
    | use_greedy=true as top_k=1 | Set use_greedy=false
# Corrections.
{CORRECTION}.weight=token | correction.weight | Did you mean | weights
{WEIGHTS}=token {CORRECTION}.bounds=[2,0.5] | bounds=[2,0.5] | low <= 1
{WEIGHTS}=token {CORRECTION}.bounds=[0.5,0.9] | [0.5,0.9] excludes 1
{CORRECTION}.geometric_bounds=[1.1,2] | geometric_bounds=[1.1,2]
{CORRECTION}.bounds=[0.5,5] | bounds=[0.5,5] needs weights
{CORRECTION}.outside=mask | outside=mask needs weights
{WEIGHTS}=token model.ppo.truncated_importance_sampling=2
    | sampling=2 means model.ppo.correction.weights=token | Leave one
{WEIGHTS}=token model.ppo.ratio_level=sequence
    | weights=token with model.ppo.ratio_level=sequence | weights=sequence
{WEIGHTS}=token {CORRECTION}.old_logprobs=sampler
    | old_logprobs=sampler | model.ppo.correction.weights=token has no effect
{CORRECTION}.old_logprobs=sampler model.ppo.truncated_importance_sampling=2
    | model.ppo.truncated_importance_sampling=2 has no effect
{CORRECTION}.old_logprobs=sampler {CORRECTION}.second_moment=0.04
    | second_moment=0.04 needs | Set model.ppo.correction.old_logprobs=trainer
# Adapters.
model.peft.restore_from_path=a | peft_scheme is null. Set it to lora
{TUNING}.target_modules=[] | no weight would be trained
{LORA} model.fp8=e4m3 | model.fp8=e4m3 | adapters | Set model.fp8=null
{LORA} model.layer_spec=transformer_engine | model.layer_spec=transf | =auto
{LORA} model.overlap_grad_reduce=true model.overlap_param_gather=true
    | model.overlap_param_gather=true | =lora | gather=false
model.overlap_param_gather=true | Set model.overlap_grad_reduce=true too
{TUNING}.adapter_dropout=0.1 model.activations_checkpoint_granularity=full
    | adapter_dropout=0.1: | Set it to 0
{LORA} {DTENSOR} {TP2} trainer.devices=2 | size=2: | not split adapters | Set it to 1
{TUNING}.adapter_dropout=0.1 {DTENSOR} | dtensor | Set it to 0
# Conversations.
reward.kind=environment reward.function= | reward=environment and environment.factory=my_game
{GAME} reward.function=a.b:f | reward.function=a.b:f scores single responses
{GAME} environment.max_tokens=64 | leaves no room for a prompt before a response of
{GAME} data.max_prompt_length=9 | max_prompt_length=9: the environment provides
{GAME} trainer.ppo.reward.shift=1 | would reward the number of turns
{GAME} trainer.ppo.reward.overlong_cache=1 | applies to single responses
{GAME} trainer.ppo.advantage.credit=turn | turn needs an estimator that compares groups
{GAME} critic=null trainer.ppo.advantage.estimator=rloo trainer.ppo.normalize_advantages=false
    {GROUPS} trainer.ppo.timestep=turn | timestep=turn works only with gae
{GAME} environment.memory_mb=63 | must be between 64 and
{GAME} environment.max_turns=0 | must be between 1 and 1000
{GAME} {AHEAD} | needs a correction
{GAME} environment.kind={toy_kind.__file__}:Toy | a toy has one turn
{GAME} environment.kind=mesages | environment.kind: must be one of | mean messages
{GAME} environment.kind=no.such:Kind | environment.kind='no.such:Kind'
trainer.ppo.timestep=turn | trainer.ppo.timestep=turn needs conversations
trainer.ppo.advantage.credit=turn | trainer.ppo.advantage.credit=turn needs conversations
# Agents.
{AGENT} | kind=endpoint needs an agent
{AGENT} environment.command=a environment.factory=b.py:c | environment.factory=b.py:c
{AGENT} environment.command='' | is empty. Set a program
{AGENT} environment.command="a\x20'b" | No closing quotation. Write it as a list of words
{AGENT} environment.kind=messages environment.command=a | Set environment.kind=endpoint
{AGENT} environment.command=a environment.rewritten_history=keep | rewritten_history=fork
{AGENT} environment.command=a {AHEAD} {WEIGHTS}=token
    | agents get no answers during training
{AGENT} environment.command=a reward.kind=function reward.function=a.b:f | or neither
{AGENT} environment.command=[1] | expected a string, got 1
""",
    RSRunConfig: "environment.factory=a.b:Game | reward=environment and environment.factory",
    DPORunConfig: rf"""
trainer.dpo.distance=square | distance=square is an option of rpo
trainer.dpo.loss=kto trainer.dpo.sft_weight=1 | is an option of dpo, ipo, rpo, simpo
trainer.dpo.loss=ipo trainer.dpo.target_margin=2 | is an option of simpo
trainer.dpo.loss=simpo trainer.dpo.average_logprobs=true | of dpo, ipo, rpo, but
trainer.dpo.desirable_weight=2 | desirable_weight=2.0 is an option of kto
trainer.dpo.label_smoothing=0.5 | between 0 and 0.5 (exclusive), got 0.5
model.micro_batch_size=3 model.global_batch_size=6
    | model.micro_batch_size=3 counts rows | 2 or 4
model.global_batch_size=9 | model.global_batch_size=9 counts rows | 8 or 10
{PAIRED}.train_mb_tokens=41 | Raise it to at least 42, or lower data.max_len
{DYNAMIC}.enabled=true {DYNAMIC}.train_mb_tokens=40 data.max_length=21
    {DYNAMIC}.sequence_length_round=8 | Raise it to at least 48
data.chosen_reward_column=good | data.rejected_reward_column=None | Set both or
""",
    DistillRunConfig: """
trainer.distill.mixed_weight=0.3 | mixed_weight=0.3 needs kl=mixed
trainer.distill.mixed_weight=1.5 trainer.distill.kl=mixed | between 0 and 1
trainer.distill.on_policy=true data.messages_column=chat | messages_column=chat contains answers
model.distill.length_params.max_length=2 model.distill.length_params.min_length=3
    | model.distill.length_params.min_length=3 exceeds
""",
}


@pytest.mark.parametrize(
    ("root", "row"),
    [(root, row) for root, table in REFUSED.items() for row in rows_of(table)],
    ids=lambda value: value[0] if isinstance(value, list) else value.__name__,
)
def test_refusals_name_key_value_and_remedy(root, row):
    settings, *words = row
    with pytest.raises(ConfigError) as caught:
        parsed(settings, root)
    for word in words:
        assert word in str(caught.value)


def test_settings_at_the_limits_are_accepted():
    parsed(f"{PAIRED}.train_mb_tokens=42", DPORunConfig)
    parsed(f"{PAIRED}.train_mb_tokens=24 trainer.dpo.loss=kto", DPORunConfig)
    sizes = "trainer.dpo.loss=kto model.micro_batch_size=3 model.global_batch_size=9"
    parsed(sizes, DPORunConfig)
    parsed("exp_manager.resume_changed=[model.ppo.loss]")
    parsed(f"{GAME} {AHEAD} {WEIGHTS}=token")
    parsed(f"{GAME} environment.max_turns=3")
    parsed("data.validation.source=v.jsonl validation.temperature=0.5")
    parsed(f"{KEPT} {VLLM} {TOP_K}=8")
    greedy = "validation.top_k=0 validation.use_greedy=true data.validation.source=v.jsonl"
    parsed(f"{KEPT} {VLLM} {TOP_K}=8 {greedy}")


def test_all_bad_values_and_all_broken_rules_are_named_at_once():
    values = tree("seed=x model.optim.lrr=1 model.ppo.ratio_eps=[0.1] critic.optim=3")
    values["data"]["train"]["source"] = "???"
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    title, *messages = str(caught.value).splitlines()
    assert title == "5 settings cannot be used:"
    assert [message.split(": ")[0] for message in messages] == [
        *("- data.train.source", "- model.optim.lrr", "- model.ppo.ratio_eps"),
        *("- seed", "- critic.optim"),
    ]
    assert "Did you mean model.optim.lr?" in messages[1]
    assert "a list of 2 values, got [0.1]" in messages[2]
    broken = [
        "model.ppo.length_params.min_length=9",
        "trainer.ppo.advantage.batch_baseline=true",
        "trainer.ppo.reward.overlong_cache=9",
        "cluster.address=a:1",
        "validation.temperature=0.5",
    ]
    with pytest.raises(ConfigError) as caught:
        parsed(" ".join([*broken, "model.ppo.length_params.max_length=8"]))
    title, *messages = str(caught.value).splitlines()
    assert title == "5 settings cannot be used:"
    for message, setting in zip(messages, broken, strict=True):
        assert message.startswith(f"- {setting}")


def test_required_groups():
    for missing in ("model", "reward", "data"):
        values = {key: value for key, value in tree().items() if key != missing}
        with pytest.raises(ConfigError, match=f"{missing}: required"):
            parse_config(values)


def test_every_number_is_finite():
    numbers = {key: hint for key, hint in keys_below(RunConfig) if float in arms_of(hint)}
    assert len(numbers) > 30
    for key, hint in numbers.items():
        for value in (math.inf, -math.inf, math.nan, 10**400, "1e999", ""):
            with pytest.raises(ConfigError, match=rf"^{key}: .*(finite|number)"):
                build(hint, value, key)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 2**64, "must fit 64 bits"),
        ("seed", 1e300, "must fit 64 bits"),
        ("trainer.ppo.max_steps", 10**400, "must fit 64 bits"),
        ("cluster.timeout_s", 1e300, r"must be between 0 and 2e\+06"),
        ("reward.time_limit_s", 2 * MOST_SECONDS, "must be"),
        ("reward.max_concurrency", 0, "must be at least 1"),
        ("reward.attribute_weights", [1.0, math.inf], "must be a finite"),
        # Of several kinds the message is about the kind that was meant.
        ("model.ppo.ratio_eps", "x", "expected a number, got 'x' .*, or expected a list"),
        ("model.ppo.ratio_eps", 1.5, r"must be between 0 and 1, got 1\.5 \(float\)$"),
        ("model.ppo.ratio_eps", [2, 0.1], "must be between 0 and 1, got 2 "),
        ("model.ppo.ratio_eps", ["x", 0.1], r"expected a number, got 'x' \(str\)$"),
        ("model.ppo.ratio_eps", [], r"expected a list of 2 values, got \[\] \(list\)$"),
        ("data.train.source", ["d.jsonl", 3], r"expected a string, got 3 \(int\)$"),
        ("trainer.callbacks", [{"kwargs": {}}], "required and not set"),
        ("trainer.callbacks", [{"calback": "a:B"}], r"unknown key. Did you mean .*\]\.callback\?"),
        ("validation.sets", {"a": {"source": ""}}, "empty"),
        ("validation.top_p", 0.0, "must be"),
    ],
)
def test_invalid_values(key, value, message):
    with pytest.raises(ConfigError, match=rf"^{key}(\[\d\])?[.\w]*: {message}") as refusal:
        parsed({key: value})
    assert len(str(refusal.value)) < 400


PATHS = {
    RunConfig: "model.restore_from_path model.tokenizer model.peft.restore_from_path "
    "critic.restore_from_path exp_manager.explicit_log_dir generation.vllm.python "
    "data.train.source reward.function reward.server.url reward.server.token_file",
    GenerateConfig: "output model.restore_from_path data.prompts.source",
    EvaluateConfig: "output final_answer",
    DistillRunConfig: "teacher.restore_from_path",
}


@pytest.mark.parametrize("root", PATHS)
def test_paths_are_not_empty(root):
    types = dict(keys_below(root))
    for key in PATHS[root].split():
        for blank in ("", " "):
            with pytest.raises(ConfigError, match=rf"^{key}: empty, got '{blank}' \(str\). Give "):
                build(types[key], blank, key)
    with pytest.raises(ConfigError, match=r"^data.train.source\[1\]: empty"):
        parsed({"data.train.source": ["a.jsonl", ""]})


UNREAD = [
    (RunConfig, f"{GAME} environment.max_tokens=400", "data.chat=true"),
    (RunConfig, f"{GAME} environment.max_tokens=400", "reward.kwargs.a=1"),
    (RunConfig, "", "environment.max_turns=3"),
    (RunConfig, "", "environment.kwargs.a=1"),
    (RunConfig, "", "validation.temperature=0.5"),
    (RunConfig, "", "generation.vllm.kwargs.a=3"),
    (RunConfig, "", "model.ppo.kl_loss.estimator=k2"),
    (RunConfig, "", "trainer.ppo.improper_end.penalty=3.0"),
    (RunConfig, "", "model.peft.lora_tuning.adapter_dim=4"),
    (SFTRunConfig, "data.messages_column=m", "data.response_column=r"),
    (DPORunConfig, "", "model.peft.lora_tuning.alpha=4.0"),
]


@pytest.mark.parametrize(("root", "others", "setting"), UNREAD)
def test_an_option_that_nothing_reads_is_refused(root, others, setting):
    parsed(others, root)
    with pytest.raises(ConfigError, match="This run ignores it") as refusal:
        parsed(f"{others} {setting}", root)
    assert setting.split("=")[0].removesuffix(".a") in str(refusal.value)
