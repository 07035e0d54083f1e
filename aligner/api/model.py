"""`load_model`: a model in this process, for generation and log-probs."""

import os
import random
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from aligner.algorithms.ask.model import InferenceModel, open_model
from aligner.algorithms.rollout.rollout import response_mask
from aligner.algorithms.rollout.validation import sample_responses
from aligner.algorithms.run.engine import run_settings
from aligner.api.quiet import quiet
from aligner.checkpoint.convert import nemo_to_hf
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import AskConfig, LengthParams, RunConfig, SamplingOptions, SamplingParams
from aligner.config.load import parse_config
from aligner.config.parse import build
from aligner.config.roles.model import LAYOUT_KEYS, STAGE_KEYS
from aligner.data.batches import Prompt
from aligner.data.prompts import PromptDataset, make_prompt
from aligner.data.readers import DataRow
from aligner.data.tokenizers.decoding import response_texts
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, DataError, raised_as
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import shutdown_parallel

Role = TypeVar("Role", bound=Policy | Value)
Text = str | Sequence[Mapping[str, Any]]  # text, or the messages of a chat

_open_models = 0


class _Loaded(Generic[Role]):
    """Base class of `Model` and `CriticModel`: tokenization, padding and `close`."""

    def __init__(self, loaded: InferenceModel, role: Role, closing: ExitStack) -> None:
        self._loaded, self._role = loaded, role
        self._end = weakref.finalize(self, closing.close)  # at the latest at exit
        self.tokenizer = loaded.tokenizer

    def close(self) -> None:
        """Free the weights. The last open model also destroys the process groups."""
        self._end()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if not self._end.alive:
            raise ConfigError("the model is closed. Load it again with aligner.load_model")

    def _prompts(self, prompts: Sequence[Text]) -> list[Prompt]:
        self._refuse_if_closed()
        if isinstance(prompts, str):
            raise DataError("prompts is a single text. Give a list of texts: [prompt]")
        columns = self._loaded.run.data
        return [
            make_prompt(DataRow(f"prompts[{i}]", {"prompt": text}), i, self.tokenizer, columns)
            for i, text in enumerate(prompts)
        ]

    def _token_values(
        self,
        name: str,
        prepare: Callable[[], None],
        compute: Callable[[BatchedDataDict], Mapping[str, torch.Tensor]],
        prompts: Sequence[Text],
        responses: Sequence[str],
    ) -> list[list[float]]:
        """Return the column ``name`` [B, S] of ``compute``'s result for the responses' tokens."""
        if len(prompts) != len(responses):
            raise DataError(
                f"{len(prompts)} prompts, but {len(responses)} responses. Give one per prompt"
            )
        if not prompts:
            return []
        # Prompts with their responses as one right-padded batch.
        heads = [prompt.ids for prompt in self._prompts(prompts)]
        rows = [
            torch.tensor([*ids, *self.tokenizer.encode(response)])
            for ids, response in zip(heads, responses, strict=True)
        ]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_id)
        positions = self._loaded.architecture.max_position_embeddings
        for index, row in enumerate(rows):
            if len(row) > positions:
                raise DataError(
                    f"prompts[{index}] and responses[{index}] have {len(row)} tokens, and the "
                    f"model has {positions} positions. Shorten the texts"
                )
        starts, ends = torch.tensor([*map(len, heads)]), torch.tensor([*map(len, rows)])
        mask = response_mask(starts, ends, ids.shape[1])
        columns = {"input_ids": ids, "input_lengths": ends, "token_mask": mask}
        try:
            prepare()
            values = compute(BatchedDataDict(columns))[name]
        finally:
            self._role.finish_inference()
        return [row[chosen].tolist() for row, chosen in zip(values, mask.bool(), strict=True)]


