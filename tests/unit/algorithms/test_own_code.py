"""Losses, estimators, surrogates and callbacks of a user: what they get, and what is refused."""

import pickle

import pytest
import torch
from settings import rows_of
from test_credit import assign, credit, rollout
from user_code import configured, directory_with

from aligner.algorithms.callbacks import Callbacks
from aligner.algorithms.ppo.build import make_estimator, make_policy_loss
from aligner.algorithms.ppo.credit import Credit
from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.catalog import ESTIMATORS, SURROGATES, EstimatorEntry, SurrogateEntry
from aligner.config.algorithms.names import algorithm_of
from aligner.config.algorithms.process import CallbackConfig
from aligner.errors import ConfigError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.user import UserPolicyLoss
from aligner.types import Denominators, TokenOutputs

OWN = '''
import torch

from aligner.algorithms.callbacks import Callback
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

def derived(base, **methods):
    return type("Own", (base,), methods)

class Foreign:
    pass

class Unbuildable(Base, Callback):
    def __init__(self):
        raise ValueError("no weights here")

class Whole(PPOPolicyLoss):
    """Gets every option."""

class Journal(Callback):
    def __init__(self, limit=3):
        self.limit = limit

def good(rewards, groups, token_mask, scale=1.0):
    return scale * rewards[:, None] * token_mask

def spread(rewards):
    return rewards

def writes(rewards, token_mask):
    token_mask.fill_(5.0)
    return rewards

def everything(**given):
    return torch.full_like(given["token_mask"], float(len(given)))

def doubled(rewards, scale=2.0):
    return scale * rewards

def vanilla(loss, ratio, advantages, logprobs, mean):
    return -advantages * logprobs, {"ppo_ratio_clamped": mean(ratio)}
'''
LOSS, ESTIMATOR = "model__ppo__loss", "trainer__ppo__advantage__estimator"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """The module in the current directory, and rows of the tables that name it."""
    monkeypatch.setitem(SURROGATES, "toy", SurrogateEntry("own:vanilla", "Toy"))
    entry = EstimatorEntry("Toy estimator", compares_group=True, function="own.py:doubled")
    monkeypatch.setitem(ESTIMATORS, "toy", entry)
    yield from directory_with(tmp_path, monkeypatch, "own", OWN)


def load(key, entry):
    """Load what is named as a run does before a model is built."""
    if key.startswith("trainer.callbacks"):
        return Callbacks.load(["own.py:Journal", entry])
    config = configured(**{key.replace(".", "__"): entry})
    return make_policy_loss(config) if key == "model.ppo.loss" else make_estimator(config)


# In each row: a name of own.py or its definition | words of the refusal | ...
REFUSED = {
    "model.ppo.loss": """
Los | has no class 'Los' | Whole
Foreign | Foreign cannot be called | __call__
Unbuildable | ValueError: no weights here | own.py, line
plain = lambda outputs, batch, denominators: None
    | missing a required argument | model.ppo.loss_kwargs
TwoArguments = derived(Base, __call__=lambda self, outputs, batch: None)
    | too many positional | batch, denominators
Raises = derived(Base, loss=lambda *given: {}["no such column"])
    | KeyError | no such column | advantages, generation_logprobs
NoPair = derived(Base, __call__=lambda *given: Base.__call__(*given)[0])
    | returned a Tensor | (loss, metrics)
NotAScalar = derived(Base, loss=lambda self, counts, gain, denominators: gain)
    | a tensor of shape [4, 6] as the loss | scalar
BadMetric = derived(Base, __call__=lambda *given: (Base.__call__(*given)[0], {"words": "many"}))
    | words='many'
NoGradient = derived(Base, loss=lambda *given: Base.loss(*given).detach())
    | no gradient | detach
NotANumber = derived(Base, loss=lambda *given: Base.loss(*given) * float("nan")) | the loss is nan
Local = derived(Base, loss=lambda self, counts, gain, _: -(counts * gain).sum() / counts.sum())
    | split into micro-batches | denominators.valid_tokens
AllTokens = derived(Base, loss=lambda self, counts, gain, all: -gain.sum() / all.valid_tokens)
    | reads masked tokens | token_mask
""",
    "trainer.ppo.advantage.estimator": """
gone | has no function 'gone' | good
wants_more = lambda rewards, difficulty: rewards
    | difficulty | trainer.ppo.advantage.kwargs | rewards
wants_values = lambda values: values | values | only in a run with a critic
wrong_shape = lambda rewards, token_mask: token_mask[:, 1:]
    | shape [4, 5] for 4 responses | float [4, 6]
not_finite = lambda rewards: rewards / 0 | response 0 of 4 is NaN or infinite
raises = lambda rewards: {}["gone"] | KeyError | own.py, line | arguments rewards
pair = lambda rewards: (rewards, rewards) | returned tuple. Return a tensor
""",
    "trainer.callbacks[1]=": """
Bad | has no class 'Bad' | Journal
Foreign | Foreign is not derived from | callbacks.Callback
Misspelt = derived(Callback, on_step_ends=lambda self, run, step, metrics: None)
    | on_step_ends | Did you mean on_step_end?
TooFew = derived(Callback, on_step_end=lambda self, run, step: None)
    | on_step_end(self, run, step, metrics)
Unbuildable | ValueError: no weights here
""",
}


