"""``dry_run=true``: the longest batch goes through the real step, and nothing is left behind."""

import re
import tempfile
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import recipes
import torch
from newest_state import snapshot

from aligner.algorithms.run.dry_run import MadeUpRewards, dry_config, fullest, longest_set
from aligner.algorithms.run.engine import Workers
from aligner.config import load_config
from aligner.data.batches import Mixture
from aligner.data.supervised import Example, ExampleDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.device.accelerator import MemoryUse, is_out_of_memory
from aligner.device.host_memory import private_memory, reset_peak_resident
from aligner.distributed.batched_data_dict import BatchedDataDict as Batch
from aligner.errors import ConfigError, DataError, DeviceMemoryError, WorkerError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.models.policy.lm_policy import Policy
from aligner.models.reward.reward_model import RewardModel
from aligner.models.value.lm_value import Value

pytestmark = pytest.mark.integration

GIB = 1 << 30
# recipe: settings, tokens of the longest sequence
RUNS = {
    # A warm-up of the critic is left out.
    "ppo_tiny_cpu": (["data.max_prompt_length=40", "trainer.ppo.critic_warmup_steps=3"], 44),
    "grpo_tiny_cpu": (["data.max_prompt_length=9999"], 256),
    "rs_tiny_cpu": (["data.max_prompt_length=40"], 44),
    "sft_tiny_cpu": (["data.max_length=100"], 100),
    "dpo_tiny_cpu": (["data.max_length=9999"], 256),
    "kto_tiny_cpu": (["data.max_length=64"], 64),
    "reward_tiny_cpu": (["data.max_length=80"], 80),
    "distill_tiny_cpu": (["data.max_length=30", "model.distill.length_params.max_length=5"], 35),
}


def config_of(recipe, nemo, folder, *overrides):
    tree = recipes.composed(recipe, *recipes.settings(folder, nemo), *overrides)
    return load_config(tree, recipes.algorithm_of(recipe).root_class)


@pytest.fixture
def dry_run(tmp_path, tiny_nemo):
    """Make a dry run of a recipe in the folder ``run``, which stays absent."""

    def run(recipe, *settings):
        options = ["dry_run=true", "model.optim.lr=1e-3", *settings]
        try:
            recipes.run(tmp_path / "run", tiny_nemo, recipe, *options)
        finally:
            assert not (tmp_path / "run").exists()
        return config_of(recipe, tiny_nemo, tmp_path / "run", *options)

    return run


@pytest.fixture
def seen(monkeypatch):
    """(Role, method): tokens and lengths of the rows of every call; method: what calls return."""
    calls = {}

    def watch(cls, name):
        original = getattr(cls, name)

        def method(self, data, *args, **kwargs):
            batch = {key: data[key].clone() for key in ("input_ids", "input_lengths")}
            calls.setdefault((cls.__name__, name), []).append(batch)
            found = original(self, data, *args, **kwargs)
            calls.setdefault(name, []).append(found)
            return found

        monkeypatch.setattr(cls, name, method)

    for cls in (Policy, Value, RewardModel):
        watch(cls, "train")
    watch(Policy, "generate")
    watch(RewardModel, "get_rewards")
    return calls


def drawn_lengths(seen):
    return {n for found in seen["generate"] for n in found["generation_lengths"].tolist()}


