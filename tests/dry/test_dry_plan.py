"""`plan`: what training configurations take, from their roles' real code on the dry device."""

import json
from pathlib import Path

import pytest
from hf_models import CASES, random_model
from variants import extended_except

GIB = 1 << 30
PHASE = {
    *("peak_bytes", "peak", "peak_at", "beside_bytes", "fits", "flops", "flops_by_dtype"),
    *("nvlink_bytes", "network_bytes", "host_bytes", "launches", "host_reads", "seconds"),
    *("tokens", "tokens_per_second", "mfu", "bound"),
}
PLAN = {
    *("device", "devices", "layout", "card_bytes", "margin", "fits", "peak_bytes", "fullest"),
    *("roles", "step_seconds", "tokens_per_second", "slowest", "bound"),
}
RUNS = {
    "train_gpt_ppo": {
        "policy": ["generate", "logprobs", "reference_logprobs", "train", "save"],
        "critic": ["values", "train", "save"],
    },
    "train_gpt_reinforce": {
        "policy": ["generate", "logprobs", "reference_logprobs", "train", "save"]
    },
    "train_gpt_rs": {"policy": ["generate", "train", "save"]},
    "train_gpt_sft": {"policy": ["train", "save"]},
    "train_gpt_dpo": {"policy": ["train", "save"]},
    "train_gpt_reward": {"reward model": ["train", "save"]},
    "train_gpt_distill": {"policy": ["train", "save"], "teacher": ["teacher"]},
}


def test_memory_of_a_known_model(dry):
    """18 bytes a parameter; activations come on top of 10 in the first update, 18 in the others."""
    first = dry("dry_plan:actor", recompute=None, first=True)
    later = dry("dry_plan:actor", recompute="full", first=False)
    assert first["parameters"] == later["parameters"] == 1_543_714_304
    assert first["static"] == pytest.approx(10 * first["parameters"], rel=1e-3)
    for moments_made in (first["after"], later["static"], later["after"]):
        assert moments_made == pytest.approx(18 * first["parameters"], rel=1e-3)
    assert first["peak"] / GIB == pytest.approx(32.1, rel=0.01)
    assert later["peak"] / GIB == pytest.approx(28.9, rel=0.04)
    # Recomputation is a forward pass more of the layers: 4 parts for 3.
    assert 1.2 < later["flops"]["bfloat16"] / first["flops"]["bfloat16"] < 4 / 3


