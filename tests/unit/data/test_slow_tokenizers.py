"""Vocabularies without a tokenizer.json: split as transformers splits, or refused."""

import json
import random

import pytest
import sentencepiece
from test_tokenizer import trained_pieces
from transformers import AutoTokenizer, LlamaTokenizer

from aligner.checkpoint.convert import convert
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.data.tokenizers import loading
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import load_tokenizer, tokenizer_from_files
from aligner.data.tokenizers.tokenizer import is_tokenizer_file
from aligner.errors import TokenizerError

CHARACTERS = "abtheox  THE \n\t0123456789.,!?'éß漢字😀👍🏽\u00a0\u3000\u200d\u0301İﬁ½_<>|[]▁"
PIECES = ["<|endoftext|>", "<|im_end|>", "<s>", "</s>", "[SEP]", " the", "12", "  ", "I'LL", "\r\n"]
END = {"eos_token": "<|endoftext|>"}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def fuzz():
    draw = random.Random(0)
    for _ in range(300):
        yield "".join(
            draw.choice([draw.choice(PIECES), chr(draw.randint(32, 0x2FFF)), *CHARACTERS])
            for _ in range(draw.randint(0, 16))
        )


TEXTS = list(fuzz())


def encoded(tokenizer, **options):
    return [tokenizer.encode(text, **options) for text in TEXTS]


def encoded_by_transformers(folder):
    return encoded(AutoTokenizer.from_pretrained(folder), add_special_tokens=False)


@pytest.fixture(scope="module")
def vocabularies():
    """A byte-level pair of 259 tokens, and a SentencePiece model."""
    vocab = json.loads(byte_level_tokenizer().files()["tokenizer.json"])["model"]["vocab"]
    vocab |= {"12": 256, "ĠĠ": 257, "<|endoftext|>": 258}
    merges = "#version: 0.2\n1 2\nĠ Ġ\n"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "12", "345", "lazy", "dogs"]
    lines = [" ".join(random.sample(words, 5)) for _ in range(200)]
    pieces = trained_pieces(lines, 60, model_type="bpe", hard_vocab_limit=False)
    return {
        "pair": {"vocab.json": json.dumps(vocab).encode(), "merges.txt": merges.encode()},
        "pieces": {"tokenizer.model": pieces},
    }


@pytest.fixture(scope="module")
def model(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "hf"
    convert(tiny_nemo, folder)
    for path in folder.iterdir():
        if is_tokenizer_file(path.name):
            path.unlink()
    return folder


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("pair", {"tokenizer_class": "Qwen2Tokenizer", **END}),
        ("pair", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, **END}),
        ("pair", {"tokenizer_class": "CodeGenTokenizer", **END}),
        ("pieces", {"tokenizer_class": "LlamaTokenizer", "legacy": False, **LLAMA}),
        ("pieces", {"tokenizer_class": "LlamaTokenizer", **LLAMA}),
        ("pieces", {"tokenizer_class": "GemmaTokenizer", **LLAMA}),
    ],
    ids=["qwen2", "gpt2", "codegen", "llama", "legacy", "gemma"],
)
def test_tokens_are_those_of_transformers(kind, config, model, vocabularies, tmp_path):
    folder = tmp_path / "slow"
    folder.mkdir()
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    files = vocabularies[kind] | {
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": b'{"eos_token_id": [2, 7]}',
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    expected = encoded_by_transformers(folder)
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    convert(folder, tmp_path / "model.nemo")
    convert(tmp_path / "model.nemo", tmp_path / "back")
    with open_nemo(tmp_path / "model.nemo") as checkpoint:
        ours = [load_tokenizer(folder), checkpoint.tokenizer, tokenizer_from_files(files)]
    for tokenizer in (*ours, load_tokenizer(tmp_path / "back")):
        assert encoded(tokenizer) == expected
        assert {2, 7, tokenizer.eos_id} == {*tokenizer.end_ids}
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        assert rendered == f"hi{config['eos_token']}"
    assert encoded_by_transformers(tmp_path / "back") == expected


@pytest.mark.integration
def test_a_directory_with_a_sentencepiece_model_alone_is_refused(vocabularies, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(vocabularies["pieces"]["tokenizer.model"])
    with pytest.raises(
        TokenizerError, match=r"Give .*tokenizer\.model for SentencePiece's"
    ) as said:
        load_tokenizer(tmp_path)
    assert '{"tokenizer_class": "LlamaTokenizer"}' in str(said.value)
    # Both remedies.
    theirs = LlamaTokenizer.from_pretrained(str(tmp_path))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    plain = encoded(load_tokenizer(path))
    assert plain == encoded(processor)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    ours = encoded(load_tokenizer(tmp_path))
    assert ours == encoded(theirs, add_special_tokens=False) != plain


@pytest.mark.integration
def test_a_model_directory_without_tokenizer_config_is_read_as_transformers_reads_it(
    vocabularies, model, tmp_path
):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(vocabularies["pieces"]["tokenizer.model"])
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    expected = encoded_by_transformers(folder)
    convert(folder, tmp_path / "model.nemo")
    with open_nemo(tmp_path / "model.nemo") as checkpoint:
        assert encoded(checkpoint.tokenizer) == expected
    assert encoded(load_tokenizer(folder)) == expected


def test_what_splits_otherwise_is_refused(vocabularies, tmp_path, monkeypatch):
    files = vocabularies["pair"] | {
        "tokenizer_config.json": json.dumps({"tokenizer_class": "Qwen2Tokenizer", **END}).encode()
    }
    wrong = tokenizer_from_files(vocabularies["pair"]).files()  # GPT-2's rule
    monkeypatch.setattr(loading, "_saved_files", lambda _: wrong)
    with pytest.raises(TokenizerError, match="Qwen2Tokenizer and its conversion"):
        tokenizer_from_files(files)
    monkeypatch.setattr(loading, "_saved_files", lambda _: vocabularies["pieces"])
    with pytest.raises(TokenizerError, match="Qwen2Tokenizer cannot be saved as"):
        tokenizer_from_files(files)
