"""The command `generate`: answers to prompts, or a chat in the terminal."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from aligner.algorithms.ask.model import InferenceModel, open_model, write_answers
from aligner.algorithms.rollout.validation import sample_responses
from aligner.config import GenerateConfig
from aligner.data.chat import Message, parse_messages, render, with_system
from aligner.data.prompts import PromptDataset, make_prompt
from aligner.data.readers import DataRow
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.decoding import IncrementalDecoder, response_texts
from aligner.data.tokenizers.tokenizer import Tokenizer, with_bos
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, DataError, TokenizerError
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.collectives import is_rank_zero, on_rank_zero

RESET, HELP = "/reset", "/help"
_HELP = f"Ctrl-D ends. {RESET} forgets the conversation. Ctrl-C stops an answer"


def generate(config: GenerateConfig) -> None:
    """Answer the configured prompts, or chat in the terminal if ``config.chat`` is true."""
    with ExitStack() as closing:
        model = open_model(config, closing)
        if config.chat:
            return Chat(config, model).run()
        # Read and check the prompts, then load the weights.
        sets = list(_sets(config, model.tokenizer))
        longest = max(prompts.max_length for _, prompts in sets)
        model.check_room(longest)
        console = Console(stderr=True, quiet=not is_rank_zero(), highlight=False)
        engine, _ = model.start(longest, console.print)
        # Sample the responses, and write a line for each response.
        count = config.sampling.samples_per_prompt
        sampling, lines = model.sampling(engine, count), list[dict[str, Any]]()
        for name, prompts in sets:
            batch = sample_responses(sampling, prompts)
            lengths = (batch["input_lengths"] - batch["prompt_lengths"]).tolist()
            for row, text in enumerate(response_texts(model.tokenizer, batch)):
                prompt = prompts[row // count]
                line = {
                    "prompt": prompt.text,
                    "response": text,
                    "sample": row % count,
                    "tokens": lengths[row],
                    "is_end": bool(batch["is_end"][row]),
                }
                lines.append({**prompt.columns, **({"set": name} if name else {}), **line})
        on_rank_zero(lambda: _write(config.output, lines, console))
    return None


def _sets(config: GenerateConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, PromptDataset]]:
    """Yield name and prompts of each set. Prompts outside ``data.sets`` have the name ''."""
    data = config.data
    if config.prompt:
        items = []
        for index, text in enumerate(config.prompt):
            row = DataRow(f"--prompt {index + 1}", {data.prompt_column: text})
            items.append(make_prompt(row, index, tokenizer, data))
        yield "", PromptDataset(items)
    sources = {} if data.prompts is None else {"": data.prompts}
    for name, source in {**sources, **data.sets}.items():
        yield name, PromptDataset.load(source, tokenizer, data, has_ground_truth=False)


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
    """A chat in the terminal. ``read`` returns the user's message, or raises `EOFError` to end."""

    def __init__(
        self,
        config: GenerateConfig,
        model: InferenceModel,
        read: Callable[[], str] | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        self._config, self._model = config, model
        self._read = read or (lambda: input("you> "))
        self._write = write or (lambda text: print(text, end="", flush=True))
        self._messages: list[Message] = []
        self._turns = 0

    def run(self) -> None:
        """Read and answer messages until the user ends the chat."""
        # Raise an error before the weights are loaded if there is no chat template.
        self._prompt_ids([{"role": "user", "content": "?"}])
        positions = self._model.architecture.max_position_embeddings
        room = positions - self._config.sampling.max_length
        if room < 1:
            raise ConfigError(
                f"sampling.max_length={self._config.sampling.max_length} leaves no positions for a "
                f"prompt, because the model has {positions}. Lower sampling.max_length"
            )
        engine, _ = self._model.start(room, lambda text: self._write(f"{text}\n"))
        self._write(f"{self._model.source.name}. {_HELP}\n")
        while True:
            try:
                message = self._read().strip()
            except (EOFError, KeyboardInterrupt):
                self._write("\n")
                return
            if message == RESET:
                self._messages = []
                self._write("(forgotten)\n")
            elif message == HELP:
                self._write(f"{_HELP}\n")
            elif message:
                self._answer(engine, message, room)

    def _answer(self, engine: Any, message: str, room: int) -> None:
        """Print the answer to ``message``. ``room``: maximum length of the prompt, in tokens."""
        # Encode the conversation with the new message.
        tokenizer, treatment = self._model.tokenizer, self._config.data.special_tokens_in_text
        try:
            message = treat_special_tokens(tokenizer, message, treatment, "the message")
        except DataError as error:
            self._write(f"({error})\n")
            return
        messages = [*self._messages, {"role": "user", "content": message}]
        ids = self._prompt_ids(messages)
        if len(ids) > room:
            self._write(f"({len(ids)} tokens exceed the limit {room}. {RESET} starts a new chat)\n")
            return
        # Print each token when the engine reports it.
        decoder = IncrementalDecoder(tokenizer, ids)
        ends, texts = set(tokenizer.end_ids), list[str]()

        def listen(row: int, token: int, logprob: float = 0.0) -> None:
            del row, logprob
            if token not in ends:
                texts.append(decoder.push(token))
                self._write(texts[-1])

        columns = {"input_ids": [ids], "input_lengths": [len(ids)], "sample_ids": [self._turns]}
        tensors = {name: torch.tensor(rows) for name, rows in columns.items()}
        data: BatchedDataDict = BatchedDataDict(tensors)
        # Sample the answer. Ctrl-C ends the answer, not the chat. Only local workers report tokens.
        streams = isinstance(engine, Policy) and self._model.run.cluster.engine == "local"
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
        # Add the answer to the conversation, even if it is incomplete.
        texts.append(decoder.flush())
        self._write(f"{texts[-1]}\n")
        self._turns += 1
        self._messages = [*messages, {"role": "assistant", "content": "".join(texts)}]

    def _prompt_ids(self, messages: list[Message]) -> list[int]:
        tokenizer = self._model.tokenizer
        system = self._config.data.system_prompt
        try:
            text = render(tokenizer, with_system(parse_messages(messages), system))
        except TokenizerError as error:
            raise TokenizerError(
                f"{error}. To complete a text without a chat template, use --prompt TEXT"
            ) from error
        ids = tokenizer.encode(text)
        return with_bos(tokenizer, ids) if self._config.data.add_bos else ids
