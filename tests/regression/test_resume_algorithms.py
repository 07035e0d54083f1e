"""A run that stops and goes on is the run that went through, to the bit, whatever it learns by."""

import pytest
from recipes import numbers, run_steps
from variants import extended_except

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.data.batches import PromptSampler, epoch_order
from aligner.errors import ConfigError

RECIPES = ("distill", "grpo", "ppo_tiny_guessing", "reward", "rs", "sft")

GAME = "ppo_tiny_guessing_cpu"
SMALL_GAME = [
    *("model.ppo.num_rollout_samples=16", "model.global_batch_size=16"),
    *("model.micro_batch_size=8", "critic.global_batch_size=16", "critic.micro_batch_size=8"),
]


def run(folder, nemo, teacher, recipe, steps, *options):
    if recipe == GAME:
        options = [*SMALL_GAME, *options]
    if recipe == "distill_tiny_cpu":  # on-policy, so that sampling resumes too
        options = [*options, f"teacher.restore_from_path={teacher}"]
        options.append("trainer.distill.on_policy=true")
    run_steps(
        *(folder, nemo, recipe, steps),
        # Counted in steps of the whole run, so that both runs have the same schedule.
        *("model.optim.sched.name=linear", "model.optim.sched.max_steps=8"),
        "data.validation.arguments.size=16",
        *options,
    )


def written(folder):
    """What every step wrote, without the validation of a run's last step."""
    return numbers(folder, "val_")


def assert_same_weights(folder, other_folder):
    (trained,) = folder.glob("*.nemo")
    with open_nemo(trained) as one, open_nemo(other_folder / trained.name) as other:
        assert set(one.weights) == set(other.weights)
        assert all(one.weights[name].equal(other.weights[name]) for name in one.weights)
        assert one.config == other.config  # with the measured standardisation of a reward model


def through_and_stopped(folder, nemo, teacher, recipe, *options):
    """The folders of a run of three steps, and of one that stops after the first and goes on."""
    through, stopped = folder / "through", folder / "stopped"
    for path, steps in ((through, 3), (stopped, 1), (stopped, 3)):
        run(path, nemo, teacher, recipe, steps, *options)
    assert written(stopped) == written(through)
    assert_same_weights(through, stopped)
    return through, stopped


def drawn_batches(monkeypatch):
    """A list that gets the seed, the position and the rows of each batch that a run draws."""
    drawn, next_batch = [], PromptSampler.next_batch

    def recorded(sampler, count=None):
        drawn.append((sampler.seed, sampler.position, next_batch(sampler, count)))
        return drawn[-1][2]

    monkeypatch.setattr(PromptSampler, "next_batch", recorded)
    return drawn


# The recipes without a file of their own about being killed and going on.
@pytest.mark.parametrize(
    "recipe", extended_except(("grpo", "sft", "rs", "ppo_tiny_guessing"), RECIPES)
)
def test_a_resumed_run_is_the_run_that_went_through(tmp_path, tiny_nemo, teacher, recipe):
    recipe = f"{recipe}_cpu" if "tiny" in recipe else f"{recipe}_tiny_cpu"
    through_and_stopped(tmp_path, tiny_nemo, teacher, recipe)


@pytest.mark.parametrize(
    "recipe", extended_except(("ppo_tiny_cpu",), ("ppo_tiny_cpu", "sft_tiny_cpu"))
)
def test_a_resumed_run_with_adapters_is_the_run_that_went_through(tmp_path, tiny_nemo, recipe):
    options = [
        *("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"),
        "model.peft.lora_tuning.adapter_dropout=0.1",
        *(["trainer.ppo.initial_policy_kl_penalty=0.1"] if "ppo" in recipe else []),
    ]
    folders = through_and_stopped(tmp_path, tiny_nemo, None, recipe, *options)
    through, stopped = ((path / "policy.lora.safetensors").read_bytes() for path in folders)
    assert stopped == through


# Of 48 prompts few teach: a step takes two rollouts of 16.
FEW_TEACH = [
    "data.train.arguments.size=48",
    "trainer.ppo.dynamic_sampling.enabled=true",
    "trainer.ppo.dynamic_sampling.max_rollouts=2",
    "trainer.ppo.improper_end.mode=mask",
    "model.ppo.length_params.max_length=8",
    "model.ppo.sampling_params.end_strings=['1','2','3','4']",
]


def test_dynamic_sampling_ends_with_its_epochs_and_resumes_to_the_bit(tmp_path, tiny_nemo):
    """Two passes over 48 prompts, 16 a step: 6 steps where every prompt teaches, and few do."""
    options = [*FEW_TEACH, "trainer.ppo.max_epochs=2", "trainer.ppo.save_interval=1"]
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    run(through, tiny_nemo, None, "grpo_tiny_cpu", -1, *options)
    for steps in (1, 2, -1, -1):  # the last time nothing is left to do
        run(stopped, tiny_nemo, None, "grpo_tiny_cpu", steps, *options)
    assert written(stopped) == written(through)
    lines = written(through)
    assert 2 < len(lines) - 1 < 6
    prompts = sum(line["train_rollouts/samples_drawn"] for line in lines[1:]) / 4
    assert 96 <= prompts < 96 + 16
    assert lines[-1]["progress/consumed_samples"] == 4 * prompts


def test_another_seed_with_dynamic_sampling_ends_with_the_epoch(tmp_path, tiny_nemo, monkeypatch):
    """The position is kept, the order from it on and the samples are those of the new seed."""
    drawn = drawn_batches(monkeypatch)
    options = [*FEW_TEACH, "trainer.ppo.max_epochs=1"]
    run(tmp_path, tiny_nemo, None, "grpo_tiny_cpu", 1, *options, "seed=1")
    before = len(drawn)
    with pytest.raises(ConfigError, match=r"seed: 1 -> 2.*resume_changed=\[seed\]"):
        run(tmp_path, tiny_nemo, None, "grpo_tiny_cpu", -1, *options, "seed=2")
    accepted = "exp_manager.resume_changed=[seed]"
    for _ in range(2):  # the second time nothing is left to do
        run(tmp_path, tiny_nemo, None, "grpo_tiny_cpu", -1, *options, "seed=2", accepted)
    assert {seed for seed, *_ in drawn[:before]} == {1}
    assert {seed for seed, *_ in drawn[before:]} == {2}
    begin = 0
    for seed, position, batch in drawn:
        assert position == begin
        order = epoch_order(48, seed, 0, shuffle=True)
        assert batch == order[begin : begin + len(batch)].tolist()
        begin += len(batch)
    assert begin == 48
    lines = written(tmp_path)
    assert sum(line["train_rollouts/samples_drawn"] for line in lines[1:]) == 4 * 48
    assert lines[-1]["progress/consumed_samples"] == 4 * 48


def test_more_rows_that_are_accepted_lengthen_the_epoch(tmp_path, tiny_nemo):
    options = ["model.global_batch_size=8", "model.micro_batch_size=8"]
    rows = "data.train.arguments.size"
    run(tmp_path, tiny_nemo, None, "sft_tiny_cpu", -1, *options, f"{rows}=32")
    assert written(tmp_path)[-1]["step"] == 4
    more = [f"{rows}=48", f"exp_manager.resume_changed=[{rows}]"]
    run(tmp_path, tiny_nemo, None, "sft_tiny_cpu", -1, *options, *more)
    assert written(tmp_path)[-1]["step"] == 6
