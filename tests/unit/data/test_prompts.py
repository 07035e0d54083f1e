"""Prompts from real files and generators; bad rows are refused with their place."""

import json
import logging
from types import SimpleNamespace

import pyarrow
import pytest
from loaded import load_rows, load_set, write_rows
from pyarrow import parquet

from aligner.data.prompts import PromptDataset
from aligner.errors import ConfigError, DataError, TokenizerError

ROWS = [
    {"prompt": "2+3=", "ground_truth": "5", "level": 1},
    {"prompt": "10+11=", "ground_truth": "21", "level": 2},
]


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def generate(count=2, start=0):
    for number in range(start, start + count):
        yield {"prompt": f"say {number}", "ground_truth": str(number)}


def endless():
    while True:
        yield {"prompt": "again", "ground_truth": ""}


def breaks():
    yield from generate(2)
    raise KeyError("lost")


def not_rows():
    yield "text"


def half_rows():
    return [{"prompt": "\ud800"}]


def test_rows_from_files(tmp_path):
    dataset = load_rows(PromptDataset, tmp_path, ROWS)
    assert len(dataset) == 2
    assert dataset[1].text == "10+11="
    assert dataset[1].ids == [49, 48, 43, 49, 49, 61]  # bytes
    assert dataset[1].ground_truth == "21"
    assert dataset[1].columns == {"level": 2}
    assert (dataset[0].id, dataset[1].id) == (0, 1)
    assert dataset.column_names == {"level"}
    assert dataset.max_length == 6


def test_directory_list_and_limit(tmp_path, tokenizer):
    write_rows(tmp_path / "b.jsonl", ROWS)
    write_parquet(tmp_path / "a.parquet", ROWS[:1])
    (tmp_path / "README").write_text("not data")
    texts = [prompt.text for prompt in load_set(PromptDataset, tmp_path, tokenizer)]
    assert texts == ["2+3=", "2+3=", "10+11="]
    both = [tmp_path / "b.jsonl", f"{__file__}:generate"]
    with pytest.raises(ConfigError, match="is a file"):
        load_set(PromptDataset, both, tokenizer, arguments={"count": 1})
    assert [p.text for p in load_set(PromptDataset, both, tokenizer, limit=3)][2] == "say 0"


def test_generators(tokenizer):
    by_file = load_set(PromptDataset, f"{__file__}:generate", tokenizer, arguments={"start": 7})
    assert [prompt.text for prompt in by_file] == ["say 7", "say 8"]
    assert len(load_set(PromptDataset, f"{__file__}:endless", tokenizer, limit=5)) == 5
    name = "aligner.examples.tasks.arithmetic:arithmetic_prompts"
    dataset = load_set(PromptDataset, name, tokenizer, arguments={"split": "validation", "size": 9})
    assert len(dataset) == 9
    assert dataset.column_names == {"a", "b", "operator"}


def test_columns_and_bos_are_settings(tmp_path, tokenizer):
    rows, columns = [{"q": "2+3=", "a": 5, "prompt": "other"}], {"prompt_column": "q"}
    prompt = load_rows(PromptDataset, tmp_path, rows, **columns, ground_truth_column="a")[0]
    assert (prompt.text, prompt.ground_truth) == ("2+3=", 5)
    assert prompt.columns == {"prompt": "other"}
    prompt = load_rows(PromptDataset, tmp_path, rows, **columns, ground_truth_column=None)[0]
    assert prompt.ground_truth is None
    assert prompt.columns == {"a": 5, "prompt": "other"}
    rows = [{"prompt": "2+3="}, {"prompt": [{"role": "user", "content": "Hi"}]}]
    dataset = load_rows(PromptDataset, tmp_path, rows, ground_truth_column=None, add_bos=True)
    assert dataset[0].ids == [257, *tokenizer.encode("2+3=")]
    assert dataset[1].ids[:2] == tokenizer.encode("<|im_start|>u")


def test_chat(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2+3?"},
    ]
    rows = [{"prompt": messages}, {"prompt": "2+3?"}]
    expected = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = {"ground_truth_column": None}
    dataset = load_rows(PromptDataset, tmp_path, rows, **plain)
    assert dataset[0].text == expected
    assert dataset[0].ids[0] == tokenizer.bos_id == 257
    assert dataset[1].text == "2+3?"
    chat = {**plain, "chat": True, "system_prompt": "Be brief."}
    dataset = load_rows(PromptDataset, tmp_path, rows, **chat)
    assert dataset[0].text == "<|im_start|>system\nBe brief.<|im_end|>\n" + expected
    assert dataset[1].text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    path = write_parquet(tmp_path / "x.parquet", rows[:1])
    assert load_set(PromptDataset, path, tokenizer, **plain)[0].text == expected


