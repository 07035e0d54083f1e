"""Reward models in one process: heads, files, standardisation, and what they are shown."""

import dataclasses
import json
import math
from functools import partial

import pytest
import recipes
import torch
from loaded import load_rows
from role_models import assert_equal, fill_head
from settings import parsed

from aligner.algorithms.reward_model.build import last_token
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import CriticConfig, ModelConfig, TrainedModelConfig
from aligner.config.run import RewardRunConfig
from aligner.data.preferences import PairDataset, RatedDataset, collate_rated
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.errors import CheckpointError, ConfigError, DataError, RewardError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights, write_tiny_nemo
from aligner.models.gpt import MegatronGPTCriticModel, MegatronGPTRewardModel, load_from_nemo
from aligner.models.gpt.role.reward import SequenceForm, Standardization
from aligner.models.gpt.role.settings import RoleSettings, RunSettings
from aligner.models.reward.reward_model import MegatronRewardWorker
from aligner.models.value.workers.megatron_value_worker import MegatronValueWorker
from aligner.parallel.groups import initialize_parallel
from aligner.rewards.interface import check_weights, rated_responses
from aligner.rewards.sequences import SequenceEncoder

ATTRIBUTES = ("helpfulness", "correctness", "length")
BATCH = {"input_ids": torch.arange(24).reshape(3, 8), "input_lengths": torch.tensor([8, 3, 5])}


def worker(path, **options):
    config = TrainedModelConfig(restore_from_path=str(path), micro_batch_size=2)
    return MegatronRewardWorker(config, None, RunSettings(), initialize_parallel(), **options)


@pytest.mark.integration
def test_a_head_of_several_attributes_goes_into_a_nemo_and_back(tiny_nemo, tmp_path):
    first = worker(tiny_nemo, attributes=ATTRIBUTES)
    fill_head(first.model)
    rewards = first.get_rewards(BATCH)["rewards"]
    assert rewards.std() > 0.1
    # They are the head at the last token.
    tokens = first.model.infer_tokens(BATCH)
    assert tokens.shape == (3, 8, 3)
    assert not tokens[1, 3:].any()
    assert torch.equal(rewards, tokens[[0, 1, 2], [7, 2, 4]])
    first.save_checkpoint(str(tmp_path / "rated.nemo"))
    again = load_from_nemo(MegatronGPTRewardModel, restore_path=tmp_path / "rated.nemo")
    assert again.attributes == ATTRIBUTES
    assert again.gpt.rm_head.weight.shape == (3, 64)
    torch.testing.assert_close(again.infer(BATCH), rewards)
    torch.testing.assert_close(again.infer(BATCH, 1), rewards)
    with open_nemo(tmp_path / "rated.nemo") as checkpoint:
        assert checkpoint.config["reward_model_type"] == "regression"
        assert checkpoint.config["regression"]["num_attributes"] == 3
        assert checkpoint.config["reward_standardization"]["enable"] is False
    with pytest.raises(CheckpointError, match=r"rm_head.weight has shape \(3, 64\)"):
        load_from_nemo(MegatronGPTCriticModel, restore_path=tmp_path / "rated.nemo")


