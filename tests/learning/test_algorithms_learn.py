"""The tiny recipe of every algorithm, as users run it, learns its task, on problems held out.

The bounds are far from what a model reaches that learns nothing (see the recipes' headers), such as
a run with a learning rate of about 0. Random, the first token is a digit in about 4 % of samples.
Against itself as the reference a model prefers nothing: margin 0, every pair a tie. (Without a
reference, SimPO begins with what the random model happens to prefer: 0.80 of these pairs.) The
teacher of distillation is random, wider, and decided about what comes next; the student begins by
saying that every token is about as likely, 2.15 nats from it.

With adapters everything else is frozen, and the model's random weights are larger than the tiny
model's, for what is frozen must be able to say something: adapters cannot make output rows of
length 0.16 likely.
"""

import re
import statistics

import pytest
import torch
from recipes import ROOT, run, section_of
from variants import extended_except

from aligner.checkpoint.adapters import MergedWeights, read_adapters
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from benchmarks.turn_credit import CREDITS, MEASURES, ahead, curve, table

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (2, 3))]
ACCURACY, OF_PAIRS = "val_rollouts/accuracy", "val_optim/accuracy"
FORWARD_KL, TOP_K = "val_optim/forward_kl", "val_optim/topk_probability"


def brief(recipe, updates):
    """Without states and models, and validated at both ends only."""
    loop = f"trainer.{section_of(recipe)}"
    return [
        *("exp_manager.save_nemo=false", f"{loop}.max_steps={updates}"),
        *(f"{loop}.save_interval=0", f"{loop}.val_check_interval=0"),
    ]


def preferred(loss, updates=10, rows=16):
    recipe = "kto_tiny_cpu" if loss == "kto" else "dpo_tiny_cpu"
    size = f"data.train.arguments.size={updates * rows}"
    options = [*brief(recipe, updates), f"trainer.dpo.loss={loss}", size]
    return recipe, options, {OF_PAIRS: (0.85, 0.9)}, {"val_optim/rewards_margin": 0.2}


def distilled(bounds, rises, *options):
    recipe = "distill_tiny_cpu"
    return recipe, [*brief(recipe, 20), *options], bounds, rises


def near_teacher(on_policy):
    option = f"trainer.distill.on_policy={on_policy}"
    return distilled({FORWARD_KL: (2, 1.7)}, {TOP_K: 0.05}, option)


def inside_top_k(kl):
    """Less is said outside of the teacher's top k."""
    options = [f"trainer.distill.kl={kl}", "model.optim.lr=3.0e-3"]
    return distilled({TOP_K: (0.2, 0.35)}, {}, *options)


LORA = [
    *("model.peft.peft_scheme=lora", "model.optim.lr=1.0e-2"),
    *("model.peft.lora_tuning.adapter_dim=8", "model.peft.lora_tuning.alpha=16"),
]
KL = "train_rollouts/init_policy_kl"
# Few responses are right at first: smaller groups than these hold none.
GROUPS = ["model.ppo.num_rollouts_per_prompt=32", "trainer.ppo.max_steps=40"]


def adapted(recipe, *options):
    penalty = "trainer.ppo.initial_policy_kl_penalty=0.001"
    return recipe, [*LORA, penalty, *options], {ACCURACY: (0.2, 0.8)}, {}


# Recipe, options, bounds of the first and the last validation, and by how much others rise.
LEARNED = {
    "grpo": ("grpo_tiny_cpu", [], {ACCURACY: (0.2, 0.8)}, {}),
    "rs": ("rs_tiny_cpu", [], {ACCURACY: (0.2, 0.8)}, {}),
    "rloo": ("rloo_tiny_cpu", [], {ACCURACY: (0.2, 0.8)}, {}),
    "ppo": ("ppo_tiny_cpu", [], {ACCURACY: (0.2, 0.9)}, {}),
    "sft": ("sft_tiny_cpu", [], {"val_optim/loss": (5, 2.5)}, {}),
    **{loss: preferred(loss) for loss in ("dpo", "ipo", "simpo")},
    "kto": preferred("kto", 15, 32),
    **{"offline": near_teacher("false"), "on policy": near_teacher("true")},
    **{"mixed KL": inside_top_k("mixed"), "backward KL": inside_top_k("backward")},
    "sft, adapters": ("sft_tiny_cpu", LORA, {"val_optim/loss": (5, 2.5)}, {}),
    "ppo, adapters": adapted("ppo_tiny_cpu"),
    "grpo, adapters": adapted("grpo_tiny_cpu", *GROUPS),
}
OFTEN = LEARNED.keys() - {"rloo", "ipo", "backward KL", "ppo, adapters", "grpo, adapters"}


