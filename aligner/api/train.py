"""Training functions, one per algorithm. Their keywords are the most common configuration keys."""

import difflib
import functools
import inspect
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec

from aligner.api.objects import as_setting, has_ground_truth, is_rows, write_rows
from aligner.api.process import columns_of_generator, run_script
from aligner.api.result import Result
from aligner.errors import ConfigError, raised_as
from aligner.foreign_keys import as_override

P = ParamSpec("P")
StrPath = str | os.PathLike[str]
# Rows (a list, `datasets.Dataset` or `pandas.DataFrame`), paths, or a generator function.
Data = StrPath | Sequence[StrPath] | Iterable[Mapping[str, Any]] | Callable[..., Any]
Code = str | Callable[..., Any]  # a function or class, or the path of one

# The configuration key of each keyword. {loop} is a section of `trainer` and of `model`.
KEYS = {
    "model": "model.restore_from_path",
    "teacher": "teacher.restore_from_path",
    "data": "data.train.source",
    "validation_data": "data.validation.source",
    "output_dir": "exp_manager.explicit_log_dir",
    "reward": "reward.function",
    "reward_model": "reward.model.restore_from_path",
    "environment": "environment.factory",
    "tools": "environment.tools",
    "max_steps": "trainer.{loop}.max_steps",
    "max_epochs": "trainer.{loop}.max_epochs",
    "validate_every": "trainer.{loop}.val_check_interval",
    "lr": "model.optim.lr",
    "critic_lr": "critic.optim.lr",
    "batch_size": "model.global_batch_size",
    "micro_batch_size": "model.micro_batch_size",
    "samples_per_step": "model.{loop}.num_rollout_samples",
    "num_generations": "model.{loop}.num_rollouts_per_prompt",
    "max_new_tokens": "model.{loop}.length_params.max_length",
    "temperature": "model.{loop}.sampling_params.temperature",
    "kl_penalty": "trainer.ppo.initial_policy_kl_penalty",
    "loss": "trainer.dpo.loss",
    "beta": "trainer.dpo.beta",
    "devices": "trainer.devices",
    "seed": "seed",
}

# Values of an algorithm that differ from the defaults of its script.
_CHOICES = {"reinforce": {"trainer.ppo.advantage.estimator": "grpo"}}


def _named(function: Callable[P, Result]) -> Callable[P, Result]:
    """Wrap ``function``. An unknown keyword raises `TypeError`, which suggests the nearest one."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> Result:
        for name in keywords:
            if name not in names:
                similar = {"learning_rate": "lr"}.get(name, name)
                near = difflib.get_close_matches(similar, names, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise TypeError(
                    f"{function.__name__}() has no keyword {name!r}{hint} Its keywords are "
                    f"{', '.join(names)}. Set any other configuration key by overrides, "
                    "for example overrides={'model.ppo.ratio_eps': 0.1}"
                )
        return function(*args, **keywords)

    return call


@_named
def train_ppo(
    *,
    model: StrPath,
    data: Data,
    reward: Code | None = None,
    reward_model: StrPath | None = None,
    environment: Code | None = None,
    tools: Sequence[Code] | None = None,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    validate_every: int | None = None,
    lr: float | None = None,
    critic_lr: float | None = None,
    kl_penalty: float | None = None,
    samples_per_step: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    devices: int | None = None,
    seed: int | None = None,
    output_dir: StrPath = "results/ppo",
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a policy and a critic by PPO (Schulman et al. 2017).

    If ``output_dir`` contains a stopped run, the call continues this run. Ctrl-C saves the run and
    raises `KeyboardInterrupt`. Keywords that are None keep the defaults of ``aligner train-ppo``.

    Args:
        model: a ``.nemo`` file, a Hugging Face directory, or the `Result` of another function.
        data: rows, files, or a generator function. A row has ``prompt`` (text or chat messages)
            and the columns that the reward needs.
        reward: ``reward(prompts, responses, **columns) -> list[float]``, or ``FILE.py:FUNCTION``.
        reward_model: a reward model, such as the `Result` of `train_reward`, in place of
            ``reward``.
        environment: class of an environment, which provides prompts and rewards.
        tools: functions that the policy may call. ``reward`` then scores the last answer.
        validation_data: held-out prompts, in the form of ``data``.
        max_steps: maximum number of steps. Each step samples and trains on one rollout.
        validate_every: number of steps between validations.
        lr: learning rate of the policy.
        critic_lr: learning rate of the critic.
        kl_penalty: weight of the KL divergence from the initial policy in the reward.
        samples_per_step: number of responses in a rollout.
        max_new_tokens: maximum number of tokens in a response.
        temperature: sampling temperature.
        devices: number of processes, one per device.
        seed: random seed of sampling, shuffling and weight initialisation.
        output_dir: directory of the run.
        overrides: values of other configuration keys, as ``{"model.ppo.ratio_eps": 0.1}``.

    Raises:
        ConfigError: a keyword or an override has an invalid value.
        DataError: a row is invalid.
        TypeError: a keyword is unknown.
    """
    return _train("ppo", locals())