def test_standardisation_by_hand():
    """1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 3."""
    found = Standardization.measure(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert found.mean == 3.0
    assert found.std == pytest.approx(math.sqrt(14 / 3))
    assert found(torch.tensor([3.0, 6.0])).tolist() == pytest.approx([0, 3 / math.sqrt(14 / 3)])
    for flat in ([2.0], [2.0, 2.0]):
        with pytest.raises(CheckpointError, match="without any spread"):
            Standardization.measure(torch.tensor(flat))


@pytest.mark.integration
def test_it_is_saved_and_applied(tiny_nemo, tmp_path):
    learner = worker(tiny_nemo, attributes=())
    fill_head(learner.model)
    raw = learner.get_rewards(BATCH)["rewards"]
    learner.standardize(mean=0.25, std=2.0)
    path = tmp_path / "standard.nemo"
    learner.save_checkpoint(str(path))
    with open_nemo(path) as checkpoint:
        known = checkpoint.config["reward_standardization"]
    assert known == {"enable": True, "mean": 0.25, "std": 2.0}
    for model in (
        load_from_nemo(MegatronGPTRewardModel, restore_path=path),
        MegatronGPTRewardModel.restore_from(str(path)),
        worker(path, init_optimizer=False).model,
    ):
        torch.testing.assert_close(model.infer(BATCH), (raw - 0.25) / 2)
        torch.testing.assert_close(model.infer(BATCH, standardize=False), raw)
        torch.testing.assert_close(model.infer_rm_critic(BATCH)["rewards"], (raw - 0.25) / 2)
    # One that learns on has weights that nobody has measured.
    torch.testing.assert_close(worker(path).get_rewards(BATCH)["rewards"], raw)


@pytest.mark.parametrize(
    "bad", [{"mean": 0.0, "std": 0.0}, {"mean": float("nan"), "std": 1.0}, {"mean": 1.0}]
)
def test_numbers_that_cannot_be_used_are_refused(bad):
    assert Standardization.of_config({"reward_standardization": {"enable": False, **bad}}) is None
    with pytest.raises(CheckpointError, match=r"reward_standardization of model_config.yaml"):
        Standardization.of_config({"reward_standardization": {"enable": True, **bad}})


def test_a_sequence_ends_in_one_eos_whatever_the_policy_drew():
    tokenizer = byte_level_tokenizer()
    encoder = SequenceEncoder(tokenizer, 12)
    ids = encoder.ids("1+1=", "2")
    assert ids == [*tokenizer.encode("1+1=2"), tokenizer.eos_id]
    assert ids.count(tokenizer.eos_id) == 1
    with pytest.raises(RewardError, match=r"has 13 tokens .* at most 12"):
        encoder.ids("1+1=", "2" * 8)
    with_bos = SequenceEncoder(tokenizer, 12, add_bos=True)
    assert with_bos.ids("1+1=", "2") == [tokenizer.bos_id, *ids]


@pytest.mark.integration
def test_a_file_remembers_what_the_sequences_of_its_training_were_like(tiny_nemo, tmp_path):
    first, path = worker(tiny_nemo), tmp_path / "trained.nemo"
    first.remember_sequences(add_bos=True, end_id=65)
    first.save_checkpoint(str(path))
    tokenizer = byte_level_tokenizer()
    with open_nemo(path) as checkpoint:
        encoder = SequenceEncoder.of_checkpoint(checkpoint, None)
        assert encoder.ids("1+1=", "2") == [tokenizer.bos_id, *tokenizer.encode("1+1=2"), 65]
        SequenceEncoder.of_checkpoint(checkpoint, True)
        with pytest.raises(ConfigError, match=r"add_bos=false, but .* trained on sequences with"):
            SequenceEncoder.of_checkpoint(checkpoint, False)
    with open_nemo(tiny_nemo) as checkpoint:  # says nothing
        assert not SequenceEncoder.of_checkpoint(checkpoint, None).add_bos
        assert SequenceEncoder.of_checkpoint(checkpoint, True).add_bos
        assert SequenceEncoder.of_checkpoint(checkpoint, None).end_id == tokenizer.eos_id
    assert worker(path, init_optimizer=False).model.sequence_form == SequenceForm(True, 65)
    assert worker(path).model.sequence_form is None  # learns on, from who knows what


@pytest.mark.parametrize("bad", [5, {"add_bos": 1, "end_id": 2}, {"add_bos": True, "end_id": "x"}])
def test_a_form_that_makes_no_sense_is_refused(bad):
    with pytest.raises(CheckpointError, match=r"reward_sequences of model_config.yaml is"):
        SequenceForm.of_config({"reward_sequences": bad})


def test_sequences_end_as_those_of_training_did(tmp_path):
    """A base model under ChatML: chats end with ``<|im_end|>``, plain text with EOS."""
    files = byte_level_tokenizer().files()
    config = {**json.loads(files["tokenizer_config.json"]), "eos_token": "<|endoftext|>"}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    tokenizer = tokenizer_from_files(files)
    plain = {"prompt": "a", "chosen": "b", "rejected": "c"}
    chat = {**plain, "prompt": [{"role": "user", "content": "a"}]}

    def end_of(*rows):
        return last_token(load_rows(PairDataset, tmp_path, rows, tokenizer))

    assert (end_of(plain), end_of(chat, chat), end_of(plain, chat)) == (256, 258, None)


def test_attributes_are_weighted():
    scores = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])
    weights = check_weights([1, 0.5, -1], ATTRIBUTES, "it")
    rated = partial(rated_responses, ["r", "s"], prompts=["p", "q"], source="it")
    scored = rated(scores, ATTRIBUTES, weights)
    assert (scored.rewards.tolist(), scored.parts["correctness"]) == ([-1.0, 1.5], [2.0, 1.0])
    assert rated(torch.ones(2, 1), ("one",), None).parts == {}
    assert check_weights(None, (), "it") is None
    assert rated(torch.tensor([1.0, 2.0]), (), None).rewards.tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"rates 3 attributes .helpfulness, correctness, length."):
        check_weights(None, ATTRIBUTES, "it")
    with pytest.raises(ConfigError, match="has 2 numbers, but it rates 3"):
        check_weights([1, 2], ATTRIBUTES, "it")


load_ratings = partial(load_rows, RatedDataset, attribute_columns=ATTRIBUTES)


