"""The process behind the fixture `dry`: each case is a fork of it.

Reads one JSON line for a case, ``{"case": "module:function", "arguments": {...}}``, and answers
with one: ``{"found": ...}``, or ``{"error": traceback}``. Modules are those of this folder.
"""

import importlib
import json
import os
import sys
import traceback

from aligner_plan.dry.guard import load_guard

load_guard()

import dry_roles


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    # The rules of operations are looked up at first use, which takes longest. No backward pass: its
    # threads would be missing in the forks.
    for precision in ("32", "bf16"):
        dry_roles.phases(role="actor", trained=False, precision=precision)
    for line in sys.stdin:
        request = json.loads(line)
        # Imported here, so that the next case of the module finds what it imports.
        module, _, name = request["case"].partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            answer = in_fork(lambda: function(**request["arguments"]))  # noqa: B023
        except Exception:
            answer = json.dumps({"error": shortened(traceback.format_exc())})
        answers.write(answer + "\n")
        answers.flush()


def in_fork(run) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = json.dumps({"found": run()})
        except BaseException:
            answer = json.dumps({"error": shortened(traceback.format_exc())})
        with os.fdopen(write, "w") as out:
            out.write(answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps({"error": f"the case's process ended with status {status}"})


def shortened(trace: str) -> str:
    """Without PyTorch's list of every kernel that is registered."""
    return "\n".join(line for line in trace.splitlines() if " registered at " not in line)[-9000:]


if __name__ == "__main__":
    main()
