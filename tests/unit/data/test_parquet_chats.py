"""Chats and tools in Parquet files: the nulls that Arrow adds are no part of a row."""

import pyarrow as pa
import pytest
from loaded import load_set, write_rows
from pyarrow import parquet
from test_chat_data import chatml

from aligner.data.preferences import PairDataset
from aligner.data.prompts import PromptDataset
from aligner.data.readers import read_rows
from aligner.data.supervised import ExampleDataset
from aligner.errors import DataError

TEMPLATE = (
    "{% if tools %}{{ 'TOOLS ' + (tools | tojson) }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + (c.function | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return chatml(TEMPLATE)


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(name, **arguments):
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


NUMBERS = {"type": "array", "items": {"type": "number"}}
ROWS = [
    {"tools": [tool("weather", town={"type": "string"})], "call": call("weather", town="Graz")},
    {"tools": [tool("add", terms=NUMBERS)], "call": call("add", terms=[1, 2])},
    {"tools": [tool("now")], "call": call("now")},
]
USER = {"role": "user", "content": "do it"}


def both(tmp_path, rows):
    """The same rows as JSONL and as Parquet."""
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"


NO = {"role": "assistant", "content": "no"}
HERE = {"role": "tool", "content": "here"}


@pytest.mark.parametrize(
    ("kind", "columns", "options"),
    [
        (ExampleDataset, lambda call: {"messages": [USER, call]}, {"messages_column": "messages"}),
        (PromptDataset, lambda call: {"prompt": [USER, call, HERE]}, {"ground_truth_column": None}),
        (PairDataset, lambda call: {"prompt": [USER], "chosen": [call], "rejected": [NO]}, {}),
    ],
    ids=["examples", "prompts", "pairs"],
)
def test_rows_are_those_of_jsonl(tmp_path, tokenizer, kind, columns, options):
    rows = [{**columns(row["call"]), "tools": row["tools"]} for row in ROWS]
    lines, table = (load_set(kind, file, tokenizer, **options) for file in both(tmp_path, rows))
    assert list(table) == list(lines)
    if kind is ExampleDataset:
        assert "null" not in tokenizer.decode(table[0].ids)


def test_columns_of_environments_and_others(tmp_path):
    """Messages in lists, in structs and by themselves. A null outside of chats stays."""
    named = {**USER, "name": "Ada"}
    nested = [
        {
            "task": {"chat": [user, row["call"]], "tools": row["tools"], "hint": hint},
            "first": user,
            "chats": [[user], [user, row["call"]]],
        }
        for row, user, hint in zip(ROWS, (USER, named, USER), ("a", None, "b"), strict=True)
    ]
    chats = [{"messages": [USER, row["call"]], "tools": row["tools"]} for row in ROWS]
    plain = [{"extra": {"hint": None, "index": 1}}, {"extra": {"hint": "h", "index": 2}}]
    for rows in (nested, chats, plain):
        for file in both(tmp_path, rows):
            assert [row.columns for row in read_rows(file)] == rows


def test_byte_order_marks(tmp_path):
    mark = b"\xef\xbb\xbf"
    for name, content in (
        ("a.txt", b"2+3=\r\n4+4=\r\n"),
        ("a.jsonl", b'{"prompt": "2+3="}\n{"prompt": "4+4="}\n'),
        ("b.jsonl", b'\n{"prompt": "2+3="}\n{"prompt": "4+4="}\n'),
    ):
        (tmp_path / name).write_bytes(mark + content)
        assert [row.columns["prompt"] for row in read_rows(tmp_path / name)] == ["2+3=", "4+4="]


def test_maps_are_objects(tmp_path):
    maps = [{"x": 1, "y": 2}, {}, None]
    kind = pa.map_(pa.string(), pa.int64())
    file = tmp_path / "maps.parquet"
    parquet.write_table(pa.table({"limits": pa.array(maps, kind)}), file)
    assert [row.columns["limits"] for row in read_rows(file)] == maps
    twice = pa.array([[("x", 1), ("x", 2)]], kind)
    parquet.write_table(pa.table({"limits": twice}), file)
    with pytest.raises(DataError, match=r"maps\.parquet, after row 0: .*duplicate key was 'x'"):
        list(read_rows(file))