def test_ratings_by_hand(tmp_path):
    first = {"prompt": "p", "response": "a", "helpfulness": 4, "correctness": None, "length": 0}
    second = {"prompt": "p", "response": "", "correctness": 2.5}
    data = load_ratings(tmp_path, [first, second])
    batch = collate_rated([data[0], data[1]], pad_id=0)
    assert batch["attributes"].tolist() == [[4, 0, 0], [0, 2.5, 0]]
    assert batch["attribute_mask"].tolist() == [[1, 0, 1], [0, 1, 0]]
    assert batch["input_lengths"].tolist() == [3, 2]
    # As wide as there are attributes, ratings would pass for one number a token.
    assert batch["input_ids"].shape == batch["token_mask"].shape == (2, 4)


@pytest.mark.parametrize(
    ("ratings", "said"),
    [
        ({"helpful": 1}, "line 1: none of the columns .'helpfulness'.* Columns found: .'helpful'"),
        ({"length": "long"}, "column 'length' must be a finite number or null, but it is 'long'"),
        ({"length": True}, "it is True"),
        ({"length": math.nan}, "it is nan"),
    ],
)
def test_bad_ratings_are_refused(tmp_path, ratings, said):
    with pytest.raises(DataError, match=said):
        load_ratings(tmp_path, [{"prompt": "p", "response": "a", **ratings}])


TRAINER = "trainer.reward_model"
REGRESSION = f"{TRAINER}.loss=regression"
SERVER = "reward.function=null reward.kind=server reward.server.url=http://h"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (REGRESSION, "data.attribute_columns is empty"),
        ("data.attribute_columns=[a]", "needs trainer.reward_model.loss=regression"),
        (f"{TRAINER}.variant=margin", "variant=margin needs the strength of each preference"),
        ("data.chosen_reward_column=a", "Set both or neither"),
        (f"{TRAINER}.standardize_on=validation", "data.validation is null"),
        (
            f"{REGRESSION} data.attribute_columns=[a] {TRAINER}.standardize_on=train",
            "standardize_on=train .*loss=regression",
        ),
        ("model.micro_batch_size=3", "micro_batch_size=3 counts rows.* Use 2 or 4"),
    ],
)
def test_training_without_its_data_or_with_half_a_pair_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parsed(settings, RewardRunConfig)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("reward.function=null", "reward.kind=function needs reward.function"),
        ("reward.function=null reward.kind=model", "reward=model reward.model.restore_from_path="),
        ("reward.server.url=http://h", "reward.server is set, but reward.kind=function"),
        ("reward.attribute_weights=[1.0]", "Set it to null"),
        (
            "reward.function=null reward.kind=model reward.model.restore_from_path=r "
            "reward.model.workers=1",
            "needs cluster.eng",
        ),
        (f"{SERVER} reward.server.retry_for_s=1800", "must be below cluster.timeout_s=1800"),
        (f"{SERVER} reward.server.token_env=A reward.server.token_file=b", "both set"),
    ],
)
def test_a_reward_without_what_it_needs_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parsed(settings)


def test_every_setting_of_a_frozen_model_is_its_own_or_the_layout():
    """The list in `build_reward` of what the policy shares names fields that exist."""
    from aligner.algorithms.rollout.inputs import frozen_config
    from aligner.config import RewardModelConfig

    policy = TrainedModelConfig("p.nemo", tensor_model_parallel_size=2, sequence_parallel=True)
    frozen = frozen_config(policy, RewardModelConfig("r.nemo", micro_batch_size=3))
    assert frozen.parallel == policy.parallel
    assert dataclasses.replace(frozen.optim) == frozen.optim
    assert (frozen.restore_from_path, frozen.micro_batch_size) == ("r.nemo", 3)


SHARE = "reward.model.share_body_with_critic=true"


@pytest.fixture(scope="module")
def reward_nemo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    write_tiny_nemo(folder / "other.nemo", seed=5, scale=0.1)
    settings = RoleSettings(attributes=("first", "second"))
    model = load_from_nemo(MegatronGPTRewardModel, settings, restore_path=folder / "other.nemo")
    fill_head(model, seed=7)
    model.save_to(folder / "reward.nemo")
    return folder / "reward.nemo"


def bodies(*modules):
    """Numbers in distinct storages of the modules' parameters, heads aside."""
    named = (pair for module in modules for pair in module.named_parameters())
    parameters = {each.data_ptr(): each for name, each in named if "_head" not in name}
    return sum(each.numel() for each in parameters.values())


def critic_worker(path):
    section = CriticConfig(micro_batch_size=3, global_batch_size=3)
    model = ModelConfig(restore_from_path=str(path))
    parallel = initialize_parallel()
    return MegatronValueWorker(section, byte_level_tokenizer(), model=model, parallel=parallel)