@pytest.fixture(scope="module")
def loud_nemo(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "loud.nemo"
    weights = random_weights(TINY_ARCHITECTURE, scale=0.15)
    save_nemo(path, weights, TINY_ARCHITECTURE, byte_level_tokenizer().files())
    return path


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", extended_except(OFTEN, LEARNED))
def test_the_task_is_learned(tmp_path, tiny_nemo, loud_nemo, teacher, name, seed):
    recipe, options, bounds, rises = LEARNED[name]
    more = [f"teacher.restore_from_path={teacher}"] if "distill" in recipe else []
    nemo = loud_nemo if "adapters" in name else tiny_nemo
    lines = run(tmp_path, nemo, recipe, f"seed={seed}", *options, *more)
    before, after = lines[0], lines[-1]
    for metric, (first, last) in bounds.items():
        sign = 1 if first < last else -1
        assert sign * before[metric] < sign * first
        assert sign * after[metric] > sign * last
    for metric, difference in rises.items():
        assert after[metric] > before[metric] + difference
    if "val_optim/loss" in before:
        share = 0.75 if "KL" in name else 1
        assert after["val_optim/loss"] < share * before["val_optim/loss"]
    if name == "ppo":
        assert len(lines) == 31
        # The sampler and the trainer are the same model: they must agree on every log-prob.
        assert max(line["sampler/logprob_gap_max"] for line in lines[1:]) < 1e-4
    if "adapters" in name:
        check_that_the_rest_is_frozen(tmp_path, nemo)
        if KL in lines[1]:
            assert lines[1][KL] == pytest.approx(0.0, abs=1e-6)
            assert after[KL] > 0.1


def check_that_the_rest_is_frozen(folder, nemo):
    """The run's `.nemo` is the one it began with and its adapters, no more."""
    adapters = read_adapters(folder / "policy.lora.safetensors", TINY_ARCHITECTURE)
    with open_nemo(nemo) as base, open_nemo(folder / "policy.nemo") as trained:
        merged = MergedWeights(base.weights, adapters)
        assert set(merged) == set(trained.weights)
        assert all(torch.equal(merged[name], trained.weights[name]) for name in merged)


@pytest.mark.extended
def test_several_passes_and_mini_batches_learn_too(tmp_path, tiny_nemo):
    """Off-policy mini-batches: old log-probs, clipping and both KL terms are in play."""
    lines = run(
        *(tmp_path, tiny_nemo, "ppo_tiny_cpu", "model.global_batch_size=32"),
        *("model.ppo.ppo_epochs=2", "model.ppo.kl_loss.coef=0.001"),
        *("trainer.ppo.max_steps=15", "model.optim.lr=3e-3"),
    )
    assert lines[-1][ACCURACY] > lines[0][ACCURACY] + 0.3
    assert lines[-1]["train_optim/optimizer_steps"] == 15 * 2 * 2
    assert any(line["train_optim/clip_fraction"] > 0 for line in lines[1:])


def rows_of_the_page():
    """What the table of docs/reinforce.md says to set, by the algorithm's name."""
    page = (ROOT / "docs" / "reinforce.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(trainer\.[^`]+)` \|$", page, re.MULTILINE)
    # With filtering nothing pushes a response to end, and at this recipe's learning rate a policy
    # may stop ending any: then every sample is masked. That row is tested by its parts.
    return [
        pytest.param(settings.split(), id=name)
        for name, settings in rows
        if "improper_end.mode=mask" not in settings
    ]


# What DAPO does to long responses needs some that end: at the first digit, within 16 tokens.
ENDING = [
    "model.ppo.length_params.max_length=16",
    f"model.ppo.sampling_params.end_strings=[{','.join(repr(str(digit)) for digit in range(10))}]",
]


@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("row", rows_of_the_page())
def test_every_row_of_the_page_learns(tmp_path, tiny_nemo, row, seed):
    """As it is written there, over the recipe of another algorithm."""
    row = row + ENDING if "trainer.ppo.dynamic_sampling.enabled=true" in row else row
    lines = run(tmp_path, tiny_nemo, "rloo_tiny_cpu", f"seed={seed}", *row)
    assert lines[-1][ACCURACY] > lines[0][ACCURACY] + 0.4


@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_a_penalty_in_the_reward_does_not_drown_it(tmp_path, tiny_nemo, estimator, seed):
    """GRPO divided the noise of the KL by its own deviation, and ended at 0.03 to 0.2."""
    options = [f"trainer.ppo.advantage.estimator={estimator}", f"seed={seed}"]
    penalty = "trainer.ppo.initial_policy_kl_penalty=0.01"
    lines = run(tmp_path, tiny_nemo, "rloo_tiny_cpu", penalty, *options)
    assert lines[-1][ACCURACY] > 0.8


def test_without_a_learning_rate_nothing_is_learned(tmp_path, tiny_nemo):
    options = ["model.optim.lr=1e-12", "trainer.sft.max_steps=5"]
    lines = run(tmp_path, tiny_nemo, "sft_tiny_cpu", *options)
    assert lines[-1]["val_optim/loss"] == pytest.approx(lines[0]["val_optim/loss"], abs=1e-3)


@pytest.mark.extended
def test_turn_credit_is_ahead_of_trajectory_credit_over_five_seeds(tiny_nemo):
    """In a game whose turns do not depend on each other."""
    seeds = (1, 2, 3, 4, 5)
    curves = {
        credit: [curve(str(tiny_nemo), credit, seed, 100) for seed in seeds] for credit in CREDITS
    }
    print(table(curves, seeds))
    at_the_end, over_all = MEASURES.values()
    means = {credit: statistics.fmean(map(at_the_end, each)) for credit, each in curves.items()}
    assert means["turn"] > max(0.7, means["trajectory"])
    assert ahead(curves, over_all) >= 4
