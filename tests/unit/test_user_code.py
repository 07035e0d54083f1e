"""A user's own loss, estimator and callbacks: what is refused before any model is built, and why.

1. What cannot be imported, called or used is refused with the key, the value and a remedy.
2. The module is found in the current directory, wherever the script stands.
3. A loss that depends on micro-batches or reads what does not count is found out.
4. The estimator gets what it names, and what it returns is checked.
5. A tokenizer is what its files make.
6. A run tells its callbacks everything in order, stops where they say, and names one that raises.
"""

import io
import pickle
import random
import sys

import pytest
import torch
from test_credit import assign, credit, rollout
from test_run_loop import Counter, lines, run

from aligner.algorithms.callbacks import Callback, Callbacks
from aligner.algorithms.ppo.trainer import make_estimator, make_policy_loss
from aligner.algorithms.ppo.user_estimator import UserEstimator
from aligner.algorithms.run.loop import config_changes
from aligner.config import parse_config
from aligner.config.algorithms.trainer import CallbackConfig
from aligner.data.tokenizers.loading import named_tokenizer
from aligner.errors import CallbackError, ConfigError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.user import UserPolicyLoss
from aligner.types import Denominators, TokenOutputs

LOSSES = '''
import torch

from aligner.losses.policy import PPOPolicyLoss

VALUE = 3


class Base:
    def __init__(self, ratio_eps_low, weight=1.0):
        self.low, self.weight = ratio_eps_low, weight

    def __call__(self, outputs, batch, denominators):
        counts = (batch["token_mask"] * batch["sample_mask"][:, None]).bool()
        gain = outputs.values_or_logprobs * batch["advantages"]
        return self.loss(counts, gain, denominators), {"low": self.low}

    def loss(self, counts, gain, denominators):
        return -self.weight * torch.where(counts, gain, 0).sum() / denominators.valid_tokens


class Local(Base):
    def loss(self, counts, gain, denominators):
        return -torch.where(counts, gain, 0).sum() / counts.sum()


class AllTokens(Base):
    def loss(self, counts, gain, denominators):
        return -gain.sum() / denominators.valid_tokens


class NoGradient(Base):
    def loss(self, counts, gain, denominators):
        return super().loss(counts, gain, denominators).detach()


class NotANumber(Base):
    def loss(self, counts, gain, denominators):
        return super().loss(counts, gain, denominators) * float("nan")


class NotAScalar(Base):
    def loss(self, counts, gain, denominators):
        return gain


class Raises(Base):
    def loss(self, counts, gain, denominators):
        raise KeyError("no such column")


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

ESTIMATORS = """
import torch


def good(rewards, groups, token_mask, scale=1.0):
    mean = torch.zeros_like(rewards)
    for group in groups.unique():
        mean[groups == group] = rewards[groups == group].mean()
    return scale * (rewards - mean)[:, None] * token_mask


def spread(rewards):
    return rewards


def writes(rewards, token_mask):
    token_mask.fill_(5.0)
    return rewards


def everything(**given):
    return torch.full_like(given["token_mask"], float(len(given)))


def with_critic(values, penalty):
    return values - penalty, values


def wants_more(rewards, difficulty):
    return rewards


def wants_values(values):
    return values


def wrong_shape(rewards, token_mask):
    return token_mask[:, 1:]


def not_finite(rewards):
    return rewards / 0


def raises(rewards):
    raise KeyError("gone")


def pair(rewards):
    return rewards, rewards
"""

CALLBACKS = """
from aligner.algorithms.callbacks import Callback


class Good(Callback):
    def __init__(self, limit=3):
        self.limit = limit


class Foreign:
    pass


class Misspelt(Callback):
    def on_step_ends(self, run, step, metrics):
        pass


class TooFew(Callback):
    def on_step_end(self, run, step):
        pass


class Unbuildable(Callback):
    def __init__(self):
        raise OSError("no journal")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with three modules."""
    for name, text in (("losses", LOSSES), ("estimators", ESTIMATORS), ("callbacks", CALLBACKS)):
        (tmp_path / f"my_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_losses", None)


def configured(critic=False, **overrides):
    values = {
        "model": {"restore_from_path": "m.nemo", "ppo": {"num_rollouts_per_prompt": 2}},
        "reward": {"function": "a.b:reward"},
        "data": {"train": {"source": "train.jsonl"}},
        "trainer": {"ppo": {"initial_policy_kl_penalty": 0.0, "normalize_advantages": False}},
        **({} if critic else {"critic": None}),
    }
    overrides = {"trainer__ppo__advantage__estimator": "gae" if critic else "rloo", **overrides}
    for key, value in overrides.items():
        *path, last = key.split("__")
        level = values
        for name in path:
            level = level.setdefault(name, {})
        level[last] = value
    return parse_config(values)


def loss_of(name, **overrides):
    return make_policy_loss(configured(model__ppo__loss=f"my_losses.py:{name}", **overrides))


# Losses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:Loss", ["no module named 'no_such_module'", "PYTHONPATH"]),
        ("gone.py:Loss", ["there is no file"]),
        ("my_losses.py:Los", ["has no class 'Los'", "Local"]),
        ("my_losses.py:VALUE", ["has no class 'VALUE'"]),
        ("my_losses", ["package.module:function"]),
        ("my_losses.py:plain", ["missing a required argument", "model.ppo.loss_kwargs"]),
        ("my_losses.py:Uncallable", ["Uncallable cannot be called", "__call__"]),
        ("my_losses.py:TwoArguments", ["too many positional", "batch, denominators"]),
        ("my_losses.py:Unbuildable", ["ValueError: no weights here", "my_losses.py, line"]),
        ("my_losses.py:Raises", ["KeyError", "no such column", "advantages, generation_logprobs"]),
        ("my_losses.py:NoPair", ["returned a Tensor", "pair"]),
        ("my_losses.py:NotAScalar", ["a tensor [4, 6] as the loss", "scalar"]),
        ("my_losses.py:BadMetric", ["words='many'"]),
        ("my_losses.py:NoGradient", ["no gradient", "detach"]),
        ("my_losses.py:NotANumber", ["the loss is nan"]),
        ("my_losses.py:Local", ["split into micro-batches", "denominators.valid_tokens"]),
        ("my_losses.py:AllTokens", ["tokens that do not count", "token_mask"]),
    ],
)
def test_a_loss_that_cannot_work_is_refused(here, path, words):
    with pytest.raises(ConfigError) as caught:
        make_policy_loss(configured(model__ppo__loss=path))
    for word in ("model.ppo.loss=", path, *words):
        assert word in str(caught.value)


def test_a_loss_gets_the_options_it_names_and_its_own(here):
    loss = loss_of("Base", model__ppo__ratio_eps=0.3, model__ppo__loss_kwargs={"weight": 2.0})
    assert loss.options == {"ratio_eps_low": 0.3, "weight": 2.0}
    assert not loss.needs_entropy
    with pytest.raises(ConfigError, match=r"model\.ppo\.dual_clip=3\.0 .*name dual_clip"):
        loss_of("Base", model__ppo__dual_clip=3.0)
    with pytest.raises(ConfigError, match=r"model\.ppo\.kl_loss\.coef=0\.1 "):
        loss_of("Base", model__ppo__kl_loss__coef=0.1)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'height'"):
        loss_of("Base", model__ppo__loss_kwargs={"height": 2.0})
    with pytest.raises(ConfigError, match=r"loss_kwargs=.*model\.ppo\.loss is null"):
        configured(model__ppo__loss_kwargs={"weight": 2.0})


def test_a_subclass_of_the_built_in_loss_gets_all_options(here):
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


def test_a_loss_travels_by_its_path(here):
    """A file's module has another name in every process, so pickling the object would not do."""
    loss = loss_of("Base", model__ppo__loss_kwargs={"weight": 2.0})
    assert b"aligner_user" not in pickle.dumps(loss)
    copy = pickle.loads(pickle.dumps(loss))
    assert isinstance(copy, UserPolicyLoss)
    batch = {"token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}
    batch["advantages"] = torch.ones(1, 2)
    one = torch.tensor(1.0)
    value, metrics = copy(TokenOutputs(torch.full((1, 2), -1.0)), batch, Denominators(one, one))
    assert value == 4.0
    assert metrics == {"low": pytest.approx(0.2), "loss": 4.0}


def test_the_current_directory_is_searched_for_modules(here):
    assert make_policy_loss(configured(model__ppo__loss="my_losses:Base")).name == "my_losses:Base"


def test_the_rollouts_log_probs_stand_in_where_a_batch_has_none(here):
    """A mini-batch trained by the weights that drew it comes without ``prev_logprobs``."""
    seen = {}
    loss = loss_of("Base")
    loss._loss = lambda outputs, batch, denominators: (seen.update(batch), {})
    logprobs = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ConfigError, match="returned None as the loss"):
        loss(TokenOutputs(logprobs), {}, None)
    assert torch.equal(seen["prev_logprobs"], logprobs)
    assert not seen["prev_logprobs"].requires_grad


# Estimators -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grppo", ["did you mean grpo", "package.module:function"]),
        ("my_estimators.py:gone", ["has no function 'gone'", "good"]),
        ("my_estimators.py:wants_more", ["difficulty", "trainer.ppo.advantage.kwargs", "rewards"]),
        ("my_estimators.py:wants_values", ["values", "only in a run with a critic"]),
        ("my_estimators.py:wrong_shape", ["a tensor [4, 5] of 4 responses", "float [4, 6]"]),
        ("my_estimators.py:not_finite", ["of response 0 of 4 it is NaN or infinite"]),
        ("my_estimators.py:raises", ["KeyError", "my_estimators.py, line", "given rewards"]),
        ("my_estimators.py:pair", ["returned tuple; return a tensor"]),
    ],
)
def test_an_estimator_that_cannot_work_is_refused(here, name, words):
    with pytest.raises(ConfigError) as caught:
        make_estimator(configured(trainer__ppo__advantage__estimator=name))
    for word in ("trainer.ppo.advantage.estimator", name, *words):
        assert word in str(caught.value)


def test_options_that_an_estimator_does_not_read_are_refused(here):
    good = {"trainer__ppo__advantage__estimator": "my_estimators.py:good"}
    assert make_estimator(configured(**good)) is not None
    with pytest.raises(ConfigError, match=r"discount_factor=0\.9.*does not take"):
        make_estimator(configured(**good, trainer__ppo__discount_factor=0.9))
    with pytest.raises(ConfigError, match=r"critic_warmup_steps=2.*no critic"):
        configured(**good, trainer__ppo__critic_warmup_steps=2)
    with pytest.raises(ConfigError, match=r"advantage\.kwargs=.*estimator=rloo"):
        configured(trainer__ppo__advantage__kwargs={"scale": 2.0})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'shift'"):
        make_estimator(configured(**good, trainer__ppo__advantage__kwargs={"shift": 2.0}))
    assert configured(**good).algorithm == "Policy gradients (my_estimators.py:good)"


def own(name, **kwargs):
    how = credit("rloo")
    estimator = UserEstimator(f"my_estimators.py:{name}", kwargs, has_critic=False)
    return type(how)(how.trainer, how.charges_kl, 2, 4, estimator)


def test_an_estimator_decides_the_advantages(here):
    batch, same = (rollout([1, 0, 0.5, 0.5], [3, 1, 2, 4]) for _ in range(2))
    metrics, _ = assign(own("good", scale=2.0), batch)
    _, _ = assign(credit("rloo"), same)
    assert torch.equal(batch["advantages"], same["advantages"])  # of two, RLOO's is twice the mean
    assert metrics["train_rollouts/samples_with_signal"] == 0.5
    assert "returns" not in batch


def test_one_number_for_a_response_is_that_of_its_tokens(here):
    batch = rollout([1, 0], [3, 1])
    batch["sample_mask"] = torch.tensor([1.0, 1.0])
    assign(own("spread"), batch)
    assert torch.equal(batch["advantages"], torch.tensor([1.0, 0.0])[:, None] * batch["token_mask"])


def test_what_an_estimator_writes_stays_its_own(here):
    batch = rollout([1, 0], [3, 1])
    before = batch["token_mask"].clone()
    assign(own("writes"), batch)
    assert torch.equal(batch["token_mask"], before)


def test_an_estimator_that_takes_anything_gets_everything(here):
    batch = rollout([1, 0], [3, 1])
    batch["prev_logprobs"] = batch["generation_logprobs"] = torch.zeros_like(batch["token_mask"])
    assign(own("everything"), batch)
    assert batch["advantages"].max() == 13


def test_an_estimator_of_a_run_with_a_critic(here):
    batch = rollout([1, 0], [3, 1])
    batch["values"] = torch.randn(batch["token_mask"].shape)
    how = credit("rloo")
    path = "my_estimators.py:with_critic"
    estimator = UserEstimator(path, {}, has_critic=True)
    metrics, _ = assign(type(how)(how.trainer, False, 2, 4, estimator), batch)
    assert torch.equal(batch["advantages"], batch["values"] * batch["token_mask"])
    assert torch.equal(batch["returns"], batch["advantages"])
    assert metrics["critic/explained_var"] == pytest.approx(1.0)
    overrides = {"trainer__ppo__advantage__estimator": path}
    assert make_estimator(configured(critic=True, **overrides)) is not None


# Tokenizers -------------------------------------------------------------------------------------

TOKENIZERS = """
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer

def good():
    return byte_level_tokenizer()

def wants(path):
    return byte_level_tokenizer()

def raises():
    raise OSError("no vocabulary")

def none():
    return None

def not_what_its_files_are():
    made = byte_level_tokenizer()
    made.encode = lambda text: [0] * len(text)
    return made
"""


def test_a_tokenizer_of_a_function(here):
    (here / "my_tokenizers.py").write_text(TOKENIZERS)
    made = named_tokenizer("my_tokenizers.py:good", key="model.tokenizer")
    assert made.encode("a") == [ord("a")]
    for name, words in {
        "wants": "missing a required argument: 'path'.*without arguments",
        "raises": "raised OSError: no vocabulary",
        "none": "returned a NoneType; return a tokenizer of transformers",
        "not_what_its_files_are": "encodes text or ends responses otherwise",
        "gone": "has no function 'gone'",
    }.items():
        with pytest.raises(ConfigError, match=rf"model\.tokenizer='?my_tokenizers.*{words}"):
            named_tokenizer(f"my_tokenizers.py:{name}", key="model.tokenizer")


# Callbacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("my_callbacks.py:Bad", ["has no class 'Bad'", "Good"]),
        ("my_callbacks.py:Foreign", ["makes a Foreign", "callbacks.Callback"]),
        ("my_callbacks.py:Misspelt", ["on_step_ends", "did you mean on_step_end?"]),
        ("my_callbacks.py:TooFew", ["on_step_end(self, run, step, metrics)"]),
        ("my_callbacks.py:Unbuildable", ["OSError: no journal"]),
        (
            CallbackConfig("my_callbacks.py:Good", {"limits": 1}),
            ["unexpected keyword argument 'limits'", "kwargs: {NAME: VALUE}"],
        ),
    ],
)
def test_a_callback_that_cannot_work_is_refused(here, entry, words):
    with pytest.raises(ConfigError) as caught:
        Callbacks.load(["my_callbacks.py:Good", entry])
    path = entry.callback if isinstance(entry, CallbackConfig) else entry
    for word in ("trainer.callbacks[1]=", path, *words):
        assert word in str(caught.value)


def test_callbacks_of_a_configuration(here):
    config = configured(
        trainer__callbacks=["a:B", {"callback": "c.py:D", "kwargs": {"x": 1}}],
    )
    assert config.trainer.callbacks == ("a:B", CallbackConfig("c.py:D", {"x": 1}))
    assert config.as_dict()["trainer"]["callbacks"][1] == {"callback": "c.py:D", "kwargs": {"x": 1}}
    with pytest.raises(ConfigError, match=r"trainer\.callbacks.*kwarg"):
        configured(trainer__callbacks=[{"callback": "c.py:D", "kwarg": {}}])
    with pytest.raises(ConfigError, match=r"trainer\.callbacks\[0\].*a class"):
        configured(trainer__callbacks=[""])


class Recorder(Callback):
    def __init__(self, at=None, raises=None):
        self.told, self.at, self.raises, self.count = [], at or {}, raises, 0

    def on_run_start(self, run, step):
        self.told.append(("run_start", step, run.total_steps))
        self._act(run, "run_start", step)

    def on_step_end(self, run, step, metrics):
        self.told.append(("step_end", step, sorted(metrics)))
        self.count += 1
        metrics["train_rollouts/rewards"] = -1.0  # a copy
        self._act(run, "step_end", step)

    def on_validation_end(self, run, step, metrics):
        self.told.append(("validation_end", step, sorted(metrics)))
        self._act(run, "validation_end", step)

    def on_save(self, run, step, path):
        assert (path / "state.json").exists()
        self.told.append(("save", step, path.name))
        self._act(run, "save", step)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def _act(self, run, event, step):
        if (event, step) == self.raises:
            raise RuntimeError("the journal is full")
        if (event, step) in self.at.items():
            run.stop(f"enough at {step}")


def told_by(*recorders):
    callbacks = Callbacks([f"trainer.callbacks[{i}]=m:R" for i in range(len(recorders))], recorders)
    callbacks.begin({"a": 1}, None, 6)
    return callbacks


REWARDS, ACCURACY = ["train_rollouts/rewards"], ["val_rollouts/accuracy"]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_tells_everything_in_order(tmp_path, async_save):
    recorder, plain = Recorder(), Counter()
    random.seed(3)
    run(tmp_path / "plain", plain)
    random.seed(3)
    ended, _ = run(tmp_path / "told", Counter(), callbacks=told_by(recorder), async_save=async_save)
    assert ended
    assert lines(tmp_path / "told") == lines(tmp_path / "plain")
    assert [one for one in recorder.told if one[0] != "save"] == [
        ("run_start", 0, 6),
        ("validation_end", 0, ACCURACY),
        ("step_end", 1, REWARDS),
        ("step_end", 2, REWARDS),
        ("step_end", 3, REWARDS),
        ("validation_end", 3, ACCURACY),
        ("step_end", 4, REWARDS),
        ("step_end", 5, REWARDS),
        ("step_end", 6, REWARDS),
        ("validation_end", 6, ACCURACY),
    ]
    saves = [one for one in recorder.told if one[0] == "save"]
    assert saves == [("save", step, f"step_{step:06d}") for step in (2, 4, 6)]


@pytest.mark.parametrize(
    ("event", "asked", "ends"),
    [("step_end", 2, 2), ("validation_end", 3, 3), ("run_start", 0, 1), ("save", 2, 3)],
)
def test_a_callback_stops_the_run_which_goes_on_later(tmp_path, event, asked, ends):
    random.seed(3)
    whole = Counter()
    run(tmp_path / "whole", whole)
    random.seed(3)
    stopping, learner = Recorder(at={event: asked}), Counter()
    said = io.StringIO()
    options = {"async_save": False} if event == "save" else {}
    ended, _ = run(tmp_path / "run", learner, callbacks=told_by(stopping), said=said, **options)
    assert ended  # as max_time does: the model is written
    assert learner.calls[-1] == ("validate", ends)
    assert f"stopped by a callback: enough at {asked} after step {ends} of 6" in said.getvalue()
    assert stopping.told[-1] == ("save", ends, f"step_{ends:06d}")
    later = Recorder()
    ended, restored = run(tmp_path / "run", Counter(), callbacks=told_by(later))
    assert (ended, restored.step) == (True, ends)
    assert later.told[0] == ("run_start", ends, 6)
    assert later.count == 6  # 2 + 4: the state of a callback is that of the run
    rewards = [line.get("train_rollouts/rewards") for line in lines(tmp_path / "run")]
    assert rewards == [line.get("train_rollouts/rewards") for line in lines(tmp_path / "whole")]


def test_a_callback_that_raises_ends_the_run_with_its_cause(tmp_path):
    first, second = Recorder(), Recorder(raises=("step_end", 3))
    with pytest.raises(CallbackError) as caught:
        run(tmp_path, Counter(), callbacks=told_by(first, second))
    said = str(caught.value)
    assert said.startswith("trainer.callbacks[1]=m:R: on_step_end raised RuntimeError: the journal")
    assert "test_user_code.py, line" in said
    assert isinstance(caught.value.__cause__, RuntimeError)
    ended, restored = run(tmp_path, Counter(), callbacks=told_by(Recorder()))
    assert (ended, restored.step) == (True, 2)


def test_a_stop_of_before_is_forgotten():
    recorder = Recorder(at={"step_end": 1})
    callbacks = told_by(recorder)
    callbacks.tell("on_step_end", 1, {})
    assert callbacks.stop_reason == "enough at 1"
    callbacks.begin({}, None, 6)  # workers on Ray were started anew
    callbacks.tell("on_step_end", 2, {})
    assert callbacks.stop_reason is None


def test_keys_that_an_earlier_version_did_not_have_are_no_change():
    assert config_changes({"a": 1}, {"a": 1, "b": [], "c": {}, "d": None}) == []
    assert config_changes({"a": 1, "b": [1]}, {"a": 1, "b": []}) == ["b: [1] -> []"]
    assert config_changes({"a": 1}, {"a": 1, "b": ["x"]}) == ["b: None -> ['x']"]
