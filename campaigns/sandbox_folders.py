"""Programs that fill the disk with entries, and environments killed in the middle of one."""

import tempfile
import time
import uuid
from pathlib import Path

from aligner.errors import ConfigError
from aligner.examples.tasks.python_tool import Interpreter
from aligner.examples.tasks.sandbox import Isolation, check_isolation
from aligner.process_tree import kill_tree
from campaigns.harness import Campaign, end_marked, python

_TIMEOUT_S = 3.0
_LATER_S = 4.0  # in which an answer must come after the time limit, on crowded cores
_REMOVED_S = 90.0
_PROGRAMS = {
    "chain": "while True: os.mkdir('d'); os.chdir('d')",
    "chain of long names": "while True: os.mkdir('d' * 250); os.chdir('d' * 250)",
    "flat": "n = 0\nwhile True: os.mkdir(str(n)); n += 1",
    "files": "n = 0\nwhile True: open(str(n), 'w').close(); n += 1",
    "tree": "n = 0\nwhile True: os.makedirs(f'{n % 9}/{n % 7}/{n}'); n += 1",
    "large files": "n = 0\nwhile True: open(str(n), 'wb').write(bytes(2**20)); n += 1",
    "without output": "os.close(1); os.close(2); n = 0\nwhile True: os.mkdir(str(n)); n += 1",
    "closed folders": "n = 0\nwhile True: os.makedirs(f'{n}/a'); os.mkdir(f'{n}/b', 0); n += 1",
    "moved about": "os.mkdir('a')\nwhile True: os.rename('a', 'b'); os.rename('b', 'a')",
    "names of bytes": "n = 0\nwhile True: open(b'\\xff\\n%d' % n, 'w').close(); n += 1",
    "made and removed": "while True: os.makedirs('a/b/c'); os.removedirs('a/b/c')",
    "ours by name": "os.mkdir('aligner-scratch-x'); open('aligner-scratch-y', 'w').close()",
}


def run_campaign(campaign: Campaign) -> None:
    """Run each program with and without a kill of the requesting process."""
    cases = [(name, how) for name in _PROGRAMS for how in ("answered", "killed")]
    for name, how in campaign.while_time(cases * 3):
        code, folder = "import os\n" + _PROGRAMS[name], campaign.fresh("temporary")
        folder.mkdir()
        good, note = (_answered if how == "answered" else _killed)(campaign, code, folder)
        deadline = time.monotonic() + _REMOVED_S
        while (survivors := list(folder.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        campaign.record(f"{name}, {how}", good and not survivors, f"{note}; {len(survivors)} left")


def _isolation() -> Isolation:
    try:
        check_isolation("kernel")
    except ConfigError:  # a kernel without the layers
        return "python"
    return "kernel"


def _answered(campaign: Campaign, code: str, folder: Path) -> tuple[bool, str]:
    tool = Interpreter(timeout_s=_TIMEOUT_S, isolation=_isolation())
    usual = tempfile.tempdir
    tempfile.tempdir = str(folder)
    began = time.monotonic()
    try:
        printed = tool.python(code)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    finally:
        tempfile.tempdir = usual
    seconds = time.monotonic() - began
    return seconds < _TIMEOUT_S + _LATER_S, f"{seconds:.1f} s: {printed[-100:]}"


def _killed(campaign: Campaign, code: str, folder: Path) -> tuple[bool, str]:
    """Send SIGKILL to the requesting process at a random moment."""
    requests = (
        "from aligner.examples.tasks.python_tool import Interpreter\n"
        f"tool = Interpreter(timeout_s={_TIMEOUT_S}, isolation={_isolation()!r})\n"
        f"while True: tool.python({code!r})"
    )
    log, mark = campaign.folder / "killed.log", uuid.uuid4().hex
    process = python(
        "-c",
        "import os, sys; os.environ['TMPDIR'] = sys.argv[1]; "
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[2]])",
        folder,
        requests,
        log=log,
        mark=mark,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(folder.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(campaign.rng.uniform(0.0, 2.0))
        alive = process.poll() is None
        kill_tree(process.pid)
        process.wait()
    finally:
        survivors = end_marked(mark, 5.0)
    return alive and not survivors, f"alive {alive}, left {survivors}"
