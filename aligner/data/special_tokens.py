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
    ``data.special_tokens_in_text``. ``location``: column or field, for errors. Answers (with
    ``is_answer``, and messages of the assistant) may contain added tokens that are not special,
    such as ``<think>``, and may end with an end token. Raises `DataError` for a refused token, or a
    token that is recognised in spite of escaping.
    """
    if policy == "keep":
        return value
    # Collect the texts of special tokens, of added tokens, and of tokens that end an answer.
    added: Mapping[int, str] = getattr(tokenizer, "added_tokens", {})
    # If a tokenizer has no list of special tokens, all its added tokens are special.
    special = {*getattr(tokenizer, "special_ids", added), tokenizer.eos_id, tokenizer.bos_id}
    texts = {n: added.get(n) or tokenizer.decode([n]) for n in {*special, *added} - {None}}
    tokens = {n: text for n, text in texts.items() if text.strip()}  # except white space
    structural = {n: text for n, text in tokens.items() if n in special}
    ends = [structural[n] for n in tokenizer.end_ids if n in structural]

    def treat(value: Any, location: str, is_answer: bool, may_end: bool = False) -> Any:
        # Only the content of an assistant's message may end with an end token.
        if isinstance(value, Mapping):
            ending = "content" if value.get("role") == "assistant" and not is_answer else None
            is_answer = is_answer or ending is not None
            return {
                treat(k, location, False): treat(item, f"{location}.{k}", is_answer, k == ending)
                for k, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [treat(item, f"{location}.{n}", is_answer) for n, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        end = next((end for end in ends if may_end and value.endswith(end)), "")
        refused = structural if is_answer else tokens
        return _treat(tokenizer, value.removesuffix(end), refused, policy, location) + end

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
