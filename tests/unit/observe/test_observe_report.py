"""report.html: self-contained, well-formed, safe, and with the right numbers in it."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from aligner.observe.metrics import MetricsWriter, Sample
from aligner.observe.report.chart import Series, bars, collect_series, line_chart, thin_out, ticks
from aligner.observe.report.page import messages_of, templates
from aligner.observe.report.run import RunRecord, before_and_after, render_report, write_report
from aligner.packages import describe_environment

VOID = {"meta", "line", "circle", "path", "br"}


class Document(HTMLParser):
    """Checks that tags are balanced and collects what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def text_of(html: str) -> str:
    return "".join(Document(html).text)


def sample(step: int, split: str = "val", **changes) -> Sample:
    return dataclasses.replace(Sample(step, split, "1+1=", "2\n", 1.0, 4, 2, True), **changes)


def part(name: str, *values) -> str:
    """HTML of a macro that the pages share."""
    return getattr(templates().get_template("parts.html").module, name)(*values)


def a_run(**changes) -> RunRecord:
    metrics = [
        {"step": 0, "val_rollouts/accuracy": 0.25, "val_rollouts/num_samples": 64},
        {"step": 1, "train_rollouts/rewards": 0.5, "timers/generate": 3.0, "timers/total": 9.0},
        {"step": 2, "train_rollouts/rewards": math.nan, "timers/generate": 1.0},
        {"step": 3, "val_rollouts/accuracy": 0.75, "val_rollouts/num_samples": 64},
    ]
    fields = {
        "title": "A run & more",
        "metrics": metrics,
        "samples": [sample(0, response="</td><script>alert(1)</script>"), sample(3)],
        "config": "lr: 1e-5 # <b>",
        "environment": {"torch": "2"},
        "artifacts": {"policy": "a/b.nemo"},
    }
    return RunRecord(**{**fields, **changes})


