"""The sampling engine inside the actor: all prompts of a rollout in flight together.

Every step adds one token to each sequence in flight. A sequence that ends leaves the batch at once
and a waiting one takes its slot. The tokens of a sample depend on its prompt, the seed and its
sample id only: the uniform numbers are counter-based (`sampling`), and on CPU every operation on
a row gives the same bits whatever the other rows are (`kv_cache`, `linear_product`). Where a
library does not keep that promise (other processors, GPUs), logits differ in the last bits and a
token changes only if its uniform number falls within that distance of a boundary.

All processes of a model-parallel group call `sample` with the same prompts and get the same
result: tensor-parallel ranks share every layer, pipeline stages pass rows on, and context-parallel
ranks each do the whole work, for sequences are not split.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.data.tokenizers.decoding import StopStrings
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.device.accelerator import HostCopy
from aligner.errors import ConfigError, DataError
from aligner.models.gpt.decode.model import IncrementalModel
from aligner.models.gpt.decode.responses import Prompts, Responses, RolloutRules, with_room
from aligner.models.gpt.decode.scheduler import Rollout, TokenListener, WideNucleusError

_KEPT_RULES = 2  # graphs are kept for: those of training and of validation


class GenerationOutput(NamedTuple):
    """``tokens`` int64 [B, S] prompt and response, right-padded; ``lengths`` int64 [B] prompt +
    response; ``prompt_lengths`` int64 [B]; ``logprobs`` float32 [B, S] of the response's tokens as
    they were drawn, 0 elsewhere; ``is_end`` bool [B], the response ended by itself; ``kept_ids``
    int32 [B, S, K] what top-k and top-p left, -1 behind it and where nothing is known; None: not
    recorded.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    logprobs: Tensor
    is_end: Tensor
    kept_ids: Tensor | None = None


class Generator:
    """Continues prompts with the weights the model has at the time of the call."""

    def __init__(
        self,
        gpt: GPTModel,
        architecture: GPTArchitecture,
        tokenizer: Tokenizer | None = None,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        length: LengthParams,
        sampling: SamplingParams,
        max_batch_size: int,
        tp_group: dist.ProcessGroup | None = None,
        cuda_graphs: bool = True,
        record_kept: int = 0,
    ) -> None:
        """Set up; nothing is allocated before `sample`.

        Args:
            gpt: the model, whole or this process's share of it.
            architecture: its shape.
            tokenizer: needed for stop strings.
            eos_ids: tokens that end a response.
            pad_id: fills ``tokens`` behind the end; may equal an EOS id.
            length: fewest and most new tokens.
            sampling: how tokens are drawn, and the stop strings.
            max_batch_size: most sequences in flight together.
            tp_group: ranks that share the vocabulary; None: the model's own tensor-parallel group.
            cuda_graphs: on a GPU, launch decoding steps as CUDA graphs, where one process holds
                the model and all layers are dense. The tokens are the same without.
            record_kept: most tokens left by top-k and top-p that are recorded with each sampled;
                where more are left, none is. 0: off.

        Raises:
            ConfigError: lengths, ids or stop strings that cannot work.
        """
        if max_batch_size < 1:
            raise ConfigError(f"rollout_micro_batch_size={max_batch_size} must be at least 1")
        outside = [token for token in eos_ids if not 0 <= token < architecture.vocab_size]
        if outside:
            raise ConfigError(
                f"end-of-sequence ids {outside} are outside the vocabulary of "
                f"{architecture.vocab_size}; use the model's own tokenizer"
            )
        self._gpt = gpt
        self._architecture = architecture
        self._eos_ids = tuple(eos_ids)
        self._pad_id = pad_id
        self._tokenizer = tokenizer
        self._sampling_options = SamplingOptions(length, sampling)
        self._max_batch_size = max_batch_size
        self._tp_group = tp_group or gpt.pg_collection.tp
        self._stop = self._stop_strings(self._sampling_options)
        self._cuda_graphs = cuda_graphs
        self._record_kept = record_kept
        self._waits = False  # for the device within a step; once a nucleus needed it, always
        # Between rollouts, for their graphs; responses by rules, those used last at the end.
        self._model: IncrementalModel | None = None
        self._weights: tuple[int, ...] = ()
        self._responses: dict[RolloutRules, Responses] = {}

    def sample(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_ids: Tensor,
        seed: int,
        greedy: bool | None = None,
        sampling_options: SamplingOptions | None = None,
        listener: TokenListener | None = None,
    ) -> GenerationOutput:
        """Continue prompts.

        Args:
            prompts: int64 [B, P], right-padded.
            prompt_lengths: int64 [B], each at least 1.
            sample_ids: int64 [B]; two rows with the same prompt and id get the same response.
            seed: of the counter-based uniform numbers.
            greedy: overrides ``sampling.use_greedy``.
            sampling_options: lengths and sampling of this call; default those of the generator.
            listener: called with every token as it is drawn.

        Raises:
            ConfigError: a prompt and the longest response do not fit the model; nothing has run.
            DataError: a prompt is empty or holds an id outside the vocabulary.
        """
        stop = self._stop if sampling_options is None else self._stop_strings(sampling_options)
        sampling_options = sampling_options or self._sampling_options
        length, sampling = sampling_options.length, sampling_options.sampling
        device = next(self._gpt.parameters()).device
        batch = Prompts(prompts.to(device), prompt_lengths.to(device), sample_ids.to(device))
        # The only wait for the device before the first token.
        here, lengths = HostCopy(prompts, prompt_lengths).wait()
        self._check_prompts(here, lengths, length)
        rows = [tuple(row[:n]) for row, n in zip(here.tolist(), lengths.tolist(), strict=True)]
        rules = RolloutRules(
            seed=seed,
            greedy=sampling.use_greedy if greedy is None else greedy,
            vocab_size=self._architecture.vocab_size,
            eos_ids=self._eos_ids,
            pad_id=self._pad_id,
            length=length,
            sampling=sampling,
            record_kept=self._record_kept if sampling.top_k > 0 or sampling.top_p < 1 else 0,
        )
        rollout = self._rolled_out(batch, rows, rules, stop, listener)
        longest = int(rollout.lengths.max()) if rows else 0
        return GenerationOutput(
            rollout.tokens[:, :longest].clone(),
            rollout.lengths.clone(),
            batch.lengths,
            rollout.logprobs[:, :longest].clone(),
            rollout.is_end,
            rollout.kept_ids[:, :longest].clone() if rules.record_kept else None,
        )

    def _rolled_out(
        self,
        prompts: Prompts,
        rows: Sequence[tuple[int, ...]],
        rules: RolloutRules,
        stop: StopStrings | None,
        listener: TokenListener | None,
    ) -> Rollout:
        """Rollout of ``prompts`` at its end; ``rows``: the tokens of each, without padding."""
        pipeline = dist.get_world_size(self._gpt.pg_collection.pp) > 1
        ahead = _runs_ahead(prompts.tokens.device) and not pipeline
        waits = not ahead or self._waits
        captured = self._cuda_graphs and not waits

        def begin(responses: Responses, waits: bool) -> Rollout:
            return Rollout(
                responses,
                rows,
                rules,
                stop=stop,
                listener=listener,
                runs_ahead=ahead,
                waits=waits,
                captured=captured and not waits,
            )

        num_slots, keeps = min(self._max_batch_size, len(rows)), False
        with experts_in_step(self._gpt):
            if num_slots == 0:
                return begin(Responses(prompts, rules), waits)
            model = self._model_of(
                num_slots, max(map(len, rows)) + rules.length.max_length, captured
            )
            responses = (
                self._responses_of(prompts, rules) if captured else Responses(prompts, rules)
            )
            rollout = begin(responses, waits)
            try:
                with model.session():
                    try:
                        rollout.run(model, num_slots)
                    except WideNucleusError:
                        self._waits = True
                        again = begin(Responses(prompts, rules), waits=True)
                        again.heard, rollout = rollout.heard, again
                        rollout.run(model, num_slots)
                    keeps = captured and not self._waits and model.can_be_kept
            finally:
                if not keeps:
                    responses.forget_graphs()
                    self.release()
            self._take_from_first_context_rank(rollout)
        return rollout

    def release(self) -> None:
        """Free what is kept between rollouts: graphs, and the memory that they read and write."""
        self._model, self._responses = None, {}

    def _model_of(self, num_slots: int, capacity: int, captured: bool) -> IncrementalModel:
        """The model with a cache of so many slots; the last one where that will do.

        It will not where weights have moved: graphs have their addresses.
        """
        weights = tuple(parameter.data_ptr() for parameter in self._gpt.parameters())
        kept = self._model if captured and weights == self._weights else None
        if kept is not None and kept.cache.holds(num_slots, capacity):
            return kept
        self.release()
        self._weights = weights
        self._model = IncrementalModel(
            self._gpt,
            self._architecture,
            num_slots=num_slots,
            capacity=with_room(capacity) if captured else capacity,
            tp_group=self._tp_group,
        )
        return self._model

    def _responses_of(self, prompts: Prompts, rules: RolloutRules) -> Responses:
        """Room for responses, the last one's by the same rules where it is large enough."""
        key = dataclasses.replace(rules, seed=0)
        kept = self._responses.pop(key, None)
        columns = with_room(prompts.tokens.shape[1] + rules.length.max_length)
        shape = (0, columns) if kept is None else kept.tokens.shape
        responses = Responses(prompts, rules, shape)
        if kept is not None and responses.tokens.shape == shape:
            kept.refill(responses)
            responses = kept
        for old in list(self._responses)[: 1 - _KEPT_RULES]:
            del self._responses[old]
        self._responses[key] = responses
        return responses

    def _take_from_first_context_rank(self, rollout: Rollout) -> None:
        """Make the copies one, where a library's last bits differ from run to run."""
        group = self._gpt.pg_collection.cp
        if dist.get_world_size(group) > 1:
            results = [rollout.tokens, rollout.logprobs, rollout.lengths, rollout.is_end]
            for result in [*results, *([rollout.kept_ids] if rollout.kept_ids.numel() else [])]:
                dist.broadcast(result, group=group, group_src=0)

    def _stop_strings(self, sampling_options: SamplingOptions) -> StopStrings | None:
        """Finder of the stop strings, where there are any; settings that cannot work are refused.

        Raises:
            ConfigError: as in the constructor.
        """
        _check_drawing(self._architecture, self._tokenizer, sampling_options)
        if not sampling_options.sampling.end_strings:
            return None
        assert self._tokenizer is not None
        return StopStrings(self._tokenizer, sampling_options.sampling.end_strings)

    def _check_prompts(self, prompts: Tensor, lengths: Tensor, length: LengthParams) -> None:
        """Check prompts, which are on the host; raises the errors of `sample`."""
        if prompts.shape[0] == 0:
            return
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 1 or longest > prompts.shape[1]:
            raise DataError(
                f"prompt_lengths are between {shortest} and {longest}; a prompt has at least 1 "
                f"token and at most the {prompts.shape[1]} columns of prompts"
            )
        room = self._architecture.max_position_embeddings
        if longest + length.max_length > room:
            raise ConfigError(
                f"length_params.max_length={length.max_length}: with a prompt of {longest} "
                f"tokens the response does not fit the model's {room} positions; use at most "
                f"{room - longest} or drop longer prompts"
            )
        valid = torch.arange(prompts.shape[1]) < lengths[:, None]
        ids = prompts[valid]
        if int(ids.min()) < 0 or int(ids.max()) >= self._architecture.vocab_size:
            raise DataError(
                f"prompts hold token ids from {int(ids.min())} to {int(ids.max())} and the "
                f"vocabulary has {self._architecture.vocab_size}; use the model's own tokenizer"
            )


