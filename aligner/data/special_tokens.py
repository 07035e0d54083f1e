"""Special tokens that are spelt in the text of rows, messages and requests.

A tokenizer finds special tokens in any text, so a tool's result that contains ``<|im_end|>`` would
end its own message. Texts are treated before the chat template adds its special tokens.
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
    place: str,
    is_answer: bool = False,
) -> Any:
    """Return ``value``, in whose texts special and added tokens are kept, refused or escaped.

    ``value``: a text, or lists and mappings of texts; ``place``: its column or field, for errors.
    Answers (``is_answer``, and the assistant's messages) may contain added tokens that are not
    special, as ``<think>``, and end with an end token.

    Raises:
        DataError: a text spells a token that is refused, or that is found although it is escaped.
    """
    if policy == "keep":
        return value
    added: Mapping[int, str] = getattr(tokenizer, "added_tokens", {})
    special = {*getattr(tokenizer, "special_ids", added), tokenizer.eos_id, tokenizer.bos_id}
    texts = {n: added.get(n) or tokenizer.decode([n]) for n in {*special, *added} - {None}}
    tokens = {n: text for n, text in texts.items() if text.strip()}  # white space is no token
    structural = {n: text for n, text in tokens.items() if n in special}
    ends = [structural[n] for n in tokenizer.end_ids if n in structural]

    def treat(value: Any, place: str, is_answer: bool, may_end: bool = False) -> Any:
        if isinstance(value, Mapping):
            ending = "content" if value.get("role") == "assistant" and not is_answer else None
            is_answer = is_answer or ending is not None
            return {
                treat(key, place, False): treat(each, f"{place}.{key}", is_answer, key == ending)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [treat(each, f"{place}.{n}", is_answer) for n, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        end = next((end for end in ends if may_end and value.endswith(end)), "")
        refused = structural if is_answer else tokens
        return _treat(tokenizer, value.removesuffix(end), refused, policy, place) + end

    return treat(value, place, is_answer, is_answer)


def _treat(
    tokenizer: Tokenizer, text: str, tokens: Mapping[int, str], policy: str, place: str
) -> str:
    found = [token for token in tokenizer.encode(text) if token in tokens]
    remedy = "write it in another way, or set data.special_tokens_in_text to escape or keep"
    if found and policy == "escape":
        for token in tokens.values():
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        found = [token for token in tokenizer.encode(text) if token in tokens]
        remedy = "the tokenizer finds it even with U+200B inside; write it in another way"
    if found:
        raise DataError(f"{place} spells the special token {tokens[found[0]]!r}: {remedy}")
    return text
