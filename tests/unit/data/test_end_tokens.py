"""More than one token ends a response: where they come from, where they travel, what they do."""

import json

import pytest
import torch
from test_chat_data import byte_level_files

from aligner.algorithms.run.startup import describe_model
from aligner.checkpoint.hf.model_folder import read_hf, save_hf
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import LengthParams, ModelConfig, PolicyPPOConfig, SamplingParams
from aligner.config.validation import ValidationConfig
from aligner.data.supervised import encode_chat
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.decoding import decode_response
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.errors import TokenizerError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel
from aligner.rewards.sequences import scored_texts

EOS, TURN, OTHER = 256, 258, 257  # <|endoftext|>, <|im_end|>, <|im_start|>


def base_files(**generation):
    """A base model's tokenizer: ChatML, but its EOS is ``<|endoftext|>``."""
    files = byte_level_files(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    if generation:
        files["generation_config.json"] = json.dumps(generation).encode()
    return files


@pytest.fixture(scope="module")
def base_nemo(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.nemo"
    save_nemo(path, random_weights(TINY_ARCHITECTURE), TINY_ARCHITECTURE, base_files())
    return path


def test_they_come_from_the_tokenizer_the_template_and_the_generation_config():
    assert byte_level_tokenizer().end_ids == (TURN,)
    base = tokenizer_from_files(base_files())
    assert (base.eos_id, base.end_ids, base.turn_end_id) == (EOS, (EOS, TURN), TURN)
    for said in (OTHER, [OTHER, EOS]):
        named = tokenizer_from_files(base_files(eos_token_id=said, temperature=0.6))
        assert named.end_ids == (EOS, OTHER, TURN)
    more = base.with_end_tokens(["a", "<|im_end|>"])
    assert more.end_ids == (EOS, TURN, 97)
    assert base.end_ids == (EOS, TURN)
    assert tokenizer_from_files(more.files()).end_ids == (EOS, TURN, 97)
    assert base.with_end_tokens([97, TURN]).end_ids == (EOS, TURN, 97)
    with pytest.raises(TokenizerError, match="end_tokens: 9999 is not a single token"):
        base.with_end_tokens([9999])
    with pytest.raises(TokenizerError, match=r"end_tokens: 'ab' is not .*end_strings"):
        base.with_end_tokens(["ab"])
    with pytest.raises(TokenizerError, match=r"eos_token_id=\['x'\] .* must be a token id"):
        tokenizer_from_files(base_files(eos_token_id=["x"]))


def test_they_travel_through_conversions(tmp_path):
    weights = random_weights(TINY_ARCHITECTURE)
    files = base_files(eos_token_id=[EOS, OTHER], temperature=0.6)
    save_hf(tmp_path / "hf", weights, TINY_ARCHITECTURE, files)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == [EOS, OTHER, TURN]
    source = read_hf(tmp_path / "hf")
    save_nemo(tmp_path / "m.nemo", source.weights, source.architecture, source.tokenizer_files)
    with open_nemo(tmp_path / "m.nemo") as nemo:
        assert nemo.tokenizer.end_ids == (EOS, OTHER, TURN)
        save_hf(tmp_path / "back", nemo.weights, nemo.architecture, nemo.tokenizer.files())
    back = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert back == {"eos_token_id": [EOS, OTHER], "temperature": 0.6}
    (tmp_path / "hf" / "generation_config.json").unlink()  # what transformers falls back to
    assert read_hf(tmp_path / "hf").tokenizer.end_ids == (EOS, OTHER, TURN)


def test_a_run_knows_and_learns_those_of_its_configuration(base_nemo):
    ppo = PolicyPPOConfig(sampling_params=SamplingParams(end_tokens=("!",)))
    assert ValidationConfig().sampling_options(ppo) is None  # validation is drawn as training is
    assert ValidationConfig(max_length=5).sampling_options(ppo).sampling.end_tokens == ("!",)
    tokenizer, _ = describe_model(ModelConfig(restore_from_path=str(base_nemo), ppo=ppo))
    assert tokenizer.end_ids == (EOS, TURN, ord("!"))
    base = tokenizer_from_files(base_files())
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, spans = encode_chat(base, chat)
    assert ids[spans[0][0] :] == [ord("b"), TURN]
    assert encode_chat(byte_level_tokenizer(), chat) == (ids, spans)


def megatron(path):
    return load_from_nemo(MegatronGPTActorModel, RoleSettings(), restore_path=path)


def dtensor(path):
    with open_model(path) as source:
        return DTensorActorModel(source, RoleSettings(), initialize_parallel(), source.tokenizer)


@pytest.mark.integration
@pytest.mark.parametrize("build", [megatron, dtensor])
def test_engines_end_at_any_of_them(build, base_nemo):
    actor = build(base_nemo)
    sampling = SamplingParams(end_tokens=("q", "<|im_start|>"))
    actor.configure_generation(LengthParams(max_length=40, min_length=5), sampling, 96)
    prompts = torch.full((96, 1), ord("x"))
    if isinstance(actor, DTensorActorModel):
        actor.prepare_for_generation()  # gathers the weights
    else:
        actor.prepare_for_inference()
    output = actor.generator.sample(
        prompts, torch.ones(96, dtype=torch.int64), torch.arange(96), seed=3
    )
    ends = {EOS, TURN, OTHER, ord("q")}
    lengths = output.lengths.tolist()
    rows = [row[1:length] for row, length in zip(output.tokens.tolist(), lengths, strict=True)]
    assert {row[-1] for row in rows if row[-1] in ends} == ends
    tokenizer = actor.tokenizer.with_end_tokens(sampling.end_tokens)
    for row, is_end in zip(rows, output.is_end.tolist(), strict=True):
        assert is_end == (row[-1] in ends)  # it is part of the response
        assert not ends & set(row[:-1])
        assert len(row) == 40 if not is_end else 5 <= len(row) <= 40
        text = decode_response(tokenizer, [ord("x")], row)
        assert text == decode_response(tokenizer, [ord("x")], row[: len(row) - is_end])
    assert min(map(len, rows)) < 12


def shown(texts_and_ends, end_strings):
    """``scored_texts`` of byte-level responses; an end is a further token, or None."""
    tokenizer = byte_level_tokenizer()
    prompt = tokenizer.encode("ask:")
    rows = [
        [*prompt, *tokenizer.encode(text), *([] if end in (None, "stop") else [end])]
        for text, end in texts_and_ends
    ]
    width = max(map(len, rows))
    data = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "input_lengths": torch.tensor([len(row) for row in rows]),
        "prompt_lengths": torch.full((len(rows),), len(prompt)),
        "is_end": torch.tensor([end is not None for _, end in texts_and_ends]),
    }
    return scored_texts(tokenizer, data, end_strings)[1]


def test_only_the_stop_string_that_ended_a_response_is_cut_off():
    assert shown(
        [
            ("2\n", "stop"),
            ("a\na long and good answer", TURN),  # the early one stood before min_length
            ("a\nb\n", "stop"),
            ("a\nb\n\n", "stop"),  # repetitions
            ("x", TURN),
            ("y\n", TURN),  # not what ended it
            ("z\n", None),  # ran into the length limit
        ],
        ["\n"],
    ) == ["2", "a\na long and good answer", "a\nb", "a\nb", "x", "y\n", "z\n"]
    assert shown([("2 END", "stop")], ["\n", " END"]) == ["2"]
    assert shown([("2\n", "stop")], []) == ["2\n"]
