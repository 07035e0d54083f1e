"""Damaged and strange data of every kind: loaded, or refused by an error that names the file."""

import json
import signal
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import (
    DataConfig,
    ExampleDataConfig,
    PairDataConfig,
    PreferenceDataConfig,
    PromptSourceConfig,
    RewardDataConfig,
)
from aligner.data.dataset import Dataset
from aligner.data.preferences import LabelledDataset, PairDataset, RatedDataset
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset
from aligner.errors import AlignerError
from campaigns.harness import TINY, Campaign

_KINDS: dict[str, tuple[type[Dataset[Any]], type[Any], dict[str, Any]]] = {
    "prompts": (PromptDataset, DataConfig, {}),
    "chats": (PromptDataset, DataConfig, {"chat": True}),
    "examples": (ExampleDataset, ExampleDataConfig, {}),
    "messages": (ExampleDataset, ExampleDataConfig, {"messages_column": "messages"}),
    "preferences": (
        PairDataset,
        PairDataConfig,
        {"chosen_reward_column": "cr", "rejected_reward_column": "rr"},
    ),
    "labelled": (LabelledDataset, PreferenceDataConfig, {}),
    "ratings": (RatedDataset, RewardDataConfig, {"attribute_columns": ("help",)}),
}
_GOOD = {
    **{"prompt": "1+1=", "ground_truth": "2", "response": "2", "chosen": "2", "rejected": "3"},
    **{"label": True, "help": 1.0, "cr": 1.0, "rr": 0.0},
}
_OTHER = {**_GOOD, "prompt": "2+2=", "response": "4", "chosen": "4", "label": False}
_TEXTS = ("prompt", "response", "chosen", "rejected", "ground_truth")
_LONGEST_S = 30


class _HangError(BaseException):
    """The time of one file is over."""


def run_campaign(campaign: Campaign) -> None:
    """Load every file as every kind."""
    with open_nemo(TINY) as nemo:
        tokenizer = nemo.tokenizer
    files = _files(campaign.folder)
    cases = [(file, kind) for file in files for kind in _KINDS]
    previous = signal.signal(signal.SIGALRM, _stop)
    try:
        for file, kind in campaign.while_time(cases):
            signal.alarm(_LONGEST_S)
            case = f"{file.name} as {kind}"
            try:
                data_set, section, keys = _KINDS[kind]
                source = PromptSourceConfig(str(file))
                len(data_set.load(source, tokenizer, section(train=source, **keys)))
                campaign.trials += 1
            except AlignerError as error:
                campaign.trials += 1
                if file.stem not in str(error):
                    campaign.trials -= 1
                    campaign.record(case, False, f"the refusal names no file: {str(error)[:150]}")
            except (Exception, _HangError) as error:
                frames = traceback.extract_tb(error.__traceback__)
                library_frames = [frame for frame in frames if "/aligner/" in frame.filename]
                location = (
                    f" at {Path(library_frames[-1].filename).name}:{library_frames[-1].lineno}"
                    if library_frames
                    else ""
                )
                campaign.record(
                    case, False, f"{type(error).__name__}{location}: {str(error)[:100]}"
                )
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, previous)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _HangError


def _lines(*rows: dict[str, Any] | str) -> bytes:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return "\n".join(texts).encode() + b"\n"


def _files(folder: Path) -> list[Path]:
    good = _lines(_GOOD, _OTHER)
    contents = {
        "empty": b"",
        "newlines": b"\n\n\r\n  \n",
        "broken": _lines(_GOOD, '{"prompt": "x"'),
        "no_object": _lines(_GOOD, "[1]"),
        "nul_bytes": b"\0" * 1000,
        "binary": bytes(range(256)) * 50,
        "latin1": good + '{"prompt": "é"}\n'.encode("latin-1"),
        "bom": b"\xef\xbb\xbf" + good,
        "utf16": (json.dumps(_GOOD) + "\n").encode("utf-16"),
        "crlf": good.replace(b"\n", b"\r\n"),
        "no_final_newline": good[:-1],
        "trailing_garbage": _lines(json.dumps(_GOOD) + " x"),
        "two_in_a_line": _lines(json.dumps(_GOOD) * 2),
        "array": json.dumps([_GOOD, _OTHER]).encode(),
        "deep": _lines('{"prompt": "a", "ground_truth": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "huge_prompt": _lines({**_GOOD, "prompt": "x" * 300_000}, _OTHER),
        "surrogate": _lines({**_GOOD, **dict.fromkeys(_TEXTS, "a\ud800b")}, _OTHER),
        "missing_columns": _lines({"a": 1}),
        "one_row": _lines(_GOOD),
        "mixed_columns": _lines({**_GOOD, "a": 1}, {**_OTHER, "b": 2}),
    }
    odd: tuple[Any, ...] = ("", " ", None, 5, True, [], {}, ["a"], {"a": 1}, "a\0b", "\ufeff")
    for number, value in enumerate(odd):
        for name in ("prompt", "response", "chosen", "label"):
            contents[f"{name}_{number}"] = _lines({**_GOOD, name: value}, _OTHER)
    numbers = (float("nan"), float("inf"), 10**400, "1.0", True, None, 1e300)
    for number, value in enumerate(numbers):
        row = {**_GOOD, "help": value, "cr": value, "label": value, "ground_truth": value}
        contents[f"number_{number}"] = _lines(row, _OTHER)
    chats: tuple[Any, ...] = (
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        [{"role": "wizard", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"content": "hi"}],
        [["user", "hi"]],
        [{"role": "user", "content": "{{ ''.__class__.__mro__ }}{% raw %}"}],
        [{"role": "user", "content": "a\ud800"}],
    )
    for number, chat in enumerate(chats):
        contents[f"chat_{number}"] = _lines({**_GOOD, "prompt": chat, "messages": chat}, _OTHER)
    paths = []
    for name, content in contents.items():
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_bytes(content)
    return [*paths, *_tables(folder)]


def _tables(folder: Path) -> list[Path]:
    def write(name: str, rows: list[dict[str, Any]]) -> Path:
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        return folder / f"{name}.parquet"

    missing = {"prompt": None, "label": None, "help": None, "cr": None, "response": None}
    paths = [
        write("table", [_GOOD, _OTHER]),
        write("table_nulls", [_GOOD, {**_OTHER, **missing}]),
        write("table_bytes", [{**_GOOD, "prompt": b"\xff\xfe"}, {**_OTHER, "prompt": b"ab"}]),
        write("table_nan", [{**_GOOD, "help": float("nan"), "cr": float("nan")}, _OTHER]),
    ]
    raw = paths[0].read_bytes()
    damaged = {
        "table_cut": raw[:-40],
        "table_garbage": b"PAR1" + bytes(500) + b"PAR1",
        "table_flipped": raw[:300] + bytes(byte ^ 255 for byte in raw[300:340]) + raw[340:],
        "table_empty": b"",
    }
    for name, content in damaged.items():
        paths.append(folder / f"{name}.parquet")
        paths[-1].write_bytes(content)
    return paths
