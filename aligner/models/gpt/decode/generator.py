"""`Generator`: samples responses with a model in this process, with continuous batching.

A step samples one token for each sequence in flight. If a sequence ends, a pending sequence gets
its slot. The tokens of a sample depend only on its prompt, the seed and its sample id: random
numbers are counter-based (`sampling`), and on a CPU every operation computes a row bit for bit
independently of the others. All processes of a model-parallel group get the same result.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.data.tokenizers.decoding import StopStrings
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device.accelerator import HostCopy
from aligner.errors import ConfigError, DataError
from aligner.models.gpt.decode.model import (
    DecodingModel,
    IncrementalModel,
    SampledModel,
    synchronized_experts,
)
from aligner.models.gpt.decode.responses import PromptRows, Responses, RolloutRules, with_headroom
from aligner.models.gpt.decode.scheduler import Rollout, TokenListener, WideNucleusError
from aligner.models.gpt.decode.scored import ScoredModel

_MAX_CACHED_RULES = 2  # sets of rules whose CUDA graphs are kept: training and validation


class GenerationOutput(NamedTuple):
    """Prompts with their sampled responses."""

    tokens: Tensor  # int64 [B, S], prompt and response, right-padded
    lengths: Tensor  # int64 [B], prompt + response
    prompt_lengths: Tensor  # int64 [B]
    logprobs: Tensor  # float32 [B, S], log-probs of the response's tokens, 0 elsewhere
    is_end: Tensor  # bool [B], the response ended by EOS or a stop string
    # int32 [B, S, K], ids of the tokens that top-k and top-p kept at each position, padded with -1.
    # All are -1 if more than K tokens were kept. None if not recorded.
    kept_ids: Tensor | None = None


class Generator:
    """Samples responses with the current weights of a model."""

    def __init__(
        self,
        model: GPTModel | SampledModel,
        architecture: GPTArchitecture,
        tokenizer: Tokenizer | None = None,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        length: LengthParams,
        sampling: SamplingParams,
        max_batch_size: int,
        cuda_graphs: bool = True,
        record_kept: int = 0,
    ) -> None:
        """Configure the generator. `sample` allocates its memory.

        ``tokenizer``: required for stop strings. ``eos_ids``: tokens that end a response.
        ``max_batch_size``: maximum number of sequences in flight. ``cuda_graphs``: launch decoding
        steps as CUDA graphs, if the model is dense and on one GPU. ``record_kept``: maximum number
        of ids, kept by top-k and top-p, to record at each position (0: none).

        Raises ConfigError for invalid lengths, ids or stop strings.
        """
        outside = [token for token in eos_ids if not 0 <= token < architecture.vocab_size]
        if outside:
            raise ConfigError(
                f"end-of-sequence ids {outside} are outside the vocabulary of "
                f"{architecture.vocab_size} tokens. Use the tokenizer of the model"
            )
        is_gpt = isinstance(model, GPTModel)
        decoder = ScoredModel if architecture.is_scored else IncrementalModel
        self._sampled = SampledModel.of_gpt(model, architecture, decoder) if is_gpt else model
        self._architecture = architecture
        self._eos_ids = tuple(eos_ids)
        self._pad_id = pad_id
        self._tokenizer = tokenizer
        self._sampling_options = SamplingOptions(length, sampling)
        self._max_batch_size = max_batch_size
        self._stop = self._stop_strings(self._sampling_options)
        self._cuda_graphs = cuda_graphs
        self._record_kept = record_kept
        self._may_wait = False  # true after a nucleus has required to synchronise within a step
        # Memory that CUDA graphs read between rollouts. Responses by rules, last used last.
        self._model: DecodingModel | None = None
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
        """Sample responses to prompts.

        ``prompts``: int64 [B, P], right-padded. ``prompt_lengths``: int64 [B], at least 1.
        ``sample_ids``: int64 [B]. Rows with the same prompt and id get the same response.
        ``greedy``: default ``sampling.use_greedy``. ``sampling_options``: default as configured.
        ``listener``: called with every sampled token.

        Raises ConfigError if prompt and response exceed the model's positions, and DataError for an
        empty prompt or an id outside the vocabulary.
        """
        stop = self._stop if sampling_options is None else self._stop_strings(sampling_options)
        sampling_options = sampling_options or self._sampling_options
        length, sampling = sampling_options.length, sampling_options.sampling
        device = next(self._sampled.model.parameters()).device
        batch = PromptRows(prompts.to(device), prompt_lengths.to(device), sample_ids.to(device))
        # The only synchronisation before the first token.
        tokens, lengths = HostCopy(prompts, prompt_lengths).wait()
        self._check_prompts(tokens, lengths, length)
        rows = [tuple(row[:n]) for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
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
        # Generate, and cut the result to the longest response.
        rollout = self._roll_out(batch, rows, rules, stop, listener)
        longest = int(rollout.lengths.max()) if rows else 0
        return GenerationOutput(
            rollout.tokens[:, :longest].clone(),
            rollout.lengths.clone(),
            batch.lengths,
            rollout.logprobs[:, :longest].clone(),
            rollout.is_end,
            rollout.kept_ids[:, :longest].clone() if rules.record_kept else None,
        )

    def _roll_out(
        self,
        prompts: PromptRows,
        rows: Sequence[tuple[int, ...]],
        rules: RolloutRules,
        stop: StopStrings | None,
        listener: TokenListener | None,
    ) -> Rollout:
        """Sample responses to ``prompts``. ``rows``: token ids of each prompt without padding."""
        # Modes: on a GPU the host runs ahead of the device, which CUDA graphs require.
        ahead = _runs_ahead(prompts.tokens.device) and not self._sampled.is_pipelined
        may_wait = not ahead or self._may_wait
        captured = self._cuda_graphs and not may_wait

        def new_rollout(responses: Responses, may_wait: bool) -> Rollout:
            return Rollout(
                responses,
                rows,
                rules,
                stop=stop,
                listener=listener,
                runs_ahead=ahead,
                may_wait=may_wait,
                captured=captured and not may_wait,
            )

        num_slots, keep_graphs = min(self._max_batch_size, len(rows)), False
        with synchronized_experts(self._sampled.model):
            if num_slots == 0:
                return new_rollout(Responses(prompts, rules), may_wait)
            # Memory: with graphs, the memory of an earlier rollout if possible.
            capacity = max(map(len, rows)) + rules.length.max_length
            model = self._model_for(num_slots, capacity, captured)
            responses = self._responses_for(prompts, rules, captured)
            rollout = new_rollout(responses, may_wait)
            # If a nucleus has too many tokens for a step without synchronisation, start again.
            try:
                with model.session():
                    try:
                        rollout.run(model, num_slots)
                    except WideNucleusError:
                        self._may_wait = True
                        second = new_rollout(Responses(prompts, rules), may_wait=True)
                        second.num_reported, rollout = rollout.num_reported, second
                        rollout.run(model, num_slots)
                    keep_graphs = captured and not self._may_wait and model.can_be_kept
            finally:
                if not keep_graphs:
                    responses.forget_graphs()
                    self.release()
            self._broadcast_from_first_copy(rollout)
        return rollout

    def release(self) -> None:
        """Free the graphs kept between rollouts, and the memory that graphs read and write."""
        self._model, self._responses = None, {}

    def _model_for(self, num_slots: int, capacity: int, captured: bool) -> DecodingModel:
        """Return a model whose cache is large enough. With CUDA graphs, reuse the last model."""
        # Graphs contain addresses: neither the weights nor the cache may have moved.
        weights = tuple(parameter.data_ptr() for parameter in self._sampled.model.parameters())
        last = self._model if captured and weights == self._weights else None
        if last is not None and last.cache.fits(num_slots, capacity):
            return last
        self.release()
        self._weights = weights
        capacity = with_headroom(capacity) if captured else capacity
        self._model = self._sampled.decoder(num_slots, capacity)
        return self._model

    def _responses_for(self, prompts: PromptRows, rules: RolloutRules, captured: bool) -> Responses:
        """Allocate responses. With CUDA graphs, reuse the memory of an earlier rollout."""
        if not captured:
            return Responses(prompts, rules)
        key = dataclasses.replace(rules, seed=0)
        last = self._responses.pop(key, None)
        columns = with_headroom(prompts.tokens.shape[1] + rules.length.max_length)
        shape = (0, columns) if last is None else last.tokens.shape
        responses = Responses(prompts, rules, shape)
        if last is not None and responses.tokens.shape == shape:
            last.refill(responses)
            responses = last
        for old_rules in list(self._responses)[: 1 - _MAX_CACHED_RULES]:
            del self._responses[old_rules]
        self._responses[key] = responses
        return responses

    def _broadcast_from_first_copy(self, rollout: Rollout) -> None:
        """Send results from the first of the ranks that sample the same sequences to the others."""
        # Results of some libraries differ in the last bits between runs.
        group = self._sampled.copies
        if group is not None and dist.get_world_size(group) > 1:
            results = [rollout.tokens, rollout.logprobs, rollout.lengths, rollout.is_end]
            for result in [*results, *([rollout.kept_ids] if rollout.kept_ids.numel() else [])]:
                dist.broadcast(result, group=group, group_src=0)

    def _stop_strings(self, sampling_options: SamplingOptions) -> StopStrings | None:
        """Check the options and return the matcher of stop strings, if any."""
        length, sampling = sampling_options.length, sampling_options.sampling
        positions = self._architecture.max_position_embeddings
        problem = ""
        if not 1 <= length.max_length < positions:
            problem = (
                f"length_params.max_length={length.max_length} must be at least 1 and below the "
                f"model's {positions} positions, of which the prompt needs at least one"
            )
        elif length.min_length > length.max_length:
            problem = (
                f"length_params.min_length={length.min_length} is above "
                f"length_params.max_length={length.max_length}. Lower min_length"
            )
        elif not all(sampling.end_strings):
            problem = "sampling_params.end_strings contains an empty string. Remove it"
        elif sampling.end_strings and self._tokenizer is None:
            problem = (
                "sampling_params.end_strings need a tokenizer, but the model was built without "
                "one. Build it with a tokenizer, or remove end_strings"
            )
        if problem:
            raise ConfigError(problem)
        if self._tokenizer is None or not sampling.end_strings:
            return None
        return StopStrings(self._tokenizer, sampling.end_strings)

    def _check_prompts(self, prompts: Tensor, lengths: Tensor, length: LengthParams) -> None:
        if prompts.shape[0] == 0:
            return
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 1 or longest > prompts.shape[1]:
            raise DataError(
                f"prompt_lengths are between {shortest} and {longest}. Each must be at least 1 and "
                f"at most {prompts.shape[1]}, the number of columns of prompts"
            )
        positions = self._architecture.max_position_embeddings
        if longest + length.max_length > positions:
            raise ConfigError(
                f"length_params.max_length={length.max_length}: a prompt of {longest} tokens and "
                f"its response exceed the model's {positions} positions. Set max_length to at most "
                f"{positions - longest}, or drop longer prompts"
            )
        valid = torch.arange(prompts.shape[1]) < lengths[:, None]
        ids = prompts[valid]
        if int(ids.min()) < 0 or int(ids.max()) >= self._architecture.vocab_size:
            raise DataError(
                f"prompts contain token ids from {int(ids.min())} to {int(ids.max())}, but the "
                f"vocabulary size is {self._architecture.vocab_size}. Use the model's tokenizer"
            )


def _runs_ahead(device: torch.device) -> bool:
    """Return whether calls only launch kernels, so that the host can run ahead of the device."""
    return device.type != "cpu"