@pytest.mark.parametrize("recipe", RUNS)
def test_the_longest_batch_and_nothing_else(
    tmp_path, dry_run, teacher, seen, recipe, monkeypatch, capsys
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of this test alone
    settings, longest = RUNS[recipe]
    if recipe.startswith("distill"):
        on_policy = ["trainer.distill.on_policy=true", f"teacher.restore_from_path={teacher}"]
        settings = [*settings, *on_policy]
    config = dry_run(recipe, *settings)
    assert list(tmp_path.glob("work/*")) == []
    assert list(tmp_path.glob("aligner-dry-run-*")) == []
    trained = {key: batches for key, batches in seen.items() if key[1:] == ("train",)}
    roles = {"reward_tiny_cpu": {"RewardModel"}, "ppo_tiny_cpu": {"Policy", "Value"}}
    assert {role for role, _ in trained} == roles.get(recipe, {"Policy"})
    for calls in trained.values():
        assert len(calls) == 2
        for batch in calls:
            assert batch["input_lengths"].unique().tolist() == [longest]
    if "generate" in seen:
        assert drawn_lengths(seen) == {config.model.rollout.length_params.max_length}
        prompts = seen["Policy", "generate"][0]["input_ids"]
        is_distillation = recipe.startswith("distill")
        samples = config.model.rollout.num_rollout_samples
        assert len(prompts) == (config.model.global_batch_size if is_distillation else samples)
        distinct = len(prompts) // config.model.rollout.num_rollouts_per_prompt
        assert len(prompts.unique(dim=0)) == distinct
    else:
        assert len(next(iter(trained.values()))[0]["input_ids"]) == config.model.global_batch_size
    said = capsys.readouterr().out
    assert "dry run: step 2 of 2" in said
    assert "Nothing was saved" in said
    if recipe == "ppo_tiny_cpu":
        phases = re.findall(r"^ *(policy|critic) +(\w+)", said, re.MULTILINE)
        assert [" ".join(phase) for phase in phases[-5:]] == [
            *("policy generate", "critic values", "policy reference_logprobs"),
            *("critic train", "policy train"),
        ]


def times(folder):
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def test_a_run_in_the_directory_is_left_as_it_is(tmp_path, tiny_nemo, capsys):
    folder = tmp_path / "run"
    recipes.run(folder, tiny_nemo, "sft_tiny_cpu", "trainer.sft.max_steps=1")
    before, changed = snapshot(folder), times(folder)
    assert any("run_state" in name for name in before)
    for recipe, settings in (
        ("sft_tiny_cpu", ["exp_manager.start_anew=true"]),
        ("sft_tiny_cpu", ["exp_manager.resume_if_exists=false"]),
        ("grpo_tiny_cpu", []),  # which the run there would refuse
    ):
        recipes.run(folder, tiny_nemo, recipe, "dry_run=true", *settings)
        assert (snapshot(folder), times(folder)) == (before, changed)
    assert "resumed" not in capsys.readouterr().out


LONG_PROMPTS = "{split:train,size:64,shots:60,high:30,seed:0}"


@pytest.mark.parametrize(
    ("recipe", "settings", "error", "words"),
    [
        ("sft_tiny_cpu", ["data.train.source=absent.jsonl"], DataError, "absent.jsonl"),
        ("sft_tiny_cpu", ["data.train.arguments.shots=60"], ConfigError, "256 positions"),
        ("grpo_tiny_cpu", ["reward.function=absent.py:reward"], Exception, "absent.py"),
        ("grpo_tiny_cpu", [f"data.train.arguments={LONG_PROMPTS}"], ConfigError, "256 positions"),
    ],
)
def test_what_a_run_refuses_is_refused(dry_run, recipe, settings, error, words):
    """Also if the longest batch fits: data too long for the model are not cut."""
    with pytest.raises(error, match=words):
        dry_run(recipe, *settings)


@pytest.mark.parametrize(
    "settings",
    [
        # None of what these look at in responses or steps leaves a role without its update.
        ["trainer.ppo.improper_end.mode=mask", "trainer.ppo.reward.overlong_cache=2"],
        ["trainer.ppo.dynamic_sampling.enabled=true"],
        ["model.ppo.sampling_params.end_strings=[a,e,i,o]"],
        ["model.sequence_packing.enabled=true", "model.sequence_packing.train_mb_tokens=256"],
        ["policy.backend=dtensor"],
        ["model.peft.peft_scheme=lora", "model.ppo.ppo_epochs=2"],
        ["reward=model", "reward.function=null", "reward.model.restore_from_path=NEMO"],
    ],
    ids=lambda settings: settings[0],
)
def test_every_role_learns_under(dry_run, seen, settings, reward_nemo, capsys):
    settings = [setting.replace("NEMO", str(reward_nemo)) for setting in settings]
    dry_run("grpo_tiny_cpu", *settings, "data.max_prompt_length=30")
    if "reward=model" in settings:  # it scores the longest sequences
        lengths = {n for call in seen["RewardModel", "get_rewards"] for n in call["input_lengths"]}
        assert {int(length) for length in lengths} == {34}
    assert drawn_lengths(seen) == {4}
    for result in seen["train"]:
        assert result["grad_norm"] > 0
        assert not result["skipped"]
        assert not any(result["all_mb_metrics"].get("empty", []))
    assert "skipped" not in capsys.readouterr().out


def test_what_changes_in_the_configuration(tmp_path, tiny_nemo):
    changed = ["exp_manager.create_wandb_logger=true", "cluster.max_restarts=3"]
    config = config_of("ppo_tiny_cpu", tiny_nemo, tmp_path, *changed)
    dry = dry_config(config, tmp_path / "other")
    assert dry.exp_manager.create_wandb_logger is False
    assert dry.exp_manager.create_tensorboard_logger is False
    assert dry.cluster.max_restarts == 0
    assert dry.model.ppo.length_params.min_length == dry.model.ppo.length_params.max_length == 4
    assert dry.exp_manager.explicit_log_dir == str(tmp_path / "other")


TOO_LITTLE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError(),
    WorkerError("train failed on rank 1: OutOfMemoryError: CUDA out of memory."),
]


