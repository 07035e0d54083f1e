"""metrics.jsonl and samples.jsonl: exact numbers, and back to a step after a kill."""

import errno
import json
import math
import os

import numpy as np
import pytest
import torch
from test_observe_report import sample

from aligner.config.experiment import ExpManagerConfig
from aligner.errors import AlignerError, ConfigError, StorageError
from aligner.observe.metrics import (
    MetricsWriter,
    check_names,
    make_loggers,
    read_metrics,
    read_samples,
)
from aligner.observe.progress import sample_table


def test_lines_are_exact_sorted_and_standard_json(tmp_path):
    writer = MetricsWriter(tmp_path)
    third = torch.tensor(1 / 3)
    writer.write(0, {"val_rollouts/accuracy": 0.1 + 0.2, "timers/total": 1.5})
    numbers = {
        "train_optim/loss": third,
        "critic/explained_var": math.nan,
        "train_optim/ppo_ratio_max": math.inf,
        "train_rollouts/num_samples": np.int64(64),
    }
    writer.write(1, numbers)
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == '{"step": 0, "timers/total": 1.5, "val_rollouts/accuracy": 0.30000000000000004}'
    assert list(json.loads(second)) == ["step", *sorted(numbers)]
    read = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert math.isnan(read["critic/explained_var"])
    assert read["train_optim/ppo_ratio_max"] == math.inf
    assert torch.tensor(read["train_optim/loss"]) == third
    assert isinstance(read["train_rollouts/num_samples"], int)


def write_steps(folder, steps) -> MetricsWriter:
    writer = MetricsWriter(folder)
    for step in steps:
        writer.write(step, {"train_rollouts/rewards": step / 7})
    return writer


def test_a_bad_line_costs_no_other_line(tmp_path, caplog):
    write_steps(tmp_path / "whole", range(7)).close()
    write_steps(tmp_path / "damaged", range(5)).close()
    path = tmp_path / "damaged" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"{broken\xff\n"
    lines.insert(4, b"[]\n")
    # The last line is whole, except for its newline.
    damaged = b"".join(lines) + b'{"step": 5, "train_rollouts/rewards": 0.5}'
    path.write_bytes(damaged)
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 3, 4]
    for _ in range(2):  # the second time nothing is amiss
        writer = MetricsWriter(path.parent)
        writer.truncate_after(4)
        for step in (5, 6):
            writer.write(step, {"train_rollouts/rewards": step / 7})
        writer.close()
        assert [line["step"] for line in read_metrics(path)] == [0, 1, 3, 4, 5, 6]
    assert str(path.with_name("metrics.damaged.jsonl")) in caplog.text
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert path.read_bytes() == b"".join(whole[:2] + whole[3:])
    assert path.with_name("metrics.damaged.jsonl").read_bytes() == damaged
    assert not path.with_name("metrics.damaged_2.jsonl").exists()
    # Nor does a step that was altered.
    write_steps(tmp_path / "altered", range(5)).close()
    path = tmp_path / "altered" / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 1,', '{"step": 9,'))
    MetricsWriter(path.parent).truncate_after(3)
    assert [line["step"] for line in read_metrics(path)] == [0, 2, 3]
    assert len(path.with_name("metrics.damaged.jsonl").read_text().splitlines()) == 5


def test_disk_full_names_the_file_and_leaves_whole_lines(tmp_path, monkeypatch):
    writer = write_steps(tmp_path, [0, 1])
    real = os.pwrite

    def half_then_full(file, data, offset):
        if len(data) > 20:
            return real(file, data[:20], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", half_then_full)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: No space left.*bytes\) free"):
        writer.write(2, {"train_rollouts/rewards": 0.5})
    monkeypatch.undo()
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    writer.write(2, {"train_rollouts/rewards": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_what_is_written_by_whom_and_where(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="explicit_log_dir"):
        MetricsWriter(tmp_path / "file" / "run")
    writer = MetricsWriter(tmp_path / "run", rank=1)
    writer.write(1, {"no/such": 1.0})
    writer.truncate_after(0)
    writer.close()
    assert not (tmp_path / "run").exists()
    writer = write_steps(tmp_path, [0, 1, 2])
    with pytest.raises(ValueError, match="must not decrease"):
        writer.write(1, {})
    writer.truncate_after(-1)
    writer.write(0, {})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'train_rollouts/rewards'"):
        writer.write(1, {"train_rollouts/reward": 1.0})
    with pytest.raises(AlignerError, match="is not in aligner/observe/metric_names"):
        check_names(["loss"])
    check_names(["timers/generate", "train_rollouts/reward_parts/format", "custom/x"])
    with pytest.raises(TypeError, match="custom/x"):
        writer.write(1, {"custom/x": "0.5"})


def test_loggers_are_made_at_the_first_line_and_get_every_number(tmp_path):
    made, calls = [], []

    class Recorder:
        def __init__(self):
            made.append(True)

        def log_metrics(self, metrics, step=None):
            calls.append((step, metrics))

        def finalize(self, status):
            calls.append(status)

    writer = MetricsWriter(tmp_path, loggers=lambda: [Recorder()])
    assert made == []
    writer.write(1, {"critic/loss": torch.tensor(0.5)})
    writer.write(2, {"critic/loss": 1})
    writer.close()
    assert made == [True]
    assert calls == [(1, {"critic/loss": 0.5}), (2, {"critic/loss": 1.0}), "success"]


def test_tensorboard_mirror_hides_steps_after_the_restored_one(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for restored, value in ((None, 0.25), (1, 0.75)):
        (logger,) = make_loggers(tmp_path, ExpManagerConfig(), restored_step=restored)
        for step in range(1 if restored is None else restored + 1, 4):
            logger.log_metrics({"critic/loss": value}, step)
        logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("critic/loss")]
    assert scalars == [(1, 0.25), (2, 0.75), (3, 0.75)]


def test_samples_round_trip_also_when_the_model_says_nan(tmp_path):
    writer = MetricsWriter(tmp_path)
    said = [sample(1, "train", response="NaN"), sample(1, reward=math.inf, ground_truth="5")]
    said.append(sample(2, "train", ground_truth="5"))
    writer.write(1, {}, said[:2])
    writer.write(2, {}, said[2:])
    assert read_samples(tmp_path / "samples.jsonl") == said
    writer.truncate_after(1)
    assert read_samples(tmp_path / "samples.jsonl") == said[:2]


def test_sample_table_shows_markup_and_control_codes_as_text():
    from rich.console import Console

    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(sample_table([sample(3, "train", response="[red]5\x1b[0m\n", is_end=False)]))
    text = console.export_text()
    assert "training samples of step 3" in text
    assert "[red]5\ufffd[0m⏎" in text
    assert "2 (cut)" in text
