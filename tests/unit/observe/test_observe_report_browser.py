"""The report in headless Chromium at the widths of a phone and of a desktop."""

import html
import json
import math
import re
import shutil
import subprocess

import pytest
from test_observe_report import sample

from aligner.observe.metrics import METRICS, Sample
from aligner.observe.report.run import RunRecord, render_report

pytestmark = pytest.mark.browser

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HEIGHT = 900
# Measures the report inside of a frame, because no window of Chromium is narrower than 500 pixels.
MEASURE = """
frame.onload = () => {
  const page = frame.contentDocument;
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.right, r.height]; };
  const all = (selector, f) => [...page.querySelectorAll(selector)].map(f);
  document.title = JSON.stringify({
    width: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    wide: all("body *", e => e).filter(e => getComputedStyle(e).overflowX !== "auto" &&
      e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && !e.closest("svg, pre, td.number"))
      .map(e => e.tagName + "." + e.className),
    tables: all("table.responses", e => [e.scrollWidth, e.parentElement.clientWidth]),
    answers: all("td[data-label=response], td[data-label=after]", box),
    rewards: all("td[data-label=reward]", box),
  });
};
"""


def long_sample(step: int, split: str, **changes) -> Sample:
    prompt = f"{step}: What is the sum of " + "and ".join(f"{i} " for i in range(40))
    plain = {"prompt": prompt, "response": "The sum is " + "x" * 300, "reward": -0.25}
    return sample(step, split, **{**plain, "is_end": False, **changes})


def report() -> str:
    """A run of ten steps with the metrics of PPO, most of them constant, and long samples."""
    groups = ("train_rollouts/", "val_rollouts/", "critic/", "sampler/", "progress/")
    names = [name for name in METRICS if name.startswith(groups)]
    metrics = [
        {"step": step, **{name: 4.0 if i % 3 else math.sin(step) for i, name in enumerate(names)}}
        for step in range(10)
    ]
    turn = {"content": "y" * 200, "tokens": 7, "answer": [{"role": "user", "content": "go on"}]}
    samples = [long_sample(step, "val", prompt="a" * 200) for step in (0, 9)]
    samples += [long_sample(1, "train"), long_sample(9, "train", turns=[turn, turn])]
    files = {"policy": "results/" + "long_folder_name/" * 8 + "policy.nemo"}
    return render_report(RunRecord("PPO of tiny.nemo", "a: 1", {}, metrics, samples, files))


@pytest.mark.skipif(BROWSER is None, reason="needs chromium, from the packages of the system")
@pytest.mark.parametrize(("width", "longest"), [(390, 20_000), (1280, 10_000)])
def test_nothing_overflows_and_responses_are_visible(tmp_path, width, longest):
    page = tmp_path / "frame.html"
    page.write_text(
        f'<body style="margin:0"><iframe id="frame" style="border:0;width:{width}px;'
        f'height:{HEIGHT}px" srcdoc="{html.escape(report())}"></iframe><script>{MEASURE}</script>'
    )
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path}/profile", f"--window-size={width},{HEIGHT}"]
    command += ["--dump-dom", "--virtual-time-budget=5000", page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    seen = json.loads(html.unescape(re.search("<title>(.*)</title>", run.stdout)[1]))
    assert seen["width"] == width
    assert seen["wide"] == []
    assert all(table <= card for table, card in seen["tables"]), seen["tables"]
    assert len(seen["tables"]) == 3
    assert len(seen["answers"]) == 3
    assert len(seen["rewards"]) == 4
    for left, right, height in seen["answers"] + seen["rewards"]:
        assert 0 <= left < right <= width
        assert height > 10
    assert seen["height"] < longest
