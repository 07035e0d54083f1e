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


def of_page(items, part):
    """The only command or block of the page that contains ``part``."""
    (found,) = (one for one in items if one.page == "docs/serving.md" and part in one.text)
    return found


@pytest.fixture(scope="module")
def page(tiny_nemo, tmp_path_factory):
    """Folder, address and process of the page's command, on a port that is free."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "MODEL").symlink_to(tiny_nemo)
    words = [*of_page(commands(), "--model").words[1:], "server.port=0", "server.model_name=tiny"]
    command, env = [sys.executable, "-m", "aligner.commands", *words], {"PYTHONPATH": str(ROOT)}
    pattern = r"tiny at (http://[\d.:]+)/v1"
    with started(command, pattern, cwd=folder, env=env) as (url, process):
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
    answer = typed(page, "bash", "-c", of_page(commands(), "curl").text)
    assert '"object":"chat.completion"' in answer


def test_python(page):
    block = of_page(blocks(), "import httpx")
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
