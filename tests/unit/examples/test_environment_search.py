"""Search over a corpus: BM25 by hand, files of documents, questions."""

import json
import math
import os

import pytest
from loaded import write_rows

from aligner.errors import ConfigError, DataError
from aligner.examples.tasks.search import Corpus, Document, Lookup, load_corpus, normalised

ROWS = [
    {"title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"title": "Rome", "text": "Rome is the capital of Italy, and was that of an empire."},
    {"text": "Fjords of Norway: Norway has many."},
]


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", ROWS)


def test_scores_by_hand():
    corpus = Corpus([Document("", "b a a"), Document("", "a"), Document("", "c c")])
    found = corpus.search("A b z", top=5)
    mean = (3 + 1 + 2) / 3
    weight_a, weight_b = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)

    def part(count, length):
        return count / (count + 1.2 * (1 - 0.75 + 0.75 * length / mean))

    assert [document.text for _, document in found] == ["b a a", "a"]
    assert found[0][0] == pytest.approx(weight_a * part(2, 3) + weight_b * part(1, 3))
    assert found[1][0] == pytest.approx(weight_a * part(1, 1))
    assert corpus.search("a", top=1)[0][1].text == "a"  # the shorter
    assert corpus.search("", top=3) == []
    alike = Corpus([Document(str(number), "a word") for number in range(5)])
    assert [document.title for _, document in alike.search("word", 3)] == ["0", "1", "2"]
    assert normalised(" The  Beatles' an-d A song. ") == "beatles and song"  # as SQuAD


def test_files_of_documents(path, tmp_path):
    corpus = load_corpus(str(path))
    assert corpus.documents[2] == Document("", ROWS[2]["text"])
    assert load_corpus(str(path)) is corpus
    path.write_text(json.dumps(ROWS[0]) + "\n")
    os.utime(path, ns=(1, 1))
    assert len(load_corpus(str(path)).documents) == 1
    text = tmp_path / "corpus.txt"
    text.write_text("one\n\ntwo\n")
    assert [document.text for document in load_corpus(str(text)).documents] == ["one", "two"]


def test_what_is_no_corpus_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"corpus='none\.jsonl' does not exist"):
        load_corpus("none.jsonl")
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: a document needs .*\['body'\]"):
        load_corpus(str(file))
    file.write_text("\n")
    os.utime(file, ns=(1, 1))
    with pytest.raises(DataError, match="contains no document"):
        load_corpus(str(file))
    with pytest.raises(ConfigError, match="top=0"):
        Lookup(seed=0, prompt="?", ground_truth="x", corpus=str(file), top=0)


def test_a_question_is_looked_up(path):
    env = Lookup(
        seed=0,
        prompt="Which is the capital of Norway?",
        ground_truth=["Oslo", "the city of Oslo"],
        corpus=str(path),
        top=2,
        source="a quiz",
    )
    (tool,) = env.init().tools
    assert tool["function"]["name"] == "search"

    def say(text):
        return env.step({"role": "assistant", "content": text})

    def call(query):
        arguments = json.dumps({"name": "search", "arguments": {"query": query}})
        return say(f"<tool_call>{arguments}</tool_call>").messages[0]["content"]

    assert call("capital Norway").splitlines() == [f"Oslo: {ROWS[0]['text']}", ROWS[2]["text"]]
    assert call("zebra") == "nothing found"
    assert say("I looked.\n The  City of OSLO!").reward == {"reward": 1.0, "accuracy": 1.0}
    assert say("Oslo\nno, Rome").score == 0.0
    assert say("").score == 0.0
