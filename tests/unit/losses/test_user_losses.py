"""A user's own loss: what is refused before any model is built, and why."""

import pickle

import pytest
import torch
from user_code import configured, directory_with

from aligner.algorithms.ppo.build import make_policy_loss
from aligner.errors import ConfigError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.user import UserPolicyLoss
from aligner.types import Denominators, TokenOutputs

LOSSES = '''
import torch

from aligner.losses.policy import PPOPolicyLoss

class Base:
    def __init__(self, ratio_eps_low, weight=1.0):
        self.low, self.weight = ratio_eps_low, weight

    def __call__(self, outputs, batch, denominators):
        counts = (batch["token_mask"] * batch["sample_mask"][:, None]).bool()
        gain = outputs.values_or_logprobs * batch["advantages"]
        return self.loss(counts, gain, denominators), {"low": self.low}

    def loss(self, counts, gain, denominators):
        return -self.weight * torch.where(counts, gain, 0).sum() / denominators.valid_tokens


def with_loss(loss):
    return type("Loss", (Base,), {"loss": loss})


def raises(self, counts, gain, denominators):
    raise KeyError("no such column")


Local = with_loss(lambda self, counts, gain, _: -torch.where(counts, gain, 0).sum() / counts.sum())
AllTokens = with_loss(lambda self, counts, gain, total: -gain.sum() / total.valid_tokens)
NoGradient = with_loss(lambda *arguments: Base.loss(*arguments).detach())
NotANumber = with_loss(lambda *arguments: Base.loss(*arguments) * float("nan"))
NotAScalar = with_loss(lambda self, counts, gain, denominators: gain)
Raises = with_loss(raises)


class NoPair(Base):
    def __call__(self, outputs, batch, denominators):
        return super().__call__(outputs, batch, denominators)[0]


class BadMetric(Base):
    def __call__(self, outputs, batch, denominators):
        return super().__call__(outputs, batch, denominators)[0], {"words": "many"}


class TwoArguments(Base):
    def __call__(self, outputs, batch):
        return None


class Uncallable:
    pass


class Unbuildable(Base):
    def __init__(self):
        raise ValueError("no weights here")


class Whole(PPOPolicyLoss):
    """Gets every option."""


def plain(outputs, batch, denominators):
    return None
'''


@pytest.fixture
def module_folder(tmp_path, monkeypatch):
    yield from directory_with(tmp_path, monkeypatch, "my_losses", LOSSES)


def loss_of(name, **overrides):
    return make_policy_loss(configured(model__ppo__loss=f"my_losses.py:{name}", **overrides))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("my_losses.py:Los", ["has no class 'Los'", "Local"]),
        ("my_losses.py:plain", ["missing a required argument", "model.ppo.loss_kwargs"]),
        ("my_losses.py:Uncallable", ["Uncallable cannot be called", "__call__"]),
        ("my_losses.py:TwoArguments", ["too many positional", "batch, denominators"]),
        ("my_losses.py:Unbuildable", ["ValueError: no weights here", "my_losses.py, line"]),
        ("my_losses.py:Raises", ["KeyError", "no such column", "advantages, generation_logprobs"]),
        ("my_losses.py:NoPair", ["returned a Tensor", "(loss, metrics)"]),
        ("my_losses.py:NotAScalar", ["a tensor of shape [4, 6] as the loss", "scalar"]),
        ("my_losses.py:BadMetric", ["words='many'"]),
        ("my_losses.py:NoGradient", ["no gradient", "detach"]),
        ("my_losses.py:NotANumber", ["the loss is nan"]),
        ("my_losses.py:Local", ["split into micro-batches", "denominators.valid_tokens"]),
        ("my_losses.py:AllTokens", ["reads masked tokens", "token_mask"]),
    ],
)
def test_a_loss_that_cannot_work_is_refused(module_folder, path, words):
    with pytest.raises(ConfigError) as caught:
        make_policy_loss(configured(model__ppo__loss=path))
    for word in ("model.ppo.loss=", path, *words):
        assert word in str(caught.value)


def test_a_loss_gets_the_options_it_names_and_its_own(module_folder):
    loss = loss_of("Base", model__ppo__ratio_eps=0.3, model__ppo__loss_kwargs={"weight": 2.0})
    assert loss.options == {"ratio_eps_low": 0.3, "weight": 2.0}
    assert not loss.needs_entropy
    with pytest.raises(ConfigError, match=r"model\.ppo\.dual_clip=3\.0 .*Add dual_clip to the"):
        loss_of("Base", model__ppo__dual_clip=3.0)
    with pytest.raises(ConfigError, match=r"model\.ppo\.kl_loss\.coef=0\.1 "):
        loss_of("Base", model__ppo__kl_loss__coef=0.1)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'height'"):
        loss_of("Base", model__ppo__loss_kwargs={"height": 2.0})


def test_a_subclass_of_the_built_in_loss_gets_all_options(module_folder):
    options = {
        "model__ppo__kl_loss__coef": 0.1,
        "model__ppo__entropy_bonus": 0.01,
        "model__ppo__loss_aggregation": "fixed_length",
        "model__ppo__dual_clip": 3.0,
    }
    built_in = make_policy_loss(configured(**options))
    loss = loss_of("Whole", **options)
    assert isinstance(built_in, PPOPolicyLoss)
    assert all(getattr(built_in, name) == value for name, value in loss.options.items())
    assert loss.options["max_response_length"] == 64
    assert loss.needs_entropy


def test_a_loss_travels_by_its_path(module_folder):
    """A file's module has another name in every process, so pickling the object would not do."""
    loss = loss_of("Base", model__ppo__loss_kwargs={"weight": 2.0})
    assert b"user_files" not in pickle.dumps(loss)
    copy = pickle.loads(pickle.dumps(loss))
    assert isinstance(copy, UserPolicyLoss)
    batch = {"token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}
    batch["advantages"] = torch.ones(1, 2)
    unit_count = torch.tensor(1.0)
    value, metrics = copy(
        TokenOutputs(torch.full((1, 2), -1.0)), batch, Denominators(unit_count, unit_count)
    )
    assert value == 4.0
    assert metrics == {"low": pytest.approx(0.2), "loss": 4.0}


def test_the_rollouts_log_probs_stand_in_where_a_batch_has_none(module_folder):
    """A mini-batch trained by the weights that drew it comes without ``prev_logprobs``."""
    columns = {}
    loss = loss_of("Base")
    loss._loss = lambda outputs, batch, denominators: (columns.update(batch), {})
    logprobs = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ConfigError, match="returned None as the loss"):
        loss(TokenOutputs(logprobs), {}, None)
    assert torch.equal(columns["prev_logprobs"], logprobs)
    assert not columns["prev_logprobs"].requires_grad
