"""docs/serving.md as it stands: the server is started, asked with curl and in Python, and ended."""

import re
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest
from documented import ROOT, blocks, commands
from servers import started

pytestmark = pytest.mark.integration


def of_page(items, part):
    """The only command or block of the page that contains ``part``."""
    (found,) = (one for one in items if one.page == "docs/serving.md" and part in one.text)
    return found


def typed(folder, url, *command):
    """What a command of the page prints; its port is the server's."""
    command = [part.replace("http://127.0.0.1:8000", url) for part in command]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_server_answers_curl_and_python_and_ctrl_c_ends_it_in_seconds(tmp_path, tiny_nemo):
    """The signal comes with a request in flight, and the status is 0."""
    (tmp_path / "MODEL").symlink_to(tiny_nemo)
    words = [*of_page(commands(), "--model").words[1:], "server.port=0", "server.model_name=tiny"]
    command, env = [sys.executable, "-m", "aligner.commands", *words], {"PYTHONPATH": str(ROOT)}
    pattern = r"tiny at (http://[\d.:]+)/v1"
    with started(command, pattern, cwd=tmp_path, env=env) as (url, process):
        if shutil.which("curl") is not None:
            answer = typed(tmp_path, url, "bash", "-c", of_page(commands(), "curl").text)
            assert '"object":"chat.completion"' in answer
        script = of_page(blocks(), "import httpx").text
        printed = typed(tmp_path, url, sys.executable, "-c", script)
        assert re.search(r"\[\d+.*\] (length|stop)\n$", printed)
        key = {"Authorization": f"Bearer {(tmp_path / 'serve.token').read_text().strip()}"}
        body = {"prompt": "x", "max_tokens": 240, "min_tokens": 240, "n": 64, "stream": True}
        request = {"json": body, "headers": key, "timeout": 60}
        with httpx.stream("POST", f"{url}/v1/completions", **request) as answer:
            lines = answer.iter_lines()
            next(lines)
            signalled = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert time.monotonic() - signalled < 6
            assert "the server is ending" in "".join(lines)
