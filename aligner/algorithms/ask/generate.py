"""Prompts in, answers out; and a conversation in the terminal."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from aligner.algorithms.ask.model import AskedModel, open_asked_model, write_answers
from aligner.algorithms.rollout.validation import ask
from aligner.config import GenerateConfig
from aligner.data.chat import Message, parse_messages, render, with_system
from aligner.data.prompts import PromptDataset, make_prompt
from aligner.data.readers import Row
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.decoding import IncrementalDecoder
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, DataError, TokenizerError
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.collectives import is_rank_zero, on_rank_zero
from aligner.rewards.sequences import response_texts

RESET, HELP = "/reset", "/help"
_HELP = f"Ctrl-D ends; {RESET} forgets the conversation; Ctrl-C stops an answer"


def generate(config: GenerateConfig) -> None:
    """Answer prompts, or chat, as configured."""
    with ExitStack() as closing:
        asked = open_asked_model(config, closing)
        if config.chat:
            return Chat(config, asked).run()
        sets = list(_sets(config, asked.tokenizer))
        longest = max(prompts.max_length for _, prompts in sets)
        asked.check_room(longest)
        console = Console(stderr=True, quiet=not is_rank_zero(), highlight=False)
        engine, _ = asked.start(longest, console.print)
        asking = asked.asking(engine, config.sampling.samples_per_prompt)
        lines = []
        for name, prompts in sets:
            answered = ask(asking, prompts)
            texts = response_texts(asked.tokenizer, answered)
            lines += list(_lines(name, prompts, answered, texts, asking.samples_per_prompt))
        on_rank_zero(lambda: _write(config.output, lines, console))
    return None


def _sets(config: GenerateConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, PromptDataset]]:
    """Prompts by the name of their set; a ground truth is a column like others."""
    data = config.data
    if config.prompt:
        rows = (
            Row(f"--prompt {number}", {data.prompt_column: text})
            for number, text in enumerate(config.prompt, start=1)
        )
        made = [make_prompt(row, i, tokenizer, data) for i, row in enumerate(rows)]
        yield "", PromptDataset(made)
    if data.prompts is not None:
        yield "", PromptDataset.load(data.prompts, tokenizer, data, has_ground_truth=False)
    for name, source in data.sets.items():
        yield name, PromptDataset.load(source, tokenizer, data, has_ground_truth=False)


def _lines(
    name: str,
    prompts: PromptDataset,
    answered: BatchedDataDict,
    texts: list[str],
    samples_per_prompt: int,
) -> Iterator[dict[str, Any]]:
    """One JSON object for each response, the columns of its row among its keys."""
    lengths = (answered["input_lengths"] - answered["prompt_lengths"]).tolist()
    for row, text in enumerate(texts):
        prompt = prompts[row // samples_per_prompt]
        yield {
            **prompt.columns,
            **({"set": name} if name else {}),
            "prompt": prompt.text,
            "response": text,
            "sample": row % samples_per_prompt,
            "tokens": lengths[row],
            "is_end": bool(answered["is_end"][row]),
        }


def _write(output: str | None, lines: list[dict[str, Any]], console: Console) -> None:
    if output is None:
        for number, line in enumerate(lines):
            if len(lines) > 1:
                print(("" if number == 0 else "\n") + f"> {line['prompt']}")
            print(line["response"])
        return
    path = Path(output).expanduser()
    write_answers(path, lines)
    console.print(f"{len(lines)} answers: {path}", soft_wrap=True)


class Chat:
    """A conversation: the model's chat template, its end tokens, answers as they are drawn.

    Args:
        config: the command's options.
        asked: the model.
        read: returns the user's message; `EOFError` ends the conversation.
        write: takes text as it comes.
    """

    def __init__(
        self,
        config: GenerateConfig,
        asked: AskedModel,
        read: Callable[[], str] | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        self._config, self._asked = config, asked
        self._read = read or (lambda: input("you> "))
        self._write = write or (lambda text: print(text, end="", flush=True))
        self._messages: list[Message] = []
        self._turns = 0

    def run(self) -> None:
        """Run the conversation until the user ends it."""
        # Refused before the weights are loaded: a model without a template cannot converse.
        self._prompt_ids([{"role": "user", "content": "?"}])
        positions = self._asked.architecture.max_position_embeddings
        room = positions - self._config.sampling.max_length
        if room < 1:
            raise ConfigError(
                f"sampling.max_length={self._config.sampling.max_length} leaves no room for a "
                f"prompt: the model has {positions} positions; lower it"
            )
        engine, _ = self._asked.start(room, lambda text: self._write(f"{text}\n"))
        self._write(f"{self._asked.source.name}. {_HELP}\n")
        while True:
            try:
                said = self._read().strip()
            except (EOFError, KeyboardInterrupt):
                self._write("\n")
                return
            if said == RESET:
                self._messages = []
                self._write("(forgotten)\n")
            elif said == HELP:
                self._write(f"{_HELP}\n")
            elif said:
                self._answer(engine, said, room)

    def _answer(self, engine: Any, said: str, room: int) -> None:
        tokenizer, policy = self._asked.tokenizer, self._config.data.special_tokens_in_text
        try:
            said = treat_special_tokens(tokenizer, said, policy, "the message")
        except DataError as error:
            self._write(f"({error})\n")
            return
        messages = [*self._messages, {"role": "user", "content": said}]
        ids = self._prompt_ids(messages)
        if len(ids) > room:
            self._write(f"({len(ids)} tokens do not fit {room}; {RESET} begins anew)\n")
            return
        decoder = IncrementalDecoder(self._asked.tokenizer, ids)
        ends, drawn, shown = set(self._asked.tokenizer.end_ids), [], []

        def listen(row: int, token: int, logprob: float = 0.0) -> None:
            del row, logprob
            drawn.append(token)
            if token not in ends:
                shown.append(decoder.push(token))
                self._write(shown[-1])

        data: BatchedDataDict = BatchedDataDict(
            {
                "input_ids": torch.tensor([ids]),
                "input_lengths": torch.tensor([len(ids)]),
                "sample_ids": torch.tensor([self._turns]),
            }
        )
        streams = isinstance(engine, Policy) and self._asked.run.cluster.engine == "local"
        try:
            engine.prepare_for_generation()
            options = {"listener": listen} if streams else {}
            output = engine.generate(data, seed=self._config.seed, **options).to("cpu")
        except KeyboardInterrupt:
            self._write(" (stopped)")
        else:
            if not streams:
                start, end = len(ids), int(output["unpadded_sequence_lengths"][0])
                for token in output["output_ids"][0, start:end].tolist():
                    listen(0, token)
        finally:
            engine.finish_generation()
        shown.append(decoder.flush())
        self._write(f"{shown[-1]}\n")
        self._turns += 1
        self._messages = [*messages, {"role": "assistant", "content": "".join(shown)}]

    def _prompt_ids(self, messages: list[Message]) -> list[int]:
        tokenizer = self._asked.tokenizer
        system = self._config.data.system_prompt
        try:
            text = render(tokenizer, with_system(parse_messages(messages), system))
        except TokenizerError as error:
            raise TokenizerError(
                f"{error}; a model without a chat template completes text: give --prompt TEXT"
            ) from error
        ids = tokenizer.encode(text)
        bos = tokenizer.bos_id
        if self._config.data.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids
