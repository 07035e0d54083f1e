"""The fixture `dry`, which runs cases on the dry device (`aligner_plan.dry`).

To add cases, write ``tests/dry/dry_NAME.py`` with functions that take and return what JSON has, and
that enter a `DryDevice` themselves; torch and the library may be imported at the top, the guard is
loaded already. Then, in ``tests/dry/test_dry_NAME.py``:

    def test_something(dry):
        found = dry("dry_NAME:function", tp=2)

`dry_roles` has the parts that most cases want: settings, a batch, a role of the tiny architecture.
A case runs in a fork of one process that has imported the library, so it costs a second or two and
leaves nothing behind; asked for twice with the same arguments it runs once.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 150


class DryProcess:
    def __init__(self):
        path = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "dry_worker.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answers = {}

    def answer(self, case, arguments):
        """``{"found": ...}`` or ``{"error": ...}`` of a case."""
        request = json.dumps({"case": case, "arguments": arguments}, sort_keys=True)
        if request not in self._answers:
            self._answers[request] = self._ask(request)
        return self._answers[request]

    def _ask(self, request):
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
        if not ready:
            self.close()
            pytest.fail(f"{request} took longer than {TIMEOUT_S} s")
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the process of the dry device ended"}

    def close(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()


@pytest.fixture(scope="session")
def dry(dry_possible):
    """``dry("module:function", **arguments)``: what the function returned; fails with its error."""
    process = DryProcess()

    def run(case, **arguments):
        answer = process.answer(case, arguments)
        if "error" in answer:
            pytest.fail(f"{case} {arguments}:\n{answer['error']}", pytrace=False)
        return answer["found"]

    yield run
    process.close()
