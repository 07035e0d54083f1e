"""A server of two processes answers as one does, streams where a rank has every row, and ends."""

import json
import os
import signal
import sys

import httpx
import pytest
from recipes import ROOT
from servers import started

from aligner.algorithms.ask.generate import generate
from aligner.config import GenerateConfig, parse_config

pytestmark = pytest.mark.extended
PROMPTS = ["12+3=", "hello", "1"]
LAYOUTS = {"data": [], "tensor": ["model.tensor_model_parallel_size=2"]}


@pytest.fixture(scope="module")
def expected(tiny_nemo, tmp_path_factory):
    output = tmp_path_factory.mktemp("answers") / "a.jsonl"
    sampling = {"use_greedy": True, "max_length": 12}
    model = {"restore_from_path": str(tiny_nemo)}
    values = {"model": model, "prompt": PROMPTS, "sampling": sampling, "output": str(output)}
    generate(parse_config(values, GenerateConfig))
    return [json.loads(line)["response"] for line in output.read_text().splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes(layout, expected, tiny_nemo, tmp_path):
    words = ["--model", str(tiny_nemo), "--token-file", "token", "server.port=0"]
    words += ["sampling.max_length=12", "trainer.devices=2", *LAYOUTS[layout]]
    command = [sys.executable, "-m", "aligner.commands", "serve", *words]
    ready, environment = r"at (http://[\d.:]+)/v1", {"PYTHONPATH": str(ROOT)}
    with started(command, ready, cwd=tmp_path, env=environment) as (url, process):
        key = {"Authorization": f"Bearer {(tmp_path / 'token').read_text().strip()}"}
        asked = {"prompt": PROMPTS, "temperature": 0}
        with httpx.Client(base_url=url, headers=key, timeout=60) as client:
            answer = client.post("/v1/completions", json=asked).json()
            assert [choice["text"] for choice in answer["choices"]] == expected
            streamed = client.post("/v1/completions", json={**asked, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")
        pieces = streamed.count('"text_completion"')
        # Tensor-parallel ranks hear of every row, data-parallel ones of their own.
        assert pieces > 20 if layout == "tensor" else pieces <= 2 * len(PROMPTS)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 0