def _runs_ahead(device: torch.device) -> bool:
    """Return whether waiting for a step would cost time: a CPU computes within the call."""
    return device.type != "cpu"


def _check_drawing(
    architecture: GPTArchitecture, tokenizer: Tokenizer | None, sampling_options: SamplingOptions
) -> None:
    length, sampling = sampling_options.length, sampling_options.sampling
    room = architecture.max_position_embeddings
    if not 1 <= length.max_length < room:
        raise ConfigError(
            f"length_params.max_length={length.max_length} must be at least 1 and below the "
            f"model's {room} positions, of which the prompt needs one or more"
        )
    if length.min_length > length.max_length:
        raise ConfigError(
            f"length_params.min_length={length.min_length} is above "
            f"length_params.max_length={length.max_length}; lower it"
        )
    if not all(sampling.end_strings):
        raise ConfigError("sampling_params.end_strings holds an empty string; remove it")
    if sampling.end_strings and tokenizer is None:
        raise ConfigError(
            "sampling_params.end_strings need a tokenizer; the model was built without one"
        )


@contextlib.contextmanager
def experts_in_step(gpt: GPTModel) -> Iterator[None]:
    """The block in which this rank may run any number of forward passes; collective.

    Every expert layer exchanges tokens with the other ranks of its group, so a rank may only run
    one while all others run the same one, with any number of tokens. Ranks that generate stop at
    different times: each pass is announced, and a rank that has finished goes on with passes of the
    expert layers only, one token of zeros each, until all have.

    All ranks of the expert-parallel group must enter the block, and must not use the group for
    anything else inside. Nothing happens where no experts are shared out. An error inside does not
    wait for the other ranks.
    """
    layers = [layer.mlp for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]
    if not layers or layers[0].ep_group.size() == 1:
        yield
        return
    group = layers[0].ep_group

    def announce(*_: Any) -> None:
        _anyone_works(True, group)

    hook = gpt.decoder.register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    parameter = next(gpt.decoder.parameters())
    idle = parameter.new_zeros(1, 1, gpt.config.hidden_size)
    with torch.no_grad():
        while _anyone_works(False, group):
            for experts in layers:
                experts(idle)


def _anyone_works(this_rank: bool, group: dist.ProcessGroup) -> bool:
    working = torch.tensor([int(this_rank)], device=accelerator.device())
    dist.all_reduce(working, dist.ReduceOp.MAX, group=group)
    return bool(working.item())
