"""docs/serving.md as it stands: the server is started, asked with curl and in Python, and ended."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from documented import blocks, commands
from servers import started

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page(tiny_nemo, tmp_path_factory):
    """Folder, address and process of the page's command, on a port that is free."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "MODEL").symlink_to(tiny_nemo)
    [command] = [
        one for one in commands() if one.page == "docs/serving.md" and "--model" in one.text
    ]
    words = [*command.words[1:], "server.port=0", "server.model_name=tiny"]
    with started(
        [sys.executable, "-m", "aligner.commands", *words],
        r"tiny at (http://[\d.:]+)/v1",
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
    ) as (url, process):
        yield folder, url, process


def typed(page, *command):
    """What a command of the page prints; its port is the server's."""
    folder, url, _ = page
    command = [part.replace("http://127.0.0.1:8000", url) for part in command]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(page):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    [command] = [one for one in commands() if one.page == "docs/serving.md" and "curl" in one.text]
    assert '"object":"chat.completion"' in typed(page, "bash", "-c", command.text)


def test_python(page):
    [block] = [
        one for one in blocks() if one.page == "docs/serving.md" and one.language == "python"
    ]
    assert re.search(r"\[\d+.*\] (length|stop)\n$", typed(page, sys.executable, "-c", block.text))


def test_ctrl_c_ends_it_in_seconds(page):
    """Last of this server's tests: with a request in flight, and status 0."""
    folder, url, process = page
    key = {"Authorization": f"Bearer {(folder / 'serve.token').read_text().strip()}"}
    body = {"prompt": "x", "max_tokens": 240, "min_tokens": 240, "n": 64, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=key, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert time.monotonic() - started < 6
        assert "the server is ending" in "".join(lines)
