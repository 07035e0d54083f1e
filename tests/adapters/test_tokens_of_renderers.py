"""Tokens and masks of conversations against those of renderers (Prime Intellect).

renderers has the chat templates of Qwen 3 and Llama 3.2 in Python, TRL as Jinja.
`tests/unit/environments/test_environment_conversation.py` has an oracle for other families.
"""

import json
import random
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from documented import ROOT
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from aligner.checkpoint.model_source import open_model
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.environments.calls import FORMS, form_of, parse_calls
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.protocol import Start, Turn
from aligner.environments.tools import json_schema
from aligner.examples.tasks.calculator import calculator

pytestmark = pytest.mark.extended
COUNT = 1000
DAY = "01 Jan 2026"
WORDS = ["two", "and", "four", "ab", "é", "7+", "a\nb", '"q"', "x  y", "1234"]


@dataclass(frozen=True)
class Family:
    """A template: its file in TRL, the tokens that it has, the first of ``ends`` its own.

    ``options``: of renderers' class. ``keeps``: those with which it keeps what was sampled always.
    """

    template: str
    form: str
    tokens: tuple[str, ...]
    ends: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    keeps: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False


FAMILIES = {
    "qwen3": Family(
        "qwen3.jinja",
        "hermes",
        ("tool_call", "/tool_call", "tool_response", "/tool_response", "think", "/think"),
        ("<|im_end|>",),  # behind <|endoftext|> renderers puts no end of the message
        keeps={"thinking_retention": "all"},
        thinks=True,
    ),
    "llama3": Family(
        "llama3_2.jinja",
        "llama3",
        ("|begin_of_text|", "|end_of_text|", "|start_header_id|", "|end_header_id|")
        + ("|eot_id|", "|eom_id|", "|python_tag|"),
        ("<|eot_id|>", "<|eom_id|>"),
        options={"date_string": DAY},
    ),
}


def byte_level():
    return byte_level_tokenizer().files()


def smollm2():
    path = ROOT / "models" / "smollm2-135m-instruct.nemo"
    if not path.exists():
        pytest.skip("needs models/smollm2-135m-instruct.nemo; make it with `make` and that name")
    with open_model(path) as model:
        return model.tokenizer_files


@pytest.fixture(params=[byte_level, smollm2])
def vocabulary(request):
    """Files of a tokenizer."""
    return request.param()


def made(family, vocabulary):
    """The family's tokenizer: a vocabulary with its tokens and its template."""
    backend = RustTokenizer.from_str(vocabulary["tokenizer.json"].decode())
    tokens = [f"<{name}>" for name in family.tokens]
    backend.add_tokens([AddedToken(one, normalized=False, special="|" in one) for one in tokens])
    folder = Path(find_spec("trl").origin).parent / "chat_templates"
    template = "{% set date_string = '" + DAY + "' %}" + (folder / family.template).read_text()
    config = {
        **json.loads(vocabulary["tokenizer_config.json"]),
        "chat_template": template,
        "eos_token": family.ends[0],
        "bos_token": tokens[0] if "begin" in tokens[0] else None,
    }
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    tokenizer = tokenizer_from_files(files).with_end_tokens(family.ends[1:])
    assert form_of(tokenizer) == family.form
    return tokenizer


def renderers_of(kind, tokenizer, options, conversations):
    """What renderers makes of them; see `renderers_oracle`."""
    asked = {
        "kind": kind,
        "options": options,
        "tokenizer": tokenizer.files()["tokenizer.json"].decode(),
        "conversations": conversations,
    }
    command = ["python", str(Path(__file__).with_name("renderers_oracle.py"))]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def words(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))


