"""`plan` before anything runs dry: its command line, its table of devices, its arithmetic."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from documented import ROOT
from recipes import CONF
from settings import parsed

from aligner.algorithms.run.run import Run
from aligner.algorithms.supervised.build import load_split
from aligner.config.commands.changes import overrides_of
from aligner.config.commands.lengths import longest_lengths
from aligner.config.run import DistillRunConfig, RunConfig, SFTRunConfig
from aligner.data.supervised import ExampleDataset, collate_examples
from aligner.errors import AlignerError, ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.policy.lm_policy import Policy
from aligner_plan import rehearsal
from aligner_plan.amounts import Amounts, Measured, extrapolated, time_of, total
from aligner_plan.command import read_architecture
from aligner_plan.devices import (
    ARITHMETIC_REACHED,
    DEVICES,
    KERNEL_SECONDS,
    LAUNCH_SECONDS,
    MEMORY_REACHED,
    WIRE_REACHED,
    device_named,
)
from aligner_plan.dry.record import Collective, Kernel, Kind, Record
from aligner_plan.estimate import Estimator
from aligner_plan.layouts import batch_sizes, layouts
from aligner_plan.measure import depths_of
from aligner_plan.options import PlanConfig, plan_request, varied
from aligner_plan.search import advice, fastest

H100 = DEVICES["h100-80g"]
RECIPE = ["--config-name", "recipes/ppo_qwen2.5_1.5b_gsm8k_1n8g_megatron"]


@pytest.mark.parametrize(
    ("arguments", "root"),
    [
        (RECIPE, RunConfig),
        (["--config-name=recipes/sft_tiny_cpu"], SFTRunConfig),
        (["-cn", "gpt_distill"], DistillRunConfig),
        ([], RunConfig),
    ],
)
def test_the_script_of_a_configuration(arguments, root):
    assert plan_request(arguments, CONF).root is root


def test_keys_of_plan_are_taken_off():
    settings = ["plan.devices=64", "seed=3", "plan.json=true", "plan.architecture=my/config.json"]
    request = plan_request([*RECIPE, *settings], CONF)
    assert (request.plan.devices, request.plan.json) == (64, True)
    assert request.arguments == (
        *RECIPE,
        "seed=3",
        'model.restore_from_path="my/config.json"',
        "trainer.devices=8",
        "trainer.num_nodes=8",
    )


def test_data_and_rewards_need_not_be_given_where_no_recipe_gives_them():
    given = plan_request(["model.restore_from_path=m.nemo"], CONF).arguments
    keys = {each.partition("=")[0] for each in given[1:]}
    assert keys == {"data.train.source", "reward.function"}
    kept = plan_request(["reward.function=a:b", "data.train.source=t.jsonl"], CONF).arguments
    assert kept == ("reward.function=a:b", "data.train.source=t.jsonl")


def test_an_architecture_with_a_byte_order_mark(tmp_path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 4, "vocab_size": 64, "model_type": "llama"}
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + json.dumps(sizes).encode())
    plain, marked = (read_architecture(str(tmp_path / name)) for name in ("plain", "marked"))
    assert plain == marked
    assert plain.num_layers == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RECIPE, "plan.device_s=8"], "device"),
        ([*RECIPE, "plan.devices=0"], "plan.devices"),
        ([*RECIPE, "plan.devices=12"], "8 or 16"),
        ([*RECIPE, "plan.margin=0.9"], "plan.margin"),
        ([*RECIPE, "plan.device=[h200"], "plan.device"),
        ([*RECIPE, "plan.length=0"], "plan.length"),
        (["--config-name", "gpt_evaluate"], "not a training configuration"),
        (["--config-name", "gpt_generate"], "not a training configuration"),
        (["--config-name", "recipes/nothing"], "not a training configuration"),
    ],
)
def test_bad_values_and_other_configurations_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        plan_request(arguments, CONF)


def test_an_unknown_device_is_corrected():
    with pytest.raises(ConfigError, match=r"plan.device=H100-80: .*did you mean h100-80g\?"):
        device_named("H100-80")
    assert device_named("h200").memory_bytes > device_named("h100-80g").memory_bytes


def test_a_shape_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.architecture=.*config\.json"):
        read_architecture(str(tmp_path / "config.json"))
    for text in ("{", "[]", '{"model_type": "gpt5"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(AlignerError):
            read_architecture(str(tmp_path))


def config_of(settings=""):
    return parsed(settings, SFTRunConfig)


def test_changes_are_a_configuration_that_is_checked():
    config = config_of()
    changed = varied(config, {"model.micro_batch_size": None, "model.global_batch_size": 12})
    assert (changed.model.micro_batch_size, changed.model.global_batch_size) == (6, 12)
    with pytest.raises(ConfigError, match="micro_batch_size"):
        varied(config, {"model.micro_batch_size": 0})
    words = overrides_of({"a.b": None, "c": True, "d": False, "e": 3})
    assert words == ["a.b=null", "c=true", "d=false", "e=3"]


def test_the_longest_sequences():
    assert longest_lengths(config_of(), length=99) == (0, 99)
    packing = "model.sequence_packing.enabled=true model.sequence_packing.train_mb_tokens=777"
    packed = config_of(packing)
    assert longest_lengths(packed) == (0, 777)
    assert longest_lengths(packed, read=50) == (0, 50)
    assert longest_lengths(packed, 64) == (0, 64)
    # A prompt leaves room for the response.
    config = parsed()
    assert longest_lengths(config, length=6) == (512, 6)
    assert longest_lengths(config, 256, length=6) == (250, 6)
    assert longest_lengths(config, 256, length=6, read=40) == (40, 6)
    with pytest.raises(ConfigError, match=r"plan\.length"):
        longest_lengths(config, 6, length=6)


def layouts_of(settings="", shape=None, length=2048):
    """Sizes of the layouts of a search over 8 devices: (tensor, pipeline, context, expert)."""
    config = config_of(f"trainer.devices=8 trainer.precision=bf16 {settings}")
    shape = shape or replace(TINY_ARCHITECTURE, max_position_embeddings=1 << 17)
    estimator = Estimator(PlanConfig(length=length), H100, {"m.nemo": shape})
    axes = ("tensor_model", "pipeline_model", "context", "expert_model")
    keys = [f"model.{axis}_parallel_size" for axis in axes]
    found = layouts(estimator, config)
    bounds = [layout.least_seconds for layout in found]
    assert bounds == sorted(bounds)
    return {tuple(layout.changes.get(key, 1) for key in keys) for layout in found}


def test_layouts_of_a_search_are_those_that_work():
    """Four query groups are shared out over four ranks at most, four layers over four stages."""
    assert (TINY_ARCHITECTURE.num_query_groups, TINY_ARCHITECTURE.num_layers) == (4, 4)
    sizes = [(tensor, stages) for tensor in (1, 2, 4) for stages in (1, 2, 4)]
    assert layouts_of() == {(*each, 1, 1) for each in sizes if each != (4, 4)}  # 8 devices


def test_long_sequences_and_experts_are_shared_out():
    packing = "model.sequence_packing.enabled=true model.sequence_packing.train_mb_tokens=16384"
    found = layouts_of(packing, length=16384)
    assert {context for _, _, context, _ in found} == {1, 2, 4}
    shape = replace(TINY_ARCHITECTURE, num_moe_experts=4, moe_ffn_hidden_size=32, family="mixtral")
    found = layouts_of(shape=shape)
    assert {expert for *_, expert in found} == {1, 2, 4}
    assert {tensor for tensor, *_ in found} == {1, 2, 4}
    assert layouts_of("policy.backend=dtensor") == {(tensor, 1, 1, 1) for tensor in (1, 2, 4)}


@pytest.mark.parametrize(("backend", "depths"), [("megatron", [2, 4]), ("dtensor", [4, 5])])
def test_more_layers_are_measured_where_fsdp_gathers_ahead(backend, depths):
    shape = replace(TINY_ARCHITECTURE, num_layers=12)
    config = parsed(f"policy.backend={backend}", RunConfig)
    run = rehearsal.planned_run(config, PlanConfig(length=96), {"m.nemo": shape})
    assert [depths_of(run.roles[name]) for name in ("policy", "critic")] == [depths, depths]


@pytest.mark.extended
def test_estimates_of_published_runs_are_as_near_as_promised():
    command = [sys.executable, "-m", "benchmarks.plan_published"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sizes_of_micro_batches():
    estimator = Estimator(PlanConfig(length=96), H100, {"m.nemo": TINY_ARCHITECTURE})
    config = config_of("model.global_batch_size=16")
    (layout, *_) = layouts(estimator, config)
    sizes = batch_sizes(estimator, config, layout)
    assert [each["model.micro_batch_size"] for each in sizes] == [8, 4, 2, 1]
    budget = "model.dynamic_batching.enabled=true model.dynamic_batching.train_mb_tokens=400"
    config = config_of(f"model.global_batch_size=16 {budget}")
    sizes = batch_sizes(estimator, config, layout)
    assert [each["model.dynamic_batching.train_mb_tokens"] for each in sizes] == [400, 200, 100]
    assert {each["model.dynamic_batching.logprob_mb_tokens"] for each in sizes} == {400}


def test_what_is_counted_is_linear():
    """Two depths give any other; the place of the peak may be another one."""

    def measured(layers):
        kernel = Kernel(torch.bfloat16, 1000, 10)
        record = Record(kernels=Counter({kernel: 3 + 2 * layers}))
        record.saw_collective("allreduce_", (0, 1), 100 * layers)
        peaks = {
            "early": {Kind.ACTIVATIONS: 50.0},
            "late": {Kind.ACTIVATIONS: 10.0 * layers, Kind.WEIGHTS: 2.0},
        }
        return Measured(Amounts.of(record), peaks, {Kind.WEIGHTS: 2.0 * layers})

    found, true = extrapolated({1: measured(1), 2: measured(2)}, 28), measured(28)
    assert found.amounts.kernels == true.amounts.kernels
    assert found.amounts.wires == true.amounts.wires
    assert (found.peaks, found.remaining) == (true.peaks, true.remaining)
    assert measured(2).peak_at == "early"
    assert found.peak_at == "late"
    assert total(found.peaks["late"]) == 282.0


def test_arithmetic_and_memory_of_kernels_are_added():
    second = int(ARITHMETIC_REACHED * H100.low_precision)
    computing = Amounts({Kernel(torch.bfloat16, second, 1): 2.0})
    assert time_of(computing, H100).arithmetic == pytest.approx(2.0)
    assert time_of(computing, H100).bound == "arithmetic"
    moving = Amounts({Kernel(torch.float32, 0, int(MEMORY_REACHED * H100.memory)): 3.0})
    assert time_of(moving, H100).total == pytest.approx(3.0)
    both = Amounts({Kernel(torch.bfloat16, second, int(MEMORY_REACHED * H100.memory)): 1.0})
    assert time_of(both, H100).total == pytest.approx(2.0)
    attention = Amounts({Kernel(torch.bfloat16, second, 0, is_attention=True): 1.0})
    expected = ARITHMETIC_REACHED / H100.attention
    assert time_of(attention, H100).arithmetic == pytest.approx(expected)


def test_small_kernels_take_the_time_of_their_launches():
    kernels = {Kernel(torch.float32, 0, 4): 1000.0}
    time = time_of(Amounts(kernels, counters={"launches": 1000.0}), H100)
    assert (time.total, time.bound) == (pytest.approx(1000 * LAUNCH_SECONDS), "launches")
    graph = Amounts(kernels, counters={"launches": 1.0})
    assert time_of(graph, H100).total == pytest.approx(1000 * KERNEL_SECONDS)


def test_collectives_that_overlap_take_what_is_longer_than_the_kernels():
    second = int(ARITHMETIC_REACHED * H100.low_precision)
    kernels = {Kernel(torch.bfloat16, second, 0): 2.0}
    size = 8 / 7 * WIRE_REACHED * H100.nvlink  # of a gathered result: a second
    for overlaps, gathered, expected in ((False, 1, 1.0), (True, 1, 0.0), (True, 5, 3.0)):
        key = Collective("_allgather_base_", tuple(range(8)), overlaps)
        found = time_of(Amounts(kernels, wires={key: gathered * size}), H100)
        assert (found.nvlink, found.arithmetic) == pytest.approx((expected, 2.0), abs=1e-6)


def test_members_of_one_node_share_its_network_cards():
    """All eight cards of a node carry a ring of eight of its members; one carries a pair."""
    for ranks, cards in ((range(16), 8), ((0, 8), 1), ((0, 1, 8, 9), 2)):
        key = Collective("allreduce_", tuple(ranks))
        rate = WIRE_REACHED * min(H100.nvlink, cards * H100.network)
        found = time_of(Amounts(wires={key: 1e9}), H100).network
        assert found == pytest.approx(key.wire_bytes(1) * 1e9 / rate)


def test_a_ring_sends_what_it_must_over_the_wires_there_are():
    within = Collective("_allgather_base_", tuple(range(8)))
    across = Collective("allreduce_", (0, 8))
    assert within.wire_bytes(800) == 700.0
    assert across.wire_bytes(800) == 800.0
    assert Collective("allreduce_", (0,)).wire_bytes(800) == 0.0
    amounts = Amounts(wires={within: 800.0, across: 800.0})
    assert amounts.wire_bytes(H100) == (700.0, 800.0)
    expected = 800 / (WIRE_REACHED * H100.network)
    assert time_of(amounts, H100).network == pytest.approx(expected, abs=1e-9)


def test_an_algorithm_is_planned_by_its_own_loop(monkeypatch):
    """A trainer that only this test knows: its roles, and its calls in their order."""

    class Trainer:
        def __init__(self, policy, judge, batch):
            self.policy, self.judge, self.batch = policy, judge, batch
            self.roles = {"policy": policy}

        def step(self, step, timers):
            self.judge.prepare_for_lp_inference()
            self.batch["ref_logprobs"] = self.judge.get_logprobs(self.batch)["logprobs"]
            self.judge.finish_inference()
            self.policy.prepare_for_training()
            self.policy.train(self.batch, NegativeLogLikelihoodLoss())
            self.policy.finish_training()

    def train(config):
        with Run.open(config) as run:
            examples, _ = load_split(run, ExampleDataset)
            rows = [examples.train[row] for row in range(run.config.model.global_batch_size)]
            batch = collate_examples(rows, run.tokenizer.pad_id)
            for attempt in run.attempts():
                with attempt as workers:
                    frozen = {"init_optimizer": False, "init_reference_model": False}
                    clusters, model = workers.clusters, run.config.model
                    judge = Policy(clusters.policy, model, run.tokenizer, "judge", **frozen)
                    trainer = Trainer(workers.start_policy(1), workers.own(judge), batch)
                    with workers.loop(trainer, 1, None) as loop:
                        loop.run()

    monkeypatch.setattr(rehearsal, "imported", lambda path: train)
    config = config_of("model.global_batch_size=6 model.micro_batch_size=2")
    run = rehearsal.planned_run(config, PlanConfig(length=96), {"m.nemo": TINY_ARCHITECTURE})
    assert run.step == (("judge", "logprobs"), ("policy", "train"), ("policy", "save"))
    learns = {name: role.learns for name, role in run.roles.items()}
    assert learns == {"judge": False, "policy": True}
    (scores,) = run.roles["judge"].phases
    assert (scores.rows, scores.length, run.roles["judge"].micro_batch_size(scores)) == (6, 96, 2)
    learned, save = run.roles["policy"].phases
    assert (learned.rows, learned.times, learned.is_update, save.method) == (6, 1, True, "")
    batch = learned.batch(3)
    assert batch["input_lengths"].tolist() == [96, 96, 96]
    assert batch["ref_logprobs"].shape == batch["token_mask"].shape == (3, 96)


class FakeEstimator:
    """Estimates by a function of the configuration: (GiB, seconds of a step)."""

    def __init__(self, cost):
        self.cost, self.usable_bytes = cost, 80 << 30
        self.device = H100

    def architecture(self, config):
        return TINY_ARCHITECTURE

    def longest(self, config):
        return 64

    def lower_bounds(self, config):
        return SimpleNamespace(card_bytes=0.0, step_seconds=0.0)

    def estimate(self, config):
        gib, seconds = self.cost(config)
        fits, size = gib <= 80, gib << 30
        return SimpleNamespace(config=config, fits=fits, peak_bytes=size, step_seconds=seconds)


def advised(cost, **trainer):
    config, estimator = config_of({"trainer": {"devices": 8, **trainer}}), FakeEstimator(cost)
    found = advice(estimator, estimator.estimate(config))
    return [overrides_of(each.changes) for each in found]


def test_advice_names_bf16():
    def cost(config):
        return (90, 2.0) if config.trainer.precision == "32" else (60, 1.0)

    assert advised(cost) == [["trainer.precision=bf16"]]
    assert advised(lambda config: (60, cost(config)[1])) == [["trainer.precision=bf16"]]
    assert advised(cost, precision="bf16") == []


@pytest.mark.parametrize(("gib", "size"), [(150, 2), (300, 4), (600, 8)])
def test_advice_names_the_smallest_tensor_parallel_size_that_fits(gib, size):
    tried = []

    def cost(config):
        tried.append(config.model.tensor_model_parallel_size)
        return gib // tried[-1], 1.0

    expected = [f"model.tensor_model_parallel_size={size}", "model.sequence_parallel=true"]
    assert advised(cost, precision="bf16") == [expected]
    assert max(tried) == size
    assert advised(lambda config: (60, 1.0), precision="bf16") == []


@pytest.mark.parametrize("gib", [30, 50])
def test_advice_saves_memory_if_the_run_needs_half_of_a_card(gib):
    def cost(config):
        if config.model.activations_checkpoint_granularity == "full":
            return 20, 1.5
        return gib, 0.9 if config.trainer.precision == "bf16" else 1.0

    changes = [["trainer.precision=bf16"], ["model.activations_checkpoint_granularity=full"]]
    assert advised(cost) == changes[: 2 if gib == 50 else 1]


def test_advice_prefers_fewer_changes_of_nearly_equal_times():
    def cost(config):
        if config.model.tensor_model_parallel_size > 1:
            return 60, 1.0
        if config.model.activations_checkpoint_granularity == "selective":
            return 60, 1.04
        return (60, 1.2) if config.model.micro_batch_size == 4 else (90, 1.0)

    found = advised(cost, precision="bf16")
    assert found[0] == ["model.activations_checkpoint_granularity=selective"]
    assert found[1][0] == "model.tensor_model_parallel_size=2"
    assert found[2] == ["model.micro_batch_size=4"]


@pytest.mark.parametrize(("seconds", "tensor"), [(1.04, 4), (1.06, 2)])
def test_a_search_prefers_fewer_changes_of_nearly_equal_times(seconds, tensor):
    """Two ranks of tensor parallelism fit with recomputation, four without."""

    def cost(config):
        size = config.model.tensor_model_parallel_size
        if config.model.pipeline_model_parallel_size > 1 or size == 1:
            return 90, 2.0
        if size == 2:
            fits = config.model.activations_checkpoint_granularity == "selective"
            return (60 if fits else 90), 1.0
        return 60, seconds

    config = config_of("model.micro_batch_size=1 trainer.devices=8")
    found = fastest(FakeEstimator(cost), config)
    assert f"model.tensor_model_parallel_size={tensor}" in found.overrides