def test_too_long_is_dropped_and_counted(tmp_path, caplog):
    rows = [*ROWS, {"prompt": "1" * 30, "ground_truth": 1}]
    with caplog.at_level(logging.WARNING):
        dataset = load_rows(PromptDataset, tmp_path, rows, max_prompt_length=6)
    assert len(dataset) == 2
    assert dataset.dropped_too_long == 1
    assert "1 of 3 prompts" in caplog.text
    assert "the longest has 30" in caplog.text
    dataset = load_rows(PromptDataset, tmp_path, rows, max_prompt_length=4)
    assert [prompt.id for prompt in dataset] == [0]
    assert dataset.dropped_too_long == 2
    with pytest.raises(DataError, match=r"3 of 3 prompts .* None is left"):
        load_rows(PromptDataset, tmp_path, rows, max_prompt_length=3)
    assert load_rows(PromptDataset, tmp_path, rows).dropped_too_long == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "2+3="', "not JSON"),
        ("[1, 2]", "a row must be a JSON object"),
        ('{"question": "a"}', "'prompt' is missing. Name another column with data.prompt_column"),
        ('{"prompt": null, "ground_truth": 5}', "column 'prompt' is null"),
        ('{"prompt": "a"}', "data.ground_truth_column .* null if"),
        ('{"prompt": 7, "ground_truth": 5}', "must be text or a list"),
        ('{"prompt": "", "ground_truth": 5}', "is empty"),
        ('{"prompt": [], "ground_truth": 5}', "messages is empty"),
        ('{"prompt": [{"role": "user"}], "ground_truth": 5}', "exactly the keys"),
        ('{"prompt": ["hello"], "ground_truth": 5}', "exactly the keys"),
        ('{"prompt": [{"role": "user", "content": null}], "ground_truth": 5}', "must be text"),
        (
            '{"prompt": [{"role": "assistant", "content": "x"}], "ground_truth": 5}',
            "the last chat message is the assistant",
        ),
        ('{"prompt": "x", "ground_truth": 5, "responses": 1}', "columns .'responses'."),
        (r'{"prompt": "a\ud800b", "ground_truth": 1}', r"'prompt' contains half .*\\ud800"),
        (r'{"prompt": "a", "ground_truth": [{"x": "\udfff"}]}', "'ground_truth' contains half"),
        (r'{"prompt": "a", "ground_truth": 1, "\ud800": 1}', "contains half a character"),
        ('{"prompt": "a", "ground_truth": {"x": 1, "x": 2}}', "the key 'x' occurs twice"),
        ('{"prompt": "a", "ground_truth": ' + "[" * 100_000 + "]" * 100_000 + "}", "too deep"),
        ('{"prompt": "a", "ground_truth": 1' + "0" * 5000 + "}", "not JSON: Exceeds the limit"),
    ],
)
def test_bad_row_is_named(tmp_path, tokenizer, line, message):
    path = write_rows(tmp_path / "bad.jsonl", ROWS)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 3: .*{message}") as refusal:
        load_set(PromptDataset, path, tokenizer)
    if "columns .'" in message or "is null" in message:
        assert f"Columns found: {sorted(json.loads(line))}" in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_bytes(b'\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        load_set(PromptDataset, tmp_path / "x.jsonl", tokenizer)
    path = write_parquet(tmp_path / "x.parquet", [*ROWS, {"prompt": None, "ground_truth": "1"}])
    with pytest.raises(DataError, match=r"x.parquet, row 3: column 'prompt' is null"):
        load_set(PromptDataset, path, tokenizer)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot be read as \.parquet"):
        load_set(PromptDataset, path, tokenizer)


def test_bad_generators(tokenizer):
    def load(name, **arguments):
        load_set(PromptDataset, f"{__file__}:{name}", tokenizer, arguments=arguments)

    with pytest.raises(DataError, match=r"after row 2: raised KeyError: 'lost'"):
        load("breaks")
    with pytest.raises(DataError, match="row 1: a row must be a dict"):
        load("not_rows")
    with pytest.raises(DataError, match="row 1: column 'prompt' contains half a character"):
        load("half_rows")
    with pytest.raises(ConfigError, match="does not accept the arguments"):
        load("generate", speed=3)
    with pytest.raises(ConfigError, match="no function 'missing'"):
        load("missing")
    with pytest.raises(ConfigError, match="no module named 'nowhere'"):
        load_set(PromptDataset, "nowhere.at.all:f", tokenizer)


def test_bad_sources_and_settings(tmp_path, tokenizer):
    (tmp_path / "x.tsv").write_text("prompt")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    for name, message in {
        "nope.jsonl": "nope.jsonl does not exist",
        "folder": "contains no .jsonl",
        "x.tsv": "none of the suffixes .jsonl",
        "empty.jsonl": "contains no rows",
    }.items():
        with pytest.raises(DataError, match=message):
            load_set(PromptDataset, tmp_path / name, tokenizer)
    with pytest.raises(TokenizerError, match="has no BOS"):
        load_rows(PromptDataset, tmp_path, ROWS, SimpleNamespace(bos_id=None), add_bos=True)
    with pytest.raises(ConfigError, match="are both 'prompt'"):
        load_rows(PromptDataset, tmp_path, ROWS, ground_truth_column="prompt")
