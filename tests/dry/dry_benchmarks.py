"""Benchmarks for a GPU at the tiny shape, as cases of `dry`."""

import contextlib
import importlib
import io
import json


def measured(sizes):
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        for name, arguments in sizes.items():
            module = importlib.import_module(f"benchmarks.gpu.{name}")
            module.main(["--device", "dry", "--shape", "tiny", *arguments])
    return [json.loads(line) for line in written.getvalue().splitlines()]
