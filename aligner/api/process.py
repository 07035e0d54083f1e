"""Runs a command-line script in another process. Passes on its output, its errors and Ctrl-C.

::

    run's process                       caller
    stdout  ── thread ──►  sys.stdout   (directly if that is a terminal)
    stderr  ── thread ──►  sys.stderr   (the last lines become the exception)
    signals ◄── SIGINT ──  the first KeyboardInterrupt (a second, or the caller's end, kills)
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any, TextIO

from aligner.errors import AlignerError, WorkerError, error_class
from aligner.process_tree import kill_tree

_MAX_LINES = 2000
# `die_with_parent`: a killed or restarted kernel leaves no run behind.
_PROGRAM = (
    "from aligner.process_tree import die_with_parent; die_with_parent(); "
    "from aligner.commands import main; main()"
)
_COLUMNS = (
    "import json, sys; from aligner.importing import load_function; "
    "rows = load_function(sys.argv[1], key='data')(**json.loads(sys.argv[2])); "
    "print(); print(json.dumps([*next(iter(rows))]))"
)


def run_script(command: str, arguments: Sequence[str]) -> None:
    """Run ``aligner COMMAND ARGUMENTS`` and wait until the command ends.

    Raises:
        AlignerError: the command reported an error. The exception has the same class and message.
        WorkerError: the command failed without an error report.
        KeyboardInterrupt: the user pressed Ctrl-C. The run has saved its state.
    """
    has_terminal = _is_terminal(sys.stdout)
    environment = _environment()
    if not has_terminal:  # notebooks set it, and the progress bar needs a terminal
        environment.pop("FORCE_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, command, *arguments],
        stdout=None if has_terminal else subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C reaches the run once, from here
    )
    stderr = deque[str](maxlen=_MAX_LINES)
    readers = [threading.Thread(target=_copy, args=(process.stderr, sys.stderr, stderr))]
    if process.stdout is not None:
        readers.append(threading.Thread(target=_copy, args=(process.stdout, sys.stdout, None)))
    for reader in readers:
        reader.start()
    was_interrupted = False
    try:
        status = process.wait()
    except KeyboardInterrupt:
        was_interrupted = True
        os.killpg(process.pid, signal.SIGINT)  # all ranks, as a terminal does
        status = process.wait()
    finally:
        if process.poll() is None:  # a second Ctrl-C, or an error of this process
            kill_tree(process.pid)
            process.wait()
        for reader in readers:
            reader.join()
    if was_interrupted or status == 130:
        raise KeyboardInterrupt
    if status == 0:
        return
    # The error that the command reported.
    for index, line in enumerate(lines := list(stderr)):
        if report := _report(line):
            kind, first = report
            raise kind((first + "".join(lines[index + 1 :])).rstrip("\n"))
    raise WorkerError(f"the run ended with exit status {status}. See its last lines above")


def columns_of_generator(function: str, arguments: Mapping[str, Any]) -> set[str]:
    """Return the columns of a generator function's first row, or an empty set if the call fails.

    Another process calls ``function``, an import path, so that the caller's state does not change.
    """
    program = [sys.executable, "-c", _COLUMNS, function, json.dumps(arguments, default=str)]
    done = subprocess.run(
        program, capture_output=True, stdin=subprocess.DEVNULL, env=_environment(), check=False
    )
    return set() if done.returncode else {*json.loads(done.stdout.splitlines()[-1])}


def _environment() -> dict[str, str]:
    """Return variables with which a process imports the modules that the caller can import."""
    added = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(added)}


def _is_terminal(stream: TextIO) -> bool:
    """Return whether ``stream`` is this process's standard output on a terminal."""
    try:
        return stream.isatty() and stream.fileno() == 1
    except (OSError, ValueError, AttributeError):  # a notebook's stream has no descriptor
        return False


def _copy(source: IO[str] | None, target: TextIO, last_lines: deque[str] | None) -> None:
    """Copy lines to ``target`` until an error report begins. Append all lines to ``last_lines``."""
    assert source is not None, "the stream is a pipe"
    is_report = False
    for line in source:
        if last_lines is not None:
            last_lines.append(line)
            is_report = is_report or _report(line) is not None
        if not is_report:
            target.write(line)
            target.flush()


def _report(line: str) -> tuple[type[AlignerError], str] | None:
    """Parse the first line of an error report: the error's class and text. None for others."""
    match = re.match(r"(\w+Error): (.*)", line, re.DOTALL)
    kind = error_class(match[1]) if match else None
    return (kind, match[2]) if match and kind else None