def test_too_little_memory_is_told_with_the_phase_and_other_errors_are_raised(dry_run, monkeypatch):
    assert all(map(is_out_of_memory, TOO_LITTLE))
    monkeypatch.setattr(Value, "train", Mock(side_effect=TOO_LITTLE[0]))
    with pytest.raises(DeviceMemoryError) as caught:
        dry_run("ppo_tiny_cpu")
    said = str(caught.value)
    assert said.startswith("out of memory in critic, train, on rank 0 (CPU")
    assert "model.activations_checkpoint_granularity=full" in said
    assert "model.micro_batch_size=16 critic.micro_batch_size=16" in said
    assert "=64" not in said  # no change for the worse
    other = RuntimeError("shapes do not match")
    monkeypatch.setattr(Policy, "train", Mock(side_effect=other))
    with pytest.raises(RuntimeError, match="shapes"):
        dry_run("sft_tiny_cpu")
    assert not is_out_of_memory(other)
    monkeypatch.setattr(Workers, "start_policy", Mock(side_effect=TOO_LITTLE[0]))
    with pytest.raises(DeviceMemoryError, match="out of memory in setting up"):
        dry_run("sft_tiny_cpu")


def test_the_peak_of_a_process_is_that_since_it_was_asked_last():
    if not reset_peak_resident():
        pytest.skip("this system keeps the peak of a process's whole life")
    before = accelerator.memory_use()
    block = torch.frombuffer(private_memory(100 << 20), dtype=torch.uint8)
    block.fill_(1)
    del block  # it goes back to the system itself
    after = accelerator.memory_use()
    assert after.reserved > before.reserved + (90 << 20)
    assert after.current < after.reserved
    accelerator.reset_peak_memory()
    assert accelerator.memory_use().reserved < before.reserved + (50 << 20)
    assert 0 < after.free < after.total


def gpu(process, device, allocated, reserved, held, free):
    sizes = (size * GIB for size in (allocated, reserved, held, free, 80))
    return MemoryUse(process, device, True, *sizes)


def test_the_fullest_card_is_that_of_all_processes_on_it():
    """Two roles in a process are one; two processes on a card are added; cards are compared."""
    one = gpu("host 1", "card 0", 30, 40, 35, 42)
    peak = fullest([(0, one), (0, one), (1, gpu("host 2", "card 1", 10, 20, 20, 58))])
    assert (peak.rank, peak.allocated, peak.reserved) == (0, 30 * GIB, 40 * GIB)
    assert peak.uncounted == 3 * GIB
    assert peak.share == pytest.approx(43 / 80)
    beside = [(0, one), (0, gpu("host 3", "card 0", 10, 12, 2, 41))]
    peak = fullest(beside)  # 80 - 41 free, of which 37 are held by the two
    assert (peak.allocated, peak.reserved, peak.uncounted) == (40 * GIB, 52 * GIB, 2 * GIB)


def test_a_reward_model_with_fewer_positions_scores_shorter_sequences():
    encoder = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=7), max_length=9, collate=list)
    reward = SimpleNamespace(model=Mock(), encoder=encoder, micro_batch_size=2)
    data = Batch({"input_lengths": torch.tensor([5, 12, 5])})
    assert MadeUpRewards(reward, seed=1).get_rewards(data).rewards.tolist() == [0, 1, 0]
    rows, size = reward.model.get_rewards.call_args.args
    assert (size, [len(row) for row in rows]) == (2, [5, 9, 5])


def test_the_batch_of_a_dry_run_has_the_shares_of_the_sources(tiny_nemo, tmp_path):
    config = config_of("sft_tiny_cpu", tiny_nemo, tmp_path, "data.max_length=8")
    examples = [Example(id=index, ids=[1, 2], learned=[(1, 2)]) for index in range(20)]
    data = ExampleDataset(examples, mixture=Mixture("ab", [16, 4], [1, 3]))
    batch = longest_set(config, data, byte_level_tokenizer(), TINY_ARCHITECTURE)
    of_second = sum(batch[index].id >= 16 for index in range(len(batch)))
    assert of_second == pytest.approx(0.75 * len(batch), abs=1)