def test_gloo_gathers_and_scatters_through_a_copy_of_the_whole(dry):
    """Seen of gloo on two ranks, torch 2.13; to reduce and to broadcast it makes none."""
    whole = {"gathered": 4096, "scattered": 4096, "gathered by DTensor": 4096}
    none = {"reduced": 0, "broadcast": 0}
    assert dry("dry_plan:beside_collectives", kind="cpu") == whole | none
    assert dry("dry_plan:beside_collectives", kind="cpu", world=1) == dict.fromkeys(whole | none, 0)
    assert dry("dry_plan:beside_collectives", kind="gpu") == dict.fromkeys(whole | none, 0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_norm_is_one_kernel_without_float32_copies(dry, requires_grad):
    forward, size, *backward = dry("dry_plan:norm", requires_grad=requires_grad)
    assert (forward, backward) == (1, [1] if requires_grad else [])
    assert 1 <= size < 1.05


@pytest.mark.extended
def test_a_loss_of_the_users_own_is_what_is_planned(dry):
    """It asks for no entropy, which takes kernels; else the policy's phases are the same."""
    own = str(Path(__file__).parents[2] / "examples" / "extend" / "my_loss.py") + ":ClippedLoss"
    built_in, planned = (
        dry("dry_plan:estimated", script="train_gpt_reinforce", **changes)["roles"]["policy"]
        for changes in ({}, {"model__ppo__loss": own})
    )
    assert planned["phases"].keys() == built_in["phases"].keys()
    assert planned["phases"]["train"]["launches"] < built_in["phases"]["train"]["launches"]
    assert planned["phases"]["generate"] == built_in["phases"]["generate"]


def test_steps_of_adam_take_no_memory(dry):
    """One kernel for a group of parameters; torch's other forms make tensors on the way."""
    found = dry("dry_plan:adam_step")
    assert found["taken"] <= 0.01 * found["moment"]
    assert found["kernels"] == 2 * found["groups"]  # and one that counts steps


PACKED = {"enabled": True, "train_mb_tokens": 256}
DEPTHS = {
    "one role": {"script": "train_gpt_sft"},
    "PPO": {},
    "PP": {"trainer__devices": 2, "model__pipeline_model_parallel_size": 2},
    "TP, DP, packed, recompute, offload": {
        "trainer__devices": 4,
        "model__tensor_model_parallel_size": 2,
        "model__sequence_parallel": True,
        "model__activations_checkpoint_granularity": "full",
        "model__sequence_packing": PACKED,
        "critic__offload_weights": True,
    },
    "DTensor": {"trainer__devices": 2, "policy__backend": "dtensor"},
    "dense layer first": {
        "script": "train_gpt_sft",
        "fields": {"num_moe_experts": 2, "layers_without_experts": (0,)},
    },
}


@pytest.mark.parametrize("case", extended_except(["one role"], DEPTHS))
def test_few_layers_give_many(dry, case):
    found = dry("dry_plan:depths", **DEPTHS[case])
    for role, (whole, few) in found.items():
        assert whole.keys() == few.keys()
        for name, value in whole.items():
            assert few[name] == pytest.approx(value, rel=1e-3, abs=1e-6), f"{role}: {name}"


@pytest.mark.extended
@pytest.mark.parametrize("script", ["train_gpt_sft", "train_gpt_reinforce"])
def test_a_model_that_only_transformers_builds_is_planned(dry, script):
    settings = {"model_type": "cohere", "num_hidden_layers": 2, "hidden_size": 64}
    settings |= {"intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 259}
    found = dry("dry_plan:estimated", script=script, settings=settings, policy__backend="dtensor")
    # An embedding, which is also the output layer, two layers, and norms without biases.
    parameters = 259 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 64) + 64
    assert found["roles"]["policy"]["parameters"] == parameters


# A case of each family that has a table of tensors, and is not one of the first seven.
FAMILIES = """
    smollm3 nemotron starcoder2 phi3 phi4_mini stablelm seed_oss arcee glm ernie4_5 helium glm4
    olmo2 granite gemma olmo3 gemma2 gemma3 qwen2_moe glm4_moe deepseek_v3 gpt_oss
"""


@pytest.mark.parametrize("backend", extended_except(["megatron"], ["megatron", "dtensor"]))
@pytest.mark.parametrize("case", extended_except(["smollm3"], FAMILIES.split()))
def test_a_directory_of_a_family_is_planned(dry, case, backend):
    """With more layers than are measured of equal layers."""
    model_type, changes = CASES[case]
    changes = {**changes, "num_hidden_layers": 5}
    changes.pop("layer_types", None)
    model = random_model(model_type, changes)
    found = dry(
        "dry_plan:estimated",
        script="train_gpt_reinforce",
        length=32,
        settings=json.loads(model.config.to_json_string()),
        policy__backend=backend,
    )
    parameters = model.num_parameters()
    if backend == "megatron":  # the biases of routers are buffers in transformers
        corrections = (b for name, b in model.named_buffers() if "e_score_correction" in name)
        parameters += sum(buffer.numel() for buffer in corrections)
    assert found["roles"]["policy"]["parameters"] == parameters


def test_float32_experts_with_a_buffer_are_planned(dry):
    """torch's function of shapes takes bfloat16 alone, and the router's correction is a buffer."""
    settings = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64}
    settings |= {"intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 259}
    settings |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    settings |= dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24)
    settings |= dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16)
    settings |= dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1)
    settings |= {"qk_rope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    found = dry(
        "dry_plan:estimated",
        script="train_gpt_sft",
        settings=settings,
        policy__backend="dtensor",
        trainer__precision="32",
    )
    # The embedding, the output layer and the routed experts alone.
    assert found["roles"]["policy"]["parameters"] > 2 * 259 * 64 + 4 * 3 * 64 * 32


