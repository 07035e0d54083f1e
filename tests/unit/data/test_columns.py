"""Data as other libraries have it: formats of files, columns by other names, pairs, text."""

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from loaded import load_rows, load_set, write_rows
from pyarrow import parquet

from aligner.data.dataset import Split
from aligner.data.preferences import LabelledDataset, PairDataset, RatedDataset
from aligner.data.prompts import PromptDataset
from aligner.data.readers import DataRow, read_rows
from aligner.data.supervised import ExampleDataset
from aligner.errors import DataError

ROWS = [{"prompt": "1+1=", "ground_truth": "2"}, {"prompt": 'é, "x"\n=', "ground_truth": "3"}]
TURNS = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
CHAT = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]


def columns(source):
    return [row.columns for row in read_rows(source)]


def texts(tokenizer, example):
    """Prompt and learned text of an example."""
    start, end = example.learned[-1]
    return tokenizer.decode(example.ids[:start]), tokenizer.decode(example.ids[start : end - 1])


def saved_to_disk(folder, rows):
    """Write the files of `datasets.Dataset.save_to_disk`, the second shard first by its name."""
    folder.mkdir(parents=True)
    names = ["data-b.arrow", "data-a.arrow"]
    for name, row in zip(names, rows, strict=True):
        table = pa.Table.from_pylist([row])
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "cache-1.arrow").write_bytes(b"of datasets.map")
    return folder


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", "[1]", r"x.json, row 1: a row must be a JSON object with columns, got int"),
        ("x.json", "[{]", r"x.json: not JSON"),
        ("x.json", '[{"a": 1, "a": 2}]', "the key 'a' occurs twice"),
        ("x.csv", "a,b\n1\n", r"x.csv, line 2: 1 cells for the columns \['a', 'b'\]"),
        ("x.csv", "a,a\n1,2\n", "Give each column a different name"),
        ("x.csv", 'a\n"1', "x.csv: not readable CSV"),
        ("x.arrow", "no stream", "x.arrow, after row 0: cannot be read as .arrow"),
        ("state.json", "{}", "state.json names no files"),
    ],
)
def test_a_faulty_file_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        columns(tmp_path if name == "state.json" else tmp_path / name)


def test_every_format_gives_the_same_rows(tmp_path):
    with pytest.raises(DataError, match=r"no file matches .*none\*\.json"):
        columns(tmp_path / "none*.json")
    saved_to_disk(tmp_path / "d" / "test", ROWS)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(DataError, match=r"several splits. Give the path of one: .*d/test$"):
        columns(tmp_path / "d")
    (tmp_path / "a.json").write_text("\ufeff " + json.dumps(ROWS, indent=1), encoding="utf-8")
    (tmp_path / "b.json").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "c.csv").write_text('prompt,ground_truth\n1+1=,2\n"é, ""x""\n=",3\n')
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    saved_to_disk(tmp_path / "e", ROWS)
    for name in ("a.json", "b.json", "c.csv", "d.parquet", "e", "e/data-?.arrow"):
        expected = ROWS[::-1] if "?" in name else ROWS
        assert columns(tmp_path / name) == expected, name
    assert columns(tmp_path / "[ab].json") == ROWS * 2
    assert columns(tmp_path / "**" / "*.csv") == ROWS


def test_a_dot_leads_into_a_column(tmp_path):
    row = DataRow("here", {"a": {"b": {"c": 1}}, "a.b": 2})
    assert [row.get(name) for name in ("a.b.c", "a.b", "a.x.y", "x")] == [1, 2, None, None]
    rows = [{"q": {"text": "1+1="}, "reward_model": {"ground_truth": "2"}, "prompt": "x"}]
    options = {"prompt_column": "q.text", "ground_truth_column": "reward_model.ground_truth"}
    prompt = load_rows(PromptDataset, tmp_path, rows, **options)[0]
    assert (prompt.text, prompt.ground_truth) == ("1+1=", "2")
    assert prompt.columns == rows[0]
    rows = [{"chat": {"turns": CHAT}, "r": {"help": 4}, "prompt": "a", "response": "b"}]
    rated = load_rows(RatedDataset, tmp_path, rows, attribute_columns=("r.help",))[0]
    assert rated.ratings == (4.0,)


SUM = ("2+3=", "5")


@pytest.mark.parametrize(
    ("row", "expected", "taken"),
    [
        (
            {"question": "2+3=", "answer": "5"},
            SUM,
            "prompt_column=question, response_column=answer",
        ),
        ({"prompt": "2+3=", "completion": "5"}, SUM, "response_column=completion"),
        ({"text": "2+3=5"}, ("2", "+3=5"), "text_column=text"),
    ],
)
def test_columns_of_examples_are_recognised(tokenizer, tmp_path, row, expected, taken):
    examples = load_rows(ExampleDataset, tmp_path, [row])
    assert texts(tokenizer, examples[0]) == expected
    expected = ", ".join(f"data.{key}" for key in taken.split(", "))
    assert examples.recognised == [f"{tmp_path / 'x.jsonl'}: {expected}"]
    assert Split(examples).notes()[0].startswith("columns of the training data that were")


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"conversations": TURNS}, {"messages": TURNS}])
def test_chats_are_recognised_in_both_forms(tmp_path, row):
    plain = load_rows(ExampleDataset, tmp_path, [{"chat": CHAT}], messages_column="chat")[0]
    found = load_rows(ExampleDataset, tmp_path, [row])
    assert (found[0].ids, found[0].learned) == (plain.ids, plain.learned)
    assert found.recognised == [f"{tmp_path / 'x.jsonl'}: data.messages_column={next(iter(row))}"]


BING = {"from": "bing", "value": "a"}


