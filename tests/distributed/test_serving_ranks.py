"""A server of two processes answers as one does, streams where a rank has every row, and ends."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from aligner.algorithms.ask.generate import generate
from aligner.config import GenerateConfig, parse_config

pytestmark = pytest.mark.extended
ROOT = Path(__file__).parents[2]
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
    process = subprocess.Popen(
        [sys.executable, "-m", "aligner.commands", "serve", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(200, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        found = (re.search(r"at (http://[\d.:]+)/v1", line) for line in process.stdout)
        url = next(filter(None, found))[1]
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
    finally:
        watchdog.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