EVERY_TIME = ("train_gpt_ppo", "train_gpt_sft", "train_gpt_distill")


@pytest.mark.parametrize("script", extended_except(EVERY_TIME, RUNS))
def test_every_run_has_its_phases(dry, script):
    found = dry("dry_plan:estimated", script=script)
    assert set(found) == PLAN
    assert {name: list(role["phases"]) for name, role in found["roles"].items()} == RUNS[script]
    assert found["fits"]
    for role in found["roles"].values():
        assert role["static_bytes"] == sum(role["static"].values())
        for name, phase in role["phases"].items():
            assert set(phase) == PHASE
            assert phase["peak_bytes"] >= phase["peak"]["weights"] > 0
            if name != "save":
                assert phase["flops"] > 0
                assert phase["seconds"] > 0
                assert phase["tokens"] > 0
                assert 0 < phase["mfu"] < 1
    assert found["step_seconds"] == pytest.approx(
        sum(
            phase["seconds"]
            for role in found["roles"].values()
            for name, phase in role["phases"].items()
            if name != "save"
        )
    )


def test_roles_on_one_card_stand_beside_each_other(dry):
    found = dry("dry_plan:estimated", script="train_gpt_ppo")["roles"]
    policy, critic = found["policy"], found["critic"]
    # The critic keeps all it has between its phases, and so does the policy; a reference stands
    # beside the policy's own weights.
    beside = {name: role["phases"]["train"]["beside_bytes"] for name, role in found.items()}
    assert beside["policy"] == pytest.approx(critic["static_bytes"], rel=1e-3)
    assert beside["critic"] == pytest.approx(policy["static_bytes"], rel=1e-3)
    assert policy["static"]["weights"] > 1.9 * critic["static"]["weights"]


def test_a_policy_that_waits_in_host_memory_leaves_the_card_to_the_critic(dry):
    """Neither its weights nor its reference's, gradients, float32 weights or moments are there."""
    stays = dry("dry_plan:estimated", script="train_gpt_ppo")["roles"]
    goes = dry("dry_plan:estimated", script="train_gpt_ppo", model__ppo__offload_weights=True)
    beside = goes["roles"]["critic"]["phases"]["train"]["beside_bytes"]
    assert beside < 0.01 * stays["policy"]["static_bytes"]
    peaks = [roles["policy"]["phases"]["train"]["peak_bytes"] for roles in (stays, goes["roles"])]
    assert peaks[1] <= peaks[0]  # its own phases take no more


@pytest.mark.extended
def test_variants_share_what_does_not_change(dry):
    """Shared or not, in parts or in one piece: the numbers are the same."""
    found = dry("dry_plan:shared", names=["plain", "recompute"])
    assert found["recompute"]["together"] == found["recompute"]["alone"]
    # Generation and scoring of the policy, values of the critic; updates of both, and their saves.
    assert [each["new"] for each in found.values()] == [4, 2]


@pytest.mark.extended
def test_variants_of_budgets_and_offload(dry):
    found = dry("dry_plan:shared", names=["plain", "budget", "moments", "offload"])
    assert found["offload"]["together"] == found["offload"]["alone"]
    assert [each["new"] for each in found.values()] == [4, 2, 2, 2]
    plain, away = (found[name]["together"]["roles"] for name in ("plain", "offload"))
    beside = [roles["policy"]["phases"]["train"]["beside_bytes"] for roles in (plain, away)]
    assert beside[1] < 0.5 * beside[0]
    # What leaves the card and comes back takes time.
    moved = [roles["critic"]["phases"]["train"]["host_bytes"] for roles in (plain, away)]
    assert moved[1] > moved[0] + plain["critic"]["static"]["weights"]