def share(worker, path):
    """Let a reward model have the critic's body."""
    config = TrainedModelConfig(restore_from_path=str(path), micro_batch_size=2)
    worker.share_backbone(config, byte_level_tokenizer(), RunSettings())


@pytest.mark.integration
def test_one_body_two_models(tiny_nemo, reward_nemo):
    """Before and after an update, the critic is undisturbed and the rewards are the file's."""
    worker = critic_worker(tiny_nemo)
    critic = worker.model
    fill_head(critic)
    critic.optimizer.copy_model_weights()
    alone = load_from_nemo(MegatronGPTRewardModel, restore_path=reward_nemo)
    worker.prepare_for_inference()
    values, one_body = worker.get_values(BATCH)["values"], bodies(critic)
    share(worker, reward_nemo)
    assert worker.reward_attributes() == ("first", "second")
    expected = alone.infer(BATCH, 2)
    assert expected.std() > 0.1
    for _ in range(2):
        assert worker.get_rewards(BATCH, 2)["rewards"].equal(expected)
        assert worker.get_values(BATCH)["values"].equal(values)
    both = critic.infer_rm_critic(BATCH)
    assert both["values"].equal(values)
    torch.testing.assert_close(both["rewards"], expected)
    assert bodies(critic, worker._reward) == one_body
    assert bodies(critic, alone) == 2 * one_body


@pytest.mark.integration
def test_what_goes_wrong_while_scoring_leaves_the_critic_its_body(tiny_nemo, reward_nemo):
    worker = critic_worker(tiny_nemo)
    worker.prepare_for_inference()
    before = {name: value.clone() for name, value in worker.model.whole_weights().items()}
    share(worker, reward_nemo)
    with pytest.raises(IndexError):
        worker.get_rewards({**BATCH, "input_ids": BATCH["input_ids"] + 1000})
    assert_equal(before, worker.model.whole_weights())


def ppo(folder, nemo, reward, *overrides, recipe="ppo_tiny_cpu"):
    recipes.run(
        *(folder, nemo, recipe, "trainer.ppo.max_steps=2", "trainer.ppo.save_interval=0"),
        *("model.global_batch_size=8", "model.micro_batch_size=4"),
        *("model.ppo.num_rollout_samples=8", "data.train.arguments.size=32"),
        *("data.validation.arguments.size=8", "reward=model"),
        f"reward.model.restore_from_path={reward}",
        "reward.attribute_weights=[1.0,-0.5]",
        *overrides,
    )
    with open_nemo(folder / "policy.nemo") as checkpoint:
        return recipes.numbers(folder), dict(checkpoint.weights)


@pytest.mark.integration
def test_a_run_with_a_shared_backbone_is_the_same_to_the_bit(tmp_path, tiny_nemo, reward_nemo):
    # Packed rows of the critic, padded ones of the reward model.
    settings = ["model.sequence_packing.enabled=true", "critic.global_batch_size=8"]
    apart = ppo(tmp_path / "apart", tiny_nemo, reward_nemo, *settings)
    shared = ppo(tmp_path / "shared", tiny_nemo, reward_nemo, *settings, SHARE)
    assert shared[0] == apart[0]
    assert "critic/loss" in apart[0][1]
    assert_equal(shared[1], apart[1])


@pytest.mark.integration
def test_another_architecture_is_refused(tmp_path, tiny_nemo):
    path = tmp_path / "wide.nemo"
    wider = dataclasses.replace(TINY_ARCHITECTURE, hidden_size=128)
    head = {"rm_head.weight": torch.zeros(1, 128), "rm_head.bias": torch.zeros(1)}
    weights = random_weights(wider) | head
    weights.pop("output_layer.weight")
    save_nemo(path, weights, wider, byte_level_tokenizer().files())
    settings = ["critic.global_batch_size=8", "critic.micro_batch_size=8"]
    with pytest.raises(ConfigError, match=r"differ in hidden_size \(128, 64\). Start both from"):
        ppo(tmp_path, tiny_nemo, path, *settings, "reward.attribute_weights=null", SHARE)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.backend=dtensor"], "needs megatron-core models, but policy.backend=dtensor"),
        (["reward.model.offload_weights=true"], "offload_weights=true needs separate workers"),
        (["model.peft.peft_scheme=lora"], "but model.peft.peft_scheme=lora"),
        (None, "needs a critic, but this run has none"),
    ],
)
def test_what_cannot_share_is_refused(tmp_path, tiny_nemo, overrides, message):
    recipe = "grpo_tiny_cpu" if overrides is None else "ppo_tiny_cpu"
    with pytest.raises(ConfigError, match=message):
        ppo(tmp_path, tiny_nemo, "r.nemo", SHARE, *(overrides or ()), recipe=recipe)
