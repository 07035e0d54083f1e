"""GSM8K rows become prompts and plain numbers; what is not such a row is refused by its line."""

import os
from pathlib import Path

import pytest
from loaded import write_rows

from aligner.errors import DataError
from aligner.examples.tasks.gsm8k import final_number, gsm8k_prompts
from aligner.rewards.math_verify import reward

SHARED = Path(os.environ.get("ALIGNER_SHARED", Path(__file__).parents[4] / "shared"))
ROWS = [
    {"question": "Two and two?", "answer": "2+2 = <<2+2=4>>4\n#### 4"},
    {"question": "A car?", "answer": "It costs $12,000.\n#### 12,000"},
]


def test_the_number_is_written_plainly():
    written = {"72": "72", "1,080": "1080", "109,200,000": "109200000", "-5": "-5", "−5": "-5"}
    written |= {"$30": "30", "-$1,250.50": "-1250.5", "75%": "75", "18 apples": "18"}
    for final, number in (written | {"5.00": "5", ".5": "0.5", "007": "7", "-0": "0"}).items():
        assert final_number(f"So 1 + 1.\n#### {final} ", "here") == number
        assert final_number(f"#### 9 was wrong.\n####{final}", "here") == number  # the last mark


@pytest.mark.parametrize("final", ["", "none", "12,34", "1,2345", "3/4", "1.2.3", "4 or 5", "$"])
def test_what_is_no_number_is_refused(final):
    with pytest.raises(DataError, match=r"f\.jsonl, line 7: .*is not a number"):
        final_number(f"#### {final}", "f.jsonl, line 7")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "Q?", "answer": "no mark: 4"}, "has no ####"),
        ({"question": "Q?"}, "'answer' must contain text and is missing"),
        ({"question": "", "answer": "#### 4"}, "'question' must contain text and is ''"),
        ({"question": "Q?", "answer": 4}, "'answer' must contain text and is 4"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line(row, words, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [*ROWS, row])
    with pytest.raises(DataError, match=rf"train\.jsonl, line 3: .*{words}"):
        list(gsm8k_prompts(path))


def test_the_verifier_reads_the_ground_truths(tmp_path):
    rows = list(gsm8k_prompts(write_rows(tmp_path / "t.jsonl", ROWS), prefix="Q: ", suffix=" A:"))
    assert [row["prompt"] for row in rows] == ["Q: Two and two? A:", "Q: A car? A:"]
    truths = [row["ground_truth"] for row in rows]
    answers = [r"So it is $\boxed{4}$.", r"The answer is \boxed{12,000}."]
    assert [score["reward"] for score in reward(["", ""], answers, truths)] == [1.0, 1.0]
    assert [score["reward"] for score in reward(["", ""], answers[::-1], truths)] == [0.0, 0.0]


def test_every_published_problem_is_read():
    folder = SHARED / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"needs train.jsonl and test.jsonl in data/gsm8k of $ALIGNER_SHARED ({SHARED})")
    for split, count in (("train", 7473), ("test", 1319)):
        rows = list(gsm8k_prompts(folder / f"{split}.jsonl"))
        assert len(rows) == count
        assert all(float(row["ground_truth"]).is_integer() for row in rows)
        own = [row["answer"].rpartition("####")[2].replace(",", "").strip() for row in rows]
        assert [row["ground_truth"] for row in rows] == own