@pytest.mark.extended
def test_other_processes_measure_the_same(dry):
    first, second = dry("dry_plan:in_processes")
    assert first == second


def test_roles_of_fsdp_gather_and_reduce(dry):
    """Two ranks hold half of everything; each micro-batch gathers weights twice, and reduces."""
    found = dry(
        "dry_plan:estimated", script="train_gpt_sft", trainer__devices=2, policy__backend="dtensor"
    )["roles"]["policy"]
    parameters = found["parameters"]
    assert found["static_bytes"] == pytest.approx(16 * parameters / 2, rel=0.01)
    train = found["phases"]["train"]
    micro_batches = 2
    sent = (2 * 2 + 4) * parameters / 2
    assert train["nvlink_bytes"] == pytest.approx(micro_batches * sent, rel=0.02)
    assert train["peak"]["gradients"] >= 4 * parameters / 2


BOUNDS = {
    "one card": {},
    "two models": {"script": "train_gpt_distill"},
    "DTensor": {"policy__backend": "dtensor", "trainer__devices": 2},
    "CP": {
        "script": "train_gpt_sft",
        "trainer__devices": 2,
        "model__context_parallel_size": 2,
        "model__sequence_packing": PACKED,
    },
    "EP": {"trainer__devices": 2, "model__expert_model_parallel_size": 2},
    "PP, offload": {
        "trainer__devices": 2,
        "model__pipeline_model_parallel_size": 2,
        "critic__offload_weights": True,
        "model__ppo__offload_gradients": True,
    },
}


@pytest.mark.parametrize("case", extended_except(["one card"], BOUNDS))
def test_bounds_are_bounds(dry, case):
    arguments = {"script": "train_gpt_ppo", **BOUNDS[case]}
    for least, found in dry("dry_plan:bounded", **arguments).values():
        assert 0 < least <= found


@pytest.mark.extended
def test_seventy_billion_parameters_on_64_cards(dry):
    found = dry("dry_plan:seventy")
    assert found["devices"] == 64
    assert found["roles"]["policy"]["parameters"] == pytest.approx(70.6e9, rel=0.01)
    assert found["roles"]["policy"]["phases"]["train"]["flops"] > 1e15


def test_static_bytes_are_what_stays_between_steps(dry):
    """Of roles that wait in host memory neither weights nor gradients, which their phases have."""
    reward = {"restore_from_path": "t.nemo", "offload_weights": True}
    roles = dry(
        "dry_plan:estimated",
        script="train_gpt_ppo",
        critic__offload_weights=True,
        reward={"kind": "model", "model": reward},
    )["roles"]
    assert set(roles) == {"policy", "critic", "reward model"}
    for name in ("critic", "reward model"):
        assert not {"weights", "gradients"} & set(roles[name]["static"])
        assert all(phase["peak"]["weights"] > 0 for phase in roles[name]["phases"].values())
    assert roles["policy"]["static"]["weights"] > 0
    # Neither the float32 weights of the critic's optimizer nor its moments.
    whole = roles["critic"]["phases"]["train"]["peak"]["optimizer"]
    assert roles["critic"]["static"]["optimizer"] < 0.01 * whole


@pytest.mark.extended
def test_a_search_ends_in_what_fits(dry):
    found = dry("dry_plan:searched")
    assert found["plan"]["fits"]
    assert found["plan"]["devices"] == 2
    assert found["tried"] >= 1
    assert any(each.startswith("model.tensor_model_parallel_size=") for each in found["overrides"])


@pytest.mark.extended
def test_as_few_devices_as_it_takes(dry):
    assert dry("dry_plan:automatic", memory=1 << 30)["least"] == 1
    found = dry("dry_plan:automatic", memory=8 << 20)
    assert found["least"] > 1
    assert found["worth"] >= found["least"]
