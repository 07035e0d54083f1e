"""Tokenizers: real byte-level BPE and real SentencePiece models, trained here."""

import io
import json
import pickle

import pytest
import sentencepiece
from tokenizers import ByteLevelBPETokenizer

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.decoding import IncrementalDecoder, decode_response
from aligner.data.tokenizers.loading import load_tokenizer, tokenizer_from_files
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointNotFoundError, TokenizerError

CORPUS = [f"{a}+{b}={a + b}\nHello there, wörld number {a}." for a in range(20) for b in range(5)]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def byte_level_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_level")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        CORPUS, vocab_size=300, special_tokens=["<bos>", "<eos>"], show_progress=False
    )
    trained.save(str(folder / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<bos>"}
    config = {"bos_token": bos, "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def trained_pieces(lines, vocab_size, **options):
    """The content of a ``tokenizer.model`` that SentencePiece trains on lines of text."""
    model = io.BytesIO()
    options |= {"sentence_iterator": iter(lines), "model_writer": model, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(vocab_size=vocab_size, **options)
    return model.getvalue()


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    options = {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
    path.write_bytes(trained_pieces(CORPUS, 400, normalization_rule_name="identity", **options))
    return path


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request, byte_level_dir, sentencepiece_file):
    return load_tokenizer(byte_level_dir if request.param == "byte_level" else sentencepiece_file)


@pytest.mark.parametrize("response", [" there, wörld 🎈日本語\n12", "", "5\n"])
def test_response_is_what_the_prompt_lacks(tokenizer, response):
    prompt_ids = tokenizer.encode("Hello")
    response_ids = tokenizer.encode("Hello" + response)[len(prompt_ids) :]
    assert tokenizer.encode("Hello" + response)[: len(prompt_ids)] == prompt_ids
    with_end = [*response_ids, tokenizer.eos_id]
    assert decode_response(tokenizer, prompt_ids, with_end) == response

    decoder = IncrementalDecoder(tokenizer, prompt_ids)
    pieces = [decoder.push(token) for token in response_ids]
    assert "".join(pieces) + decoder.flush() == response
    assert not any("�" in piece for piece in pieces)


def test_responses_stream_character_by_character(tokenizer):
    prompt_ids = tokenizer.encode("Hello")
    balloon = tokenizer.encode("Hello🎈")[len(prompt_ids) :]
    assert len(balloon) == 4  # one token per byte: neither vocabulary knows it
    decoder = IncrementalDecoder(tokenizer, prompt_ids)
    assert [decoder.push(token) for token in balloon] == ["", "", "", "🎈"]
    cut = IncrementalDecoder(tokenizer, prompt_ids)
    assert cut.push(balloon[0]) == ""
    assert set(cut.flush()) == {"�"}
    balloon = tokenizer.encode("🎈")
    tail = tokenizer.encode("🎈ab")[len(balloon) :]
    decoder = IncrementalDecoder(tokenizer, balloon[:-1])
    streamed = decoder.push(balloon[-1]) + "".join(decoder.push(t) for t in tail) + decoder.flush()
    assert streamed == decode_response(tokenizer, balloon[:-1], [balloon[-1], *tail])
    assert streamed.endswith("ab")


def test_text_survives_in_copies_from_files_and_from_a_pickle(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    copies = tokenizer_from_files(tokenizer.files()), pickle.loads(pickle.dumps(tokenizer))
    for text in ["2+3=5\n7+4=", "Hello there, wörld", "日本語 🎈"]:
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & {*ids}
        assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size
        for each in (tokenizer, *copies):
            assert each.encode(text) == ids
            assert each.decode(ids) == text
    for copy in copies:
        assert copy.files() == tokenizer.files()
        for name in ("eos_id", "bos_id", "pad_id", "vocab_size"):
            assert getattr(copy, name) == getattr(tokenizer, name), name


def test_the_byte_level_tokenizer():
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode("aé<|im_end|>") == [*"aé".encode(), 258]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (259, 258, 257)
    assert tokenizer.pad_id == tokenizer.eos_id
    text = bytes(range(128)).decode() + "é 日本語"
    again = tokenizer_from_files(tokenizer.files())
    assert again.files() == tokenizer.files()
    assert again.encode(text) == tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_only_the_config_knows(byte_level_dir):
    files = load_tokenizer(byte_level_dir / "tokenizer.json").files()
    config = json.loads(files["tokenizer_config.json"])
    added = {"300": {"content": "<|end|>", "special": True}}
    changed = {**config, "added_tokens_decoder": added, "eos_token": "<|end|>"}
    files["tokenizer_config.json"] = json.dumps(changed).encode()
    tokenizer = tokenizer_from_files(files)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (300, 301)
    assert tokenizer.encode("5<|end|>")[-1] == 300
    changed["added_tokens_decoder"] = {"400": added["300"]}
    files["tokenizer_config.json"] = json.dumps(changed).encode()
    with pytest.raises(TokenizerError, match="the id 400"):
        tokenizer_from_files(files)


def test_sentencepiece_models_by_themselves(sentencepiece_file):
    config = b'{"bos_token": "<s>", "eos_token": "</s>"}'
    files = {"tokenizer.model": sentencepiece_file.read_bytes(), "tokenizer_config.json": config}
    assert tokenizer_from_files(files).encode("16</s>")[-1] == 2
    plain = load_tokenizer(sentencepiece_file)
    more = plain.with_end_tokens(["<s>"])
    assert (plain.end_ids, more.end_ids) == ((2,), (2, 1))
    for copy in (tokenizer_from_files(more.files()), pickle.loads(pickle.dumps(more))):
        assert copy.end_ids == (2, 1)
    with pytest.raises(TokenizerError, match="'<nothing>' is not a piece"):
        plain.with_end_tokens(["<nothing>"])
    tokenizer = load_tokenizer(sentencepiece_file)
    prompt_ids = tokenizer.encode("Hello")
    ids = tokenizer.encode("Hello there")[len(prompt_ids) :]
    assert tokenizer.decode(ids) == "there"  # what a careless caller would get
    assert decode_response(tokenizer, prompt_ids, ids) == " there"


def test_refusals(tmp_path, byte_level_dir, sentencepiece_file):
    with pytest.raises(CheckpointNotFoundError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="contains no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)
    for content in (b"", b"no model"):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(TokenizerError, match="not a SentencePiece model"):
            load_tokenizer(tmp_path / "bad.model")
    json_only = {"tokenizer.json": (byte_level_dir / "tokenizer.json").read_bytes()}
    with pytest.raises(TokenizerError, match="names no end-of-sequence token"):
        tokenizer_from_files(json_only)
    with pytest.raises(TokenizerError, match="'</s>' is not in the vocabulary"):
        tokenizer_from_files({**json_only, "tokenizer_config.json": b'{"eos_token": "</s>"}'})
    with pytest.raises(TokenizerError, match="not JSON"):
        tokenizer_from_files({**json_only, "tokenizer_config.json": b"{"})
    with pytest.raises(TokenizerError, match="SentencePiece model without a chat template"):
        load_tokenizer(sentencepiece_file).apply_chat_template([])


def test_ids_of_rows_beyond_the_tokenizer_have_no_text(tokenizer):
    ids = tokenizer.encode("ab")
    beyond = [ids[0], tokenizer.vocab_size, *ids[1:], tokenizer.vocab_size + 99]
    assert tokenizer.decode(beyond) == tokenizer.decode(ids)
    assert tokenizer.decode(beyond[1:2]) == ""
    with pytest.raises(TokenizerError, match="is negative"):
        tokenizer.decode([-1])