def answer_of(family, rng, calls, *, tidy):
    """Text of an answer: thoughts, words, calls, as the template writes them."""
    thoughts = (
        f"<think>\n{words(rng)}\n</think>\n\n" if family.thinks and rng.random() < 0.5 else ""
    )
    given = [
        json.dumps({"name": "calculator", key: {"expression": words(rng)}}, ensure_ascii=not tidy)
        for key in ["arguments" if family.form == "hermes" else "parameters"] * calls
    ]
    if family.form == "llama3":
        return "; ".join(given) or words(rng)
    said = words(rng) if rng.random() < 0.5 or not calls else ""
    parts = [*([said] if said else []), *(f"<tool_call>\n{one}\n</tool_call>" for one in given)]
    return thoughts + "\n".join(parts)


def sampled_by(family, tokenizer, rng, calls, *, tidy):
    """Tokens of an answer, and whether it ended; ``tidy``: exactly as the template writes it."""
    ids = tokenizer.encode(answer_of(family, rng, calls, tidy=tidy))
    if tidy:
        return [*ids, *tokenizer.encode(family.ends[0])], True
    if not calls and rng.random() < 0.5:  # tokens that no tokenizer makes of their text
        ids = [rng.randrange(3, 256) for _ in range(rng.randint(1, 9))]
    if rng.random() < 0.3:  # cut by the limit of its length
        return ids, False
    return [*ids, *tokenizer.encode(rng.choice(family.ends))], True


def led(family, renderer, rng, *, tidy):
    """A random conversation as this library leads it, and what renderers is told of it."""
    tokenizer = renderer.tokenizer
    tools = [json_schema(calculator)] if rng.random() < 0.7 else None
    first = [{"role": "user", "content": words(rng)}]
    if rng.random() < 0.5:
        first = [{"role": "system", "content": words(rng)}, *first]
    talk, told = Conversation(renderer, Start(first, tools)), []
    for _ in range(rng.randint(1, 6)):
        most = 1 if tidy and family.form == "llama3" else 3  # the template shows one in a message
        calls = rng.randint(1, most) if tools and rng.random() < 0.6 else 0
        ids, is_end = sampled_by(family, tokenizer, rng, calls, tidy=tidy)
        message = talk.answered(ids, [-1.0] * len(ids), is_end)
        found = parse_calls(message["content"], family.form)
        new = FORMS[family.form].results(found, [words(rng) for _ in found])
        new = new or [{"role": "user", "content": words(rng)}]
        talk.follow(Turn(new, 1.0), goes_on=True)
        told.append([ids, new])
    return talk, [first, tools, told]


def samples_of(talk):
    """Token ids of each sequence, and whether each was sampled."""
    places = zip(talk.starts, [*talk.starts[1:], len(talk.ids)], strict=True)
    sampled = [turn > 0 for turn in talk.turn_ids]
    return [[talk.ids[start:end], sampled[start:end]] for start, end in places]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_are_those_of_renderers(kind, keeps, vocabulary, packages):
    """Either whatever was sampled is kept, to the end or cut: neither library renders it again.

    Or both begin another sequence where the template rewrites what was said, the same one; and a
    render of the whole conversation has these tokens and this mask.
    """
    family = FAMILIES[kind]
    history = {"rewritten_history": "keep"} if keeps else {}
    renderer = ChatRenderer(made(family, vocabulary), **history)
    rng = random.Random(f"{'kept' if keeps else 'forks'} {kind}")
    made_here = [led(family, renderer, rng, tidy=not keeps) for _ in range(COUNT)]
    options = family.options | (family.keeps if keeps else {})
    told = [conversation for _, conversation in made_here]
    theirs = renderers_of(kind, renderer.tokenizer, options, told)
    for (talk, conversation), their in zip(made_here, theirs, strict=True):
        assert samples_of(talk) == their["samples"]
        if keeps:
            assert their["bridged"] == len(conversation[2])
        else:
            assert samples_of(talk)[-1] == their["rendered"]
    if not keeps:
        forked = sum(len(talk.starts) > 1 for talk, _ in made_here)
        assert (forked > COUNT / 10) == family.thinks
