"""Protection against special tokens that are written as text in data and requests.

A tokenizer recognises special tokens in any text: ``<|im_end|>`` in a tool's result would end the
message. Text is therefore checked before the chat template adds its special tokens.
"""

from collections.abc import Mapping
from typing import Any

from aligner.config.fields import SpecialTokensInText
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import DataError


def treat_special_tokens(
    tokenizer: Tokenizer,
    value: Any,
    policy: SpecialTokensInText,
    location: str,
    is_answer: bool = False,
) -> Any:
    """Keep, refuse or escape the text of special and added tokens in ``value``, by ``policy``.

    ``value``: a text, or nested lists and mappings of texts. ``policy``: value of
    ``data.special_tokens_in_text``. ``location``: column or field, for errors. ``is_answer``:
    whether ``value`` is an answer, as messages of the assistant always are. Answers may contain
    added tokens that are not special, such as ``<think>``, and may end with an end token. Raises
    `DataError` for a refused token, or a token that is recognised in spite of escaping.
    """
    if policy == "keep":
        return value
    # Collect token id → text of special and added tokens, except white space.
    added: Mapping[int, str] = getattr(tokenizer, "added_tokens", {})
    # If a tokenizer has no list of special tokens, all its added tokens are special.
    special = {*getattr(tokenizer, "special_ids", added), tokenizer.eos_id, tokenizer.bos_id}
    texts = {n: added.get(n) or tokenizer.decode([n]) for n in {*special, *added} - {None}}
    all_tokens = {n: text for n, text in texts.items() if text.strip()}
    special_tokens = {n: text for n, text in all_tokens.items() if n in special}
    end_texts = [special_tokens[n] for n in tokenizer.end_ids if n in special_tokens]

    # Treat each text in nested mappings and lists.
    def treat(value: Any, location: str, is_answer: bool, may_end: bool = False) -> Any:
        if isinstance(value, Mapping):
            # Of an assistant's message, only the content may end with an end token.
            is_message = value.get("role") == "assistant" and not is_answer
            is_answer = is_answer or is_message
            return {
                treat(key, location, False): treat(
                    item, f"{location}.{key}", is_answer, is_message and key == "content"
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [treat(item, f"{location}.{n}", is_answer) for n, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        end = next((end for end in end_texts if may_end and value.endswith(end)), "")
        tokens = special_tokens if is_answer else all_tokens
        return _treat(tokenizer, value.removesuffix(end), tokens, policy, location) + end

    return treat(value, location, is_answer, may_end=is_answer)


def _treat(
    tokenizer: Tokenizer, text: str, tokens: Mapping[int, str], policy: str, location: str
) -> str:
    spelt = [token for token in tokenizer.encode(text) if token in tokens]
    remedy = "Write it in another way, or set data.special_tokens_in_text to escape or keep"
    if spelt and policy == "escape":
        for token in tokens.values():
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        spelt = [token for token in tokenizer.encode(text) if token in tokens]
        remedy = "The tokenizer recognises it even with U+200B inside. Write it in another way"
    if spelt:
        raise DataError(f"{location} spells the special token {tokens[spelt[0]]!r}. {remedy}")
    return text