class Model(_Loaded[Policy]):
    """A language model in this process. Call `close` when done, or use a ``with`` block."""

    def generate(
        self,
        prompts: Sequence[Text],
        *,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        greedy: bool = False,
        stop: Sequence[str] = (),
        seed: int = 1234,
    ) -> list[str]:
        """Generate one response for each prompt. Returns texts without the end token.

        Args:
            prompts: texts, or lists of chat messages. Equal prompts are sampled independently.
            max_new_tokens: maximum number of tokens in a response.
            temperature: divisor of the logits.
            top_p: sample from the fewest most probable tokens with a total of at least ``top_p``.
            top_k: number of most probable tokens to sample from. 0 means all tokens.
            greedy: always select the most probable token.
            stop: a string or strings that end a response.
            seed: random seed. The same seed and prompts give the same responses.

        Raises:
            DataError: a prompt is neither text nor messages.
            ConfigError: an option has an invalid value, or a prompt is too long.
        """
        # Settings of this call, checked as those of a configuration.
        sampling_params = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "use_greedy": greedy,
            "end_strings": [stop] if isinstance(stop, str) else list(stop),
        }
        options = SamplingOptions(
            build(LengthParams, {"max_length": max_new_tokens, "min_length": 1}, "generate"),
            build(SamplingParams, sampling_params, "generate"),
        )
        # Prompts, and the room that they leave in the model.
        dataset = PromptDataset(self._prompts(prompts))
        if not len(dataset):
            return []
        positions = self._loaded.architecture.max_position_embeddings
        if dataset.max_length + max_new_tokens > positions:
            raise ConfigError(
                f"max_new_tokens={max_new_tokens}: the longest prompt has {dataset.max_length} "
                f"tokens, and the model has {positions} positions. Lower max_new_tokens"
            )
        sampling = self._loaded.sampling(self._role, 1)
        sampling = replace(sampling, seed=seed, sampling_options=options)
        return response_texts(self.tokenizer, sample_responses(sampling, dataset))

    def logprobs(self, prompts: Sequence[Text], responses: Sequence[str]) -> list[list[float]]:
        """Return one list per response: the log-prob of each token, at temperature 1.

        Args:
            prompts: texts, or lists of chat messages.
            responses: one text per prompt. Prompt and response are tokenized separately.
        """
        prepare, compute = self._role.prepare_for_lp_inference, self._role.get_logprobs
        return self._token_values("logprobs", prepare, compute, prompts, responses)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a ``.nemo`` file if ``path`` ends in ``.nemo``, else a Hugging Face directory.

        Returns ``path``. Raises `ConfigError` if ``path`` exists, or the model has no such form.
        """
        self._refuse_if_closed()
        suffix = self._loaded.architecture.suffix
        target = new_path(path, has_nemo_form=bool(suffix))
        if suffix in ("", target.suffix):
            self._role.save_checkpoint(str(target))
            return target
        with tempfile.TemporaryDirectory() as folder:
            nemo = Path(folder) / "model.nemo"
            self._role.save_checkpoint(str(nemo))
            nemo_to_hf(nemo, target)
        return target


class CriticModel(_Loaded[Value]):
    """A run's critic in this process. Call `close` when done, or use a ``with`` block."""

    def values(self, prompts: Sequence[Text], responses: Sequence[str]) -> list[list[float]]:
        """Return one list per response: the return that the critic predicts before each token.

        ``prompts`` and ``responses``: as in `Model.logprobs`.
        """
        prepare, compute = self._role.prepare_for_inference, self._role.get_values
        return self._token_values("values", prepare, compute, prompts, responses)


def new_path(path: str | os.PathLike[str], *, has_nemo_form: bool) -> Path:
    """Expand ``~`` in ``path`` and create the parent directories.

    Raises `ConfigError` if ``path`` exists, has a file as parent, or is a ``.nemo`` file although
    the model has no such form.
    """
    target = Path(path).expanduser()
    if target.exists():
        raise ConfigError(f"path={target} exists. Give the name of a new file or directory")
    if target.suffix == ".nemo" and not has_nemo_form:
        raise ConfigError(f"path={target}: the model has no .nemo form. Remove the ending .nemo")
    with raised_as(ConfigError, f"path={target}", FileExistsError, NotADirectoryError):
        target.parent.mkdir(parents=True, exist_ok=True)
    return target


def load_model(path: str | os.PathLike[str], *, download: bool = False) -> Model:
    """Load a ``.nemo`` file, a Hugging Face directory, or the newest state of a run's directory.

    ``path`` may also be a model name on the Hugging Face hub. Such a model must be in the local
    cache, unless ``download`` is true. Raises `CheckpointError` if ``path`` contains no language
    model.
    """
    with ExitStack() as closing, _unchanged(), quiet():
        loaded = _open(path, closing, download)
        policy, _ = loaded.start(1, print)
        assert isinstance(policy, Policy), "without an engine the policy generates"
        return Model(loaded, policy, closing.pop_all())


def load_critic(folder: str | os.PathLike[str]) -> CriticModel | None:
    """Load the critic from a run's newest state. Returns None if the run has no critic."""
    states = RunStateStore(Path(folder).expanduser() / "run_state").states()
    if not states or not (states[-1].path / "value").is_dir():
        return None
    state = states[-1].path
    config = parse_config(RunStateStore(state.parent).load(state).state["config"], RunConfig)
    if config.critic is None:
        return None
    # This process holds the complete critic, whatever the layout of the run was.
    single: dict[str, Any] = {**dict.fromkeys(LAYOUT_KEYS, 1), "sequence_parallel": False}
    unset: dict[str, Any] = dict.fromkeys(LAYOUT_KEYS)
    model = replace(config.model, **single | dict.fromkeys(STAGE_KEYS))
    with ExitStack() as closing, _unchanged(), quiet():
        loaded = _open(folder, closing)
        value = Value(
            loaded.engine.clusters(closing).value,
            replace(config.critic, **unset),
            loaded.tokenizer,
            init_optimizer=False,
            model=model,
            run=run_settings(config),
            backend=config.policy.backend,
        )
        closing.callback(value.shutdown)
        value.load_state(state / "value")
        return CriticModel(loaded, value, closing.pop_all())


def _open(
    path: str | os.PathLike[str], closing: ExitStack, download: bool = False
) -> InferenceModel:
    model = {"restore_from_path": os.path.expanduser(os.fspath(path))}
    values = {"model": model, "sampling": {"max_length": 1}, "download": download}
    closing.enter_context(_groups())
    return open_model(build(AskConfig, values, ""), closing)


@contextmanager
def _unchanged() -> Iterator[None]:
    """Restore the random generators and ``sys.excepthook`` after the block."""
    hook, python_state, numpy_state = sys.excepthook, random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        sys.excepthook = hook  # torch.distributed would print the rank before every line


@contextmanager
def _groups() -> Iterator[None]:
    """Destroy the process groups when the last model closes, unless the caller made them."""
    global _open_models
    had_groups = torch.distributed.is_initialized() and _open_models == 0
    _open_models += 1
    try:
        yield
    finally:
        _open_models -= 1
        if _open_models == 0 and not had_groups:
            shutdown_parallel()