@pytest.mark.parametrize(
    ("kind", "row", "options", "message"),
    [
        (ExampleDataset, {"prompt": "", "answer": "", "output": ""}, {}, "'response' is missing"),
        (ExampleDataset, {"prompt": "a", "answer": ""}, {"response_column": "c"}, "'c' is missing"),
        (ExampleDataset, {"prompt": None, "question": "a", "response": ""}, {}, "'prompt' is null"),
        (ExampleDataset, {"conversations": [BING]}, {}, "from='bing' is none of human"),
        (ExampleDataset, {"text": ""}, {}, "the text is empty"),
        (ExampleDataset, {"text": 1}, {"text_column": "text"}, "'text' must be text, got int"),
        (PromptDataset, {"question": "", "answer": "", "solution": ""}, {}, "ground_truth_column"),
        (PairDataset, {"chosen": "yes", "rejected": "no"}, {}, "do not begin with the same prompt"),
        (PairDataset, {"chosen": "ab", "rejected": "ac"}, {"prompt_column": "p"}, "'p' is missing"),
    ],
)
def test_what_is_ambiguous_is_refused_with_the_key(kind, row, options, message, tmp_path):
    with pytest.raises(DataError, match=message) as refusal:
        load_rows(kind, tmp_path, [row], **options)
    assert "x.jsonl, line 1" in str(refusal.value)
    assert str(sorted(row)) in str(refusal.value)


def test_prompts_and_ground_truths_of_verl_and_trl(tmp_path):
    verl = {"prompt": CHAT[:1], "reward_model": {"ground_truth": "5"}, "data_source": "sums"}
    prompts = load_rows(PromptDataset, tmp_path, [verl])
    assert prompts[0].ground_truth == "5"
    assert prompts[0].messages == CHAT[:1]
    assert prompts[0].columns.keys() == {"reward_model", "data_source"}
    # A reward function reads the column of a recognised ground truth, too.
    prompts = load_rows(PromptDataset, tmp_path, [{"question": "2+3=", "answer": "5"}])
    assert (prompts[0].text, prompts[0].ground_truth) == ("2+3=", "5")
    assert prompts[0].columns == {"answer": "5"}


def test_each_source_has_its_own_columns(tokenizer, tmp_path):
    rows = [{"question": "a", "answer": "b"}, {"prompt": "c", "response": "d"}, {"messages": CHAT}]
    paths = [write_rows(tmp_path / f"{n}.jsonl", [row] * 2) for n, row in enumerate(rows)]
    examples = load_set(ExampleDataset, paths, tokenizer, limit=5)
    assert [example.id for example in examples] == [0, 1, 2, 3, 4]
    found = [texts(tokenizer, example)[1] for example in examples]
    assert found == ["b", "b", "d", "d", "5"]
    assert len(examples.recognised) == 2


HELPFUL = "\n\nHuman: Hi\n\nAssistant: I"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        (f"{HELPFUL} am", f"{HELPFUL} will", HELPFUL, (" am", " will")),
        ("2+3=15", "2+3=16", "2+3=", ("15", "16")),
        ("Why? Because.", "Why?", "Why?", (" Because.", "")),
        ("say: tea", "say: teapot", "say:", (" tea", " teapot")),
    ],
)
def test_the_prompt_of_a_pair_is_what_both_begin_with(
    chosen, rejected, prompt, answers, tokenizer, tmp_path
):
    pairs = load_rows(PairDataset, tmp_path, [{"chosen": chosen, "rejected": rejected}])
    assert texts(tokenizer, pairs[0].chosen) == (prompt, answers[0])
    assert texts(tokenizer, pairs[0].rejected) == (prompt, answers[1])
    assert pairs.recognised[0].endswith("the prompt is the common beginning of both responses")


def test_pairs_are_labelled_responses(tokenizer, tmp_path):
    rows = [{"chosen": "2+3=5", "rejected": "2+3=6"}, {"chosen": "4+4=8", "rejected": "4+4=1"}]
    labelled = load_rows(LabelledDataset, tmp_path, rows)
    found = [(*texts(tokenizer, row.example), row.desirable) for row in labelled]
    assert found == [
        *[("2+3=", "5", True), ("2+3=", "6", False)],
        *[("4+4=", "8", True), ("4+4=", "1", False)],
    ]
    assert texts(tokenizer, labelled[0].mismatched) == ("2+3=", "1")
    wrong = [CHAT[0], {**CHAT[1], "content": "6"}]
    chats = json.dumps([{"chosen": CHAT, "rejected": wrong}])
    rows = [*json.loads(chats), *json.loads(chats.replace("2+3?", "4+4?"))]
    labelled = load_rows(LabelledDataset, tmp_path, rows)
    assert [row.desirable for row in labelled] == [True, False, True, False]


def test_labels_and_ratings_of_csv_are_numbers(tokenizer, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("prompt,completion,label,stars\na,b,True,4.5\nc,d,0,\n")
    labelled = load_set(LabelledDataset, path, tokenizer)
    assert [row.desirable for row in labelled] == [True, False]
    path.write_text("prompt,response,stars\na,b,4.5\nc,d,many\n")
    with pytest.raises(DataError, match="line 3: column 'stars' must be a finite number or null"):
        load_set(RatedDataset, path, tokenizer, attribute_columns=("stars",))


@pytest.mark.extended
def test_datasets_itself_writes_the_folder_that_is_read(tmp_path):
    pytest.importorskip("datasets")
    text = (
        "import datasets; d = datasets.Dataset.from_list([{'a': i, 'b': {'c': str(i)}} for i in "
        f"range(5)]); d.select([4, 2, 0]).save_to_disk({str(tmp_path / 'd')!r}, num_shards=2)"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
    assert columns(tmp_path / "d") == [{"a": i, "b": {"c": str(i)}} for i in (4, 2, 0)]