@_named
def train_grpo(
    *,
    model: StrPath,
    data: Data,
    reward: Code | None = None,
    reward_model: StrPath | None = None,
    environment: Code | None = None,
    tools: Sequence[Code] | None = None,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    validate_every: int | None = None,
    lr: float | None = None,
    kl_penalty: float | None = None,
    samples_per_step: int | None = None,
    num_generations: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    devices: int | None = None,
    seed: int | None = None,
    output_dir: StrPath = "results/grpo",
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a policy by GRPO (Shao et al. 2024), without a critic.

    Each prompt gets ``num_generations`` responses, which are compared with each other. The other
    keywords are those of `train_ppo`. To select another advantage estimator, set
    ``overrides={"trainer.ppo.advantage.estimator": "rloo"}``.
    """
    return _train("reinforce", locals())


@_named
def train_rs(
    *,
    model: StrPath,
    data: Data,
    reward: Code | None = None,
    reward_model: StrPath | None = None,
    environment: Code | None = None,
    tools: Sequence[Code] | None = None,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    validate_every: int | None = None,
    lr: float | None = None,
    samples_per_step: int | None = None,
    num_generations: int | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    devices: int | None = None,
    seed: int | None = None,
    output_dir: StrPath = "results/rs",
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a policy by rejection sampling: fine-tune on the best responses to each prompt.

    The keywords are those of `train_grpo`.
    """
    return _train("rs", locals())


@_named
def train_sft(
    *,
    model: StrPath,
    data: Data,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    max_epochs: int | None = None,
    validate_every: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    devices: int | None = None,
    seed: int | None = None,
    output_dir: StrPath = "results/sft",
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Fine-tune a model on prompts with responses, or on chats.

    Args:
        model: a ``.nemo`` file, a Hugging Face directory, or a `Result`.
        data: rows, files, or a generator function. A row contains ``prompt`` and ``response``, or
            ``messages`` (a whole chat).
        validation_data: held-out rows, in the form of ``data``.
        max_steps: maximum number of optimizer steps.
        max_epochs: maximum number of passes over the data.
        validate_every: number of steps between validations.
        lr: learning rate.
        batch_size: examples per optimizer step.
        micro_batch_size: examples per forward and backward pass, on each device.

    The other keywords and the errors are those of `train_ppo`.
    """
    return _train("sft", locals())


@_named
def train_dpo(
    *,
    model: StrPath,
    data: Data,
    loss: str | None = None,
    beta: float | None = None,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    max_epochs: int | None = None,
    validate_every: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    devices: int | None = None,
    seed: int | None = None,
    output_dir: StrPath = "results/dpo",
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a policy on preferences, by DPO (Rafailov et al. 2023) or a related loss.

    Args:
        model: a ``.nemo`` file, a Hugging Face directory, or a `Result`.
        data: rows, files, or a generator function. A row has ``prompt``, ``chosen`` and
            ``rejected``. With ``loss="kto"`` it has ``prompt``, ``response`` and ``label``.
        loss: ``dpo``, ``ipo``, ``rpo``, ``simpo`` or ``kto``.
        beta: factor β of the implicit reward, β times the log-prob ratio to the reference model.

    The other keywords are those of `train_sft`.
    """
    return _train("dpo", locals())


@_named
def train_reward(
    *,
    model: StrPath,
    data: Data,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    max_epochs: int | None = None,
    validate_every: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    devices: int | None = None,
    seed: int | None = None,
    output_dir: StrPath = "results/reward",
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a reward model on comparisons: rows with ``prompt``, ``chosen`` and ``rejected``.

    The keywords are those of `train_sft`. The `Result` can be the ``reward_model`` of `train_ppo`.
    """
    return _train("reward", locals())


@_named
def train_distill(
    *,
    model: StrPath,
    teacher: StrPath,
    data: Data,
    validation_data: Data | None = None,
    max_steps: int | None = None,
    max_epochs: int | None = None,
    validate_every: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    devices: int | None = None,
    seed: int | None = None,
    output_dir: StrPath = "results/distill",
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a model to predict the token distributions of ``teacher``, a larger model.

    Both models must have the same tokenizer. The other keywords are those of `train_sft`.
    """
    return _train("distill", locals())


def _train(algorithm: str, keywords: dict[str, Any]) -> Result:
    """Write rows and objects into the run's directory, run the script, and return its result.

    ``algorithm``: a name in `aligner.catalog.ALGORITHMS`. ``keywords``: the caller's arguments.
    """
    from aligner.algorithms.run.identity import flat  # takes a second

    with raised_as(ConfigError, f"output_dir={keywords['output_dir']!r} is no path", TypeError):
        folder = Path(keywords["output_dir"]).expanduser()
    if file := next(filter(Path.is_file, (folder, *folder.parents)), None):
        raise ConfigError(f"output_dir={folder}: {file} is a file. Give the name of a directory")
    files = folder / "python"
    loop = {"reinforce": "ppo", "reward": "reward_model"}.get(algorithm, algorithm)
    overrides = keywords.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides={overrides!r} is no mapping. Give a dict from key to value")
    set_by_overrides = flat(overrides)
    choices = {**_reward_group(keywords), **_CHOICES.get(algorithm, {})}
    values = {
        key.format(loop=loop): keywords[name]
        for name, key in KEYS.items()
        if keywords.get(name) is not None
    }
    if clash := ", ".join(sorted(values.keys() & set_by_overrides.keys())):
        raise ConfigError(f"overrides sets {clash}, which a keyword sets, too. Remove one of them")
    with _undone_if_refused(folder):
        # Rows become files, and objects become files that the run imports.
        may_lack_truths = algorithm in ("ppo", "reinforce", "rs")
        may_lack_truths &= "data.ground_truth_column" not in set_by_overrides
        columns: list[set[str]] = []
        for key, value in values.items():
            if key.endswith(".source") and is_rows(value):
                values[key], names = write_rows(key, value, files)
                columns.append(names)
            elif key.endswith(".source") and callable(value) and may_lack_truths:
                values[key] = as_setting(key, value, files)
                section = f"{key.removesuffix('source')}arguments."
                given = {
                    name.removeprefix(section): item
                    for name, item in set_by_overrides.items()
                    if name.startswith(section)
                }
                columns.append(columns_of_generator(values[key], given))
            elif key.endswith("restore_from_path") and isinstance(value, str | os.PathLike):
                values[key] = os.path.expanduser(value)
        if may_lack_truths and any(columns) and not any(map(has_ground_truth, columns)):
            choices["data.ground_truth_column"] = None
        if "environment.tools" in values and "reward.function" in values:
            values["environment.kwargs.reward"] = values.pop("reward.function")
        values |= overrides
        if max_steps := (values | set_by_overrides).get(f"trainer.{loop}.max_steps"):
            choices[f"trainer.{loop}.max_epochs"] = max_steps  # an epoch has at least one step
        # The keywords and overrides follow the choices, and so replace them.
        values = {key: as_setting(key, value, files) for key, value in values.items()}
        arguments = [f"{key}={as_override(value)}" for key, value in (choices | values).items()]

        # The equivalent command is printed and stored, and then run.
        command = shlex.join(["aligner", f"train-{algorithm}", *arguments])
        files.mkdir(parents=True, exist_ok=True)
        (files / "command.sh").write_text(f"{command}\n")
        print(f"same run from the command line: {command}", flush=True)
        run_script(f"train-{algorithm}", arguments)
    return Result(folder, command)


@contextmanager
def _undone_if_refused(folder: Path) -> Iterator[None]:
    """Restore ``folder`` if the block raises an error before a run has begun or continued there.

    Raises `StorageError` if another process trains in ``folder``.
    """
    from aligner.observe.run_lock import LOCK_FILE, RUN_FILE, RunLock  # imports torch

    files, earlier, record = folder / "python", folder / ".python.earlier", folder / RUN_FILE
    is_new = not folder.exists()
    if (folder / LOCK_FILE).exists():
        RunLock(folder).release()
    # A run that begins or continues writes its record.
    written = record.stat().st_mtime_ns if record.exists() else None
    if files.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        files.rename(earlier)
    try:
        yield
    except BaseException:
        unused = {"python", RUN_FILE, LOCK_FILE}  # files of a run that has made no step
        if is_new and folder.exists() and {path.name for path in folder.iterdir()} <= unused:
            shutil.rmtree(folder)
        elif written == (record.stat().st_mtime_ns if record.exists() else None):
            shutil.rmtree(files, ignore_errors=True)
            if earlier.exists():
                earlier.rename(files)
        raise
    finally:
        shutil.rmtree(earlier, ignore_errors=True)


def _reward_group(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option of configuration group ``reward`` for the keyword that gives rewards."""
    names = ("environment", "tools", "reward_model", "reward")
    sources = [name for name in names if keywords.get(name) is not None]
    is_scored = sources == ["tools", "reward"]
    if {"environment", "tools"} & {*sources} and len(sources) > 1 and not is_scored:
        raise ConfigError(f"{' and '.join(sources)}: an environment gives the rewards. Remove one")
    choices = {"environment": "environment", "tools": "environment", "reward_model": "model"}
    return {"reward": choices[sources[0]]} if sources and sources[0] in choices else {}
