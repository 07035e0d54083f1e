"""What renderers makes of conversations, in a process that has it and nothing of this library.

Reads a JSON object from stdin: ``tokenizer``, the text of a tokenizer.json; ``kind``, a class of
`CLASSES` with its ``options``; and ``conversations``, each the first ``messages``, ``tools``, and
``turns`` (the tokens that were sampled, the messages that were said to them). Prints a list of
answers, one a conversation.
"""

import json
import sys

import tokenizers
from renderers import Llama3Renderer, Llama3RendererConfig, Qwen3Renderer, Qwen3RendererConfig

CLASSES = {
    "qwen3": (Qwen3Renderer, Qwen3RendererConfig),
    "llama3": (Llama3Renderer, Llama3RendererConfig),
}


class OwnTokenizer:
    """The interface that renderers asks of a tokenizer."""

    unk_token_id = eos_token_id = bos_token_id = None
    name_or_path = "a tokenizer of the test"

    def __init__(self, text):
        self._backend = tokenizers.Tokenizer.from_str(text)

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids, skip_special_tokens=False, **others):
        ids = [ids] if isinstance(ids, int) else list(ids)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token):
        return self._backend.token_to_id(token)


def followed(renderer, messages, tools, turns):
    """A conversation as renderers leads it.

    Prompts are what `bridge_to_next_turn` makes of the tokens before; where it refuses, the
    messages that `parse_response` reads in them are rendered. ``samples``: token ids, and whether
    each was sampled; another begins where a prompt is no extension of the one before. ``rendered``:
    the same of the last of them by one `render` of its messages. ``bridged``: how often the tokens
    before were kept by the bridge.
    """
    history, since, bridged = list(messages), 0, 0
    prompt = renderer.render_ids(history, tools=tools, add_generation_prompt=True)
    samples = [[list(prompt), [False] * len(prompt)]]
    for sampled, new in turns:
        ids, mask = samples[-1]
        ids += sampled
        mask += [True] * len(sampled)
        history += [message_of(renderer.parse_response(sampled, prompt_ids=prompt)), *new]
        bridge = renderer.bridge_to_next_turn(prompt, sampled, new, tools=tools)
        bridged += bridge is not None
        if bridge is None:
            prompt = renderer.render_ids(history, tools=tools, add_generation_prompt=True)
        else:
            prompt = list(bridge.token_ids)
        if prompt[: len(ids)] == ids:
            mask += [False] * (len(prompt) - len(ids))
            ids += prompt[len(ids) :]
        else:
            samples.append([list(prompt), [False] * len(prompt)])
            since = len(history)
    try:
        whole = renderer.render(history, tools=tools, add_generation_prompt=True)
    except ValueError:  # Llama's template shows one call in a message
        rendered = None
    else:
        pairs = zip(whole.sampled_mask, whole.message_indices, strict=True)
        rendered = [whole.token_ids, [one and index >= since for one, index in pairs]]
    return {"samples": samples, "rendered": rendered, "bridged": bridged}


def message_of(parsed):
    """The assistant's message that a response is, as an agent gives it back."""
    calls = [
        {"function": {"name": one.name, "arguments": one.arguments}} for one in parsed.tool_calls
    ]
    message = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
    return {**message, "reasoning_content": parsed.reasoning_content}


def main():
    asked = json.load(sys.stdin)
    made, config = CLASSES[asked["kind"]]
    renderer = made(OwnTokenizer(asked["tokenizer"]), config(**asked["options"]))
    answers = [followed(renderer, *conversation) for conversation in asked["conversations"]]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