def test_document_is_balanced_safe_and_needs_no_network():
    html = render_report(a_run())
    document = Document(html)
    assert document.tags.count("script") == 1
    assert not {"link", "img", "iframe"} & set(document.tags)
    assert not {"src", "href", "action"} & {name for name, _ in document.attributes}
    addresses = set(re.findall(r"https?://[^\"' ]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "url(" not in html
    assert "alert(1)" in "".join(document.text)
    for lacking in ({"metrics": []}, {"samples": []}, {"artifacts": {}}):
        Document(render_report(a_run(**lacking)))


def test_hostile_text_is_text_wherever_it_stands():
    hostile = "</td></pre></script><b class='x\" onclick=\"y'>{{ title }}{% raw %} &amp;\n  <!--"
    run = a_run(
        title=hostile,
        status=hostile,
        metrics=[{"step": 1, f"custom/{hostile}": 1.0, f"timers/{hostile}": 1.0}],
        samples=[
            sample(step, split, prompt=hostile, response=hostile, ground_truth=hostile)
            for step, split in ((0, "val"), (1, "train"), (2, "val"))
        ],
        config=hostile,
        environment={hostile: hostile},
        artifacts={hostile: hostile},
    )
    document = Document(render_report(run))
    assert "onclick" not in {name for name, _ in document.attributes}
    assert document.tags.count("script") == 1
    # Title twice, status, two charts, a bar, a pair's four cells and a sample's three,
    # configuration, two tables of a name and a value.
    assert "".join(document.text).count(hostile) == 2 + 1 + 2 + 1 + 4 + 3 + 1 + 4


TURNS = [
    {
        "content": "let me see <tool_call>{}</tool_call>",
        "tokens": 17,
        "ended": True,
        "reward": 0.25,
        "parts": {"format": 1.0},
        "answer": [{"role": "tool", "content": "42"}, {"role": "user", "content": "and </td>?"}],
        "info": {"calls": "calculator(expression='6*7')", "seconds": 0.5},
    },
    {
        "content": "it is",
        "tokens": 3,
        "ended": False,
        "reward": None,
        "parts": {},
        "answer": [{"role": "user", "content": "over"}],
        "info": {},
    },
]


def test_a_conversation_is_shown_message_by_message():
    talk = sample(1, "train", turns=TURNS, response="as a transcript")
    shown = [(one.role, one.is_trained, one.text) for one in messages_of(talk)]
    assert shown == [
        ("assistant", True, TURNS[0]["content"]),
        ("tool", False, "42"),
        ("user", False, "and </td>?"),
        ("assistant", True, "it is"),
        ("user", False, "over"),
    ]
    html = render_report(a_run(samples=[talk, sample(1, "train")]))
    document = Document(html)
    classes = [value for name, value in document.attributes if name == "class"]
    assert classes.count("message trained") == 2
    assert classes.count("message") == 3
    text = "".join(document.text)
    for part in (
        "assistant turn 1 · 17 tokens, trained · reward +0.25, format 1 · seconds: 0.5",
        "calls calculator(expression='6*7')",
        "tool read, masked42user read, masked",
        "assistant turn 2 · 3 tokens, trained · cut · not scored",
        "user after the end, not read",
        "what has a bar was sampled and is trained",
    ):
        assert part in text
    assert "as a transcript" not in text
    assert "what has a bar" not in text_of(render_report(a_run()))
    talks = [sample(step, turns=[{"content": f"said at {step}"}]) for step in (0, 3)]
    text = text_of(render_report(a_run(samples=talks)))
    for step in (0, 3):
        assert f"assistant turn 1 · ? tokens, trained · not scoredsaid at {step}" in text


def test_a_report_has_headlines_charts_and_rows():
    report = render_report(a_run())
    text = text_of(report)
    assert "Validation accuracy0.25 → 0.75" in text
    assert "+0.5 · step 0 → 3, standard error 0.054" in text  # sqrt(0.75 * 0.25 / 64)
    assert "3 steps." in text
    assert "A run & more" in text
    text = text_of(part("bars", bars([("reward", 1.0), ("generate", 3.0)]), "s"))
    assert text.strip() == "generate3 s75 %reward1 s25 %"
    # Each metric with a finite value has a chart and its explanation.
    run = a_run(metrics=[*a_run().metrics, {"step": 4, "critic/explained_var": math.nan}])
    document = Document(render_report(run))
    tooltips = [value for name, value in document.attributes if name == "title"]
    shown = {tip.split(":")[0] for tip in tooltips if "/" in tip.split(":")[0]}
    finite = {name for line in a_run().metrics for name in line} - {"step"}
    assert (shown, len(shown)) == (finite, 5)
    assert any("Over: mean over the step's samples" in tip for tip in tooltips)
    # Metrics that did not change are rows.
    rows = re.findall(r"<b>([\w/]+)</b>[^<]*</td><td class=\"number\">(\S+)</td>", report)
    assert rows == [
        ("timers/total", "9"),
        ("train_rollouts/rewards", "0.5"),  # NaN in the second step
        ("val_rollouts/num_samples", "64"),
    ]
    charts = report.split("All metrics")[1].split("Metrics that did not change")[0]
    assert re.findall(r"<h3><b>(\w+)", charts) == ["accuracy", "generate"]
    changing = [{"step": 1, "critic/lr": 1.0}, {"step": 2, "critic/lr": 2.0}]
    assert "did not change" not in render_report(a_run(metrics=changing))


def test_chart_geometry_and_hover_data_by_hand():
    # Plot area x 48..368, y 10..168; values -1..1 with a margin of 0.16 on either side.
    svg = part("line_chart", line_chart([Series("", [0, 4], [-1.0, 1.0])]))
    low, high = 168 - 158 * 0.16 / 2.32, 168 - 158 * 2.16 / 2.32
    assert f'd="M48.0 {low:.1f}L368.0 {high:.1f}"' in svg
    assert line_chart([Series("", [1], [math.nan])]) is None
    assert part("line_chart", line_chart([Series("", [7], [3.0])])).count("<circle") == 1
    long = part("line_chart", line_chart([Series("", range(100), [0.0] * 100)]))
    assert "<circle" not in long
    assert ">99</text>" in long
    lines = [Series("training", [1, 2, 3], [0.5, math.nan, 0.25]), Series("none", [1], [math.inf])]
    chart = Document(part("line_chart", line_chart(lines)))
    (line,) = json.loads(dict(chart.attributes)["data-lines"])
    assert line["l"] == "training"
    assert [point[2:] for point in line["p"]] == [[1, 0.5], [3, 0.25]]


@pytest.mark.parametrize(
    ("low", "high"), [(10.80001, 10.80004), (123_456, 123_457), (2e6, 2e6 + 9), (1e-15, 4e-15)]
)
def test_labels_of_an_axis_differ(low, high):
    chart = line_chart([Series("", [0, 4], [low, high])])
    labels = [label for _, label in chart.value_ticks]
    assert len(labels) >= 2
    assert len(set(labels)) == len(labels)
    values = [float(label.replace(",", "")) for label in labels]
    margin = 0.08 * (high - low)  # on both sides
    assert values == pytest.approx(ticks(low - margin, high + margin), rel=1e-9)


def test_points_are_thinned_samples_paired_and_series_in_order():
    points = [(step, 0.0) for step in range(5000)]
    points[1234] = (1234, 9.0)
    points[1235] = (1235, -9.0)
    thin = thin_out(points)
    assert len(thin) <= 402
    assert thin == sorted(thin)
    assert {(0, 0.0), (4999, 0.0), (1234, 9.0), (1235, -9.0)} <= set(thin)
    assert thin_out(points[:10]) == points[:10]
    old, new = sample(0, response="3"), sample(9)
    middle, other = sample(5, response="4"), sample(9, prompt="2+2=")
    assert before_and_after([old, middle, sample(9, "train"), new, other]) == [(old, new)]
    assert before_and_after([old]) == []
    assert before_and_after([]) == []
    series = collect_series(a_run().metrics)
    accuracy = series["val_rollouts/accuracy"]
    assert (accuracy.steps, accuracy.values) == ([0, 3], [0.25, 0.75])


def test_report_is_written_from_the_files_of_a_run(tmp_path):
    said = [sample(1, "train", prompt="unmistakable")]
    MetricsWriter(tmp_path).write(1, {"train_rollouts/rewards": 0.5}, said)
    environment = describe_environment("CPU, 2 threads")
    path = write_report(tmp_path, RunRecord("T", "a: 1", environment))
    assert path == tmp_path / "report.html"
    text = text_of(path.read_text())
    for part in ("unmistakable", "a: 1", "CPU, 2 threads", environment["torch"]):
        assert part in text


@pytest.mark.parametrize(
    ("precision", "gap", "verdict"),
    [
        ("32", 3e-6, "it is what rounding in float32 gives"),
        ("bf16", 0.2, "it is more than rounding in bf16 gives: the engines disagree"),
    ],
)
def test_the_gap_stands_beside_what_rounding_gives(precision, gap, verdict):
    lines = [{"step": step, "sampler/logprob_gap_mean": gap * step} for step in (1, 2)]
    html = render_report(a_run(metrics=lines, precision=precision))
    assert verdict in html
    text = text_of(html)
    assert "Do sampler and trainer agree?" in text
    assert "rounding in float32" in text
    assert "below 0.0001" in text
    assert "below 0.05" in text
    assert "Do sampler and trainer agree?" not in render_report(a_run())