@pytest.mark.parametrize(
    ("key", "row"), [(key, row) for key, table in REFUSED.items() for row in rows_of(table)]
)
def test_what_cannot_work_is_refused(key, row, tmp_path):
    definition, *words = row
    name, is_new, _ = definition.partition(" = ")
    if is_new:
        (tmp_path / "own.py").write_text(f"{OWN}\n{definition}\n")
    with pytest.raises(ConfigError) as caught:
        load(key, f"own.py:{name}")
    for word in (key, f"own.py:{name}", *words):
        assert word in str(caught.value)


def test_callbacks_have_options():
    given = ["a:B", {"callback": "c.py:D", "kwargs": {"x": 1}}]
    config = configured(trainer__callbacks=given)
    assert config.trainer.callbacks == ("a:B", CallbackConfig("c.py:D", {"x": 1}))
    assert config.as_dict()["trainer"]["callbacks"][1] == given[1]
    with pytest.raises(ConfigError, match=r"trainer\.callbacks\[0\].*a class"):
        configured(trainer__callbacks=[""])
    with pytest.raises(ConfigError, match=r"keyword argument 'limits'.*kwargs: \{NAME: VALUE\}"):
        Callbacks.load([CallbackConfig("own.py:Journal", {"limits": 1})])


def loss_of(name, **overrides):
    return make_policy_loss(configured(**{LOSS: f"own.py:{name}"}, **overrides))


def test_a_loss_gets_the_options_it_names_and_its_own():
    loss = loss_of("Base", model__ppo__ratio_eps=0.3, model__ppo__loss_kwargs={"weight": 2.0})
    assert loss.options == {"ratio_eps_low": 0.3, "weight": 2.0}
    assert not loss.needs_entropy
    with pytest.raises(ConfigError, match=r"model\.ppo\.dual_clip=3\.0 .*Add dual_clip to the"):
        loss_of("Base", model__ppo__dual_clip=3.0)
    with pytest.raises(ConfigError, match=r"model\.ppo\.kl_loss\.coef=0\.1 "):
        loss_of("Base", model__ppo__kl_loss__coef=0.1)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'height'"):
        loss_of("Base", model__ppo__loss_kwargs={"height": 2.0})
    # A subclass of the built-in loss gets all options.
    options = {
        **{"model__ppo__kl_loss__coef": 0.1, "model__ppo__entropy_bonus": 0.01},
        **{"model__ppo__loss_aggregation": "fixed_length", "model__ppo__dual_clip": 3.0},
    }
    built_in, loss = make_policy_loss(configured(**options)), loss_of("Whole", **options)
    assert isinstance(built_in, PPOPolicyLoss)
    assert all(getattr(built_in, name) == value for name, value in loss.options.items())
    assert loss.options["max_response_length"] == 64
    assert loss.needs_entropy


def test_a_loss_travels_by_its_path():
    """A file's module has another name in every process, so pickling the object would not do."""
    loss = loss_of("Base", model__ppo__loss_kwargs={"weight": 2.0})
    assert b"user_files" not in pickle.dumps(loss)
    copy = pickle.loads(pickle.dumps(loss))
    assert isinstance(copy, UserPolicyLoss)
    batch = {"token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}
    batch["advantages"] = torch.ones(1, 2)
    outputs = TokenOutputs(torch.full((1, 2), -1.0))
    value, metrics = copy(outputs, batch, Denominators(torch.tensor(1.0), torch.tensor(1.0)))
    assert value == 4.0
    assert metrics == {"low": pytest.approx(0.2), "loss": 4.0}


def test_the_rollouts_log_probs_stand_in_where_a_batch_has_none():
    """A mini-batch trained by the weights that drew it comes without ``prev_logprobs``."""
    columns = {}
    loss = loss_of("Base")
    loss._loss = lambda outputs, batch, denominators: (columns.update(batch), {})
    logprobs = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ConfigError, match="returned None as the loss"):
        loss(TokenOutputs(logprobs), {}, None)
    assert torch.equal(columns["prev_logprobs"], logprobs)
    assert not columns["prev_logprobs"].requires_grad


def test_options_that_an_estimator_does_not_read_are_refused():
    good = {ESTIMATOR: "own.py:good"}
    assert make_estimator(configured(**good)) is not None
    with pytest.raises(ConfigError, match=r"discount_factor=0\.9.*does not accept"):
        make_estimator(configured(**good, trainer__ppo__discount_factor=0.9))
    with pytest.raises(ConfigError, match=r"critic_warmup_steps=2 needs a critic"):
        configured(**good, trainer__ppo__critic_warmup_steps=2)
    with pytest.raises(ConfigError, match=r"advantage\.kwargs=.*estimator=rloo"):
        configured(trainer__ppo__advantage__kwargs={"scale": 2.0})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'shift'"):
        make_estimator(configured(**good, trainer__ppo__advantage__kwargs={"shift": 2.0}))
    assert configured(**good).algorithm == "Policy gradients (own.py:good)"


def assigned(name, **columns):
    """A rollout with the advantages of an estimator."""
    batch = rollout([1, 0], [3, 1])
    batch |= {key: torch.zeros_like(batch["token_mask"]) for key in columns.get("zeros", ())}
    estimator = UserEstimator(f"own.py:{name}", {}, has_critic=False)
    assign(Credit(credit("rloo").trainer, False, 2, 4, estimator), batch)
    return batch


def test_what_an_estimator_gets_and_gives():
    batch = assigned("spread")
    assert torch.equal(batch["advantages"], torch.tensor([1.0, 0.0])[:, None] * batch["token_mask"])
    assert torch.equal(assigned("writes")["token_mask"], batch["token_mask"])
    batch = assigned("everything", zeros=("prev_logprobs", "generation_logprobs"))
    assert batch["advantages"].max() == 13


def test_a_surrogate_is_a_row_and_a_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured(model__ppo__surrogate="toy")
    loss_function = make_policy_loss(config)
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    batch = {
        "advantages": torch.tensor([[3.0, 5.0]]),
        "token_mask": torch.tensor([[0.0, 1.0]]),
        "sample_mask": torch.ones(1),
    }
    outputs = TokenOutputs(logprobs, torch.zeros(1, 2))
    loss, _ = loss_function(outputs, batch, Denominators(torch.tensor(1.0), torch.tensor(1.0)))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert (loss, gradient.tolist()) == (10, [[0, -5]])
    assert algorithm_of(config.as_dict()).name == "RLOO (Toy)"


def test_an_estimator_is_a_row_and_a_function():
    toy = {ESTIMATOR: "toy"}
    with pytest.raises(ConfigError, match=r"num_rollouts_per_prompt=1"):
        configured(**toy, model__ppo__num_rollouts_per_prompt=1)
    config = configured(**toy, trainer__ppo__advantage__kwargs={"scale": 3.0})
    batch = rollout([1.0, 0.0], lengths=[4, 3])
    assign(Credit(config.trainer.ppo, False, 2, 4, make_estimator(config)), batch)
    assert batch["advantages"][0].amax() == 3
    assert algorithm_of(config.as_dict()).name == "Toy estimator"


@pytest.mark.parametrize(
    ("key", "last"),
    [
        ("model.ppo.surrogate", "toy"),
        ("trainer.ppo.advantage.estimator", "toy, package.module:function"),
    ],
)
def test_an_unknown_name_lists_the_rows(key, last):
    with pytest.raises(ConfigError, match=rf"{key}: .*, {last}, got 'toys'.* Did you mean toy\?"):
        configured(**{key.replace(".", "__"): "toys"})
