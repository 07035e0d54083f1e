"""Search in a local corpus as a tool: BM25 in memory, without a server."""

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from heapq import nsmallest
from pathlib import Path
from typing import Any, NamedTuple

from aligner.data.readers import read_rows
from aligner.environments.calls import Form
from aligner.environments.protocol import Turn
from aligner.environments.tools import ToolEnv
from aligner.errors import ConfigError, DataError

_WORD = re.compile(r"\w+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_K1, _B = 1.2, 0.75
_MOST_CHARACTERS = 600  # of a document in a result


class Document(NamedTuple):
    """A text of the corpus. ``title`` may be empty."""

    title: str
    text: str


class Corpus:
    """Documents with an index of their words.

    The score of a document d for a query q is BM25 (Robertson and Zaragoza, 2009, "The
    Probabilistic Relevance Framework: BM25 and Beyond"), with Lucene's weight of words, which is
    never negative::

        score(d, q) = Σ over words w of q:  ln(1 + (N - n_w + 0.5) / (n_w + 0.5))
                        · f_wd / (f_wd + k1 · (1 - b + b · |d| / mean |d|))

    N is the number of documents, n_w the number of documents with w, f_wd the count of w in d,
    k1 = 1.2, b = 0.75. Words are sequences of letters and digits, without regard to case.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        """Build the index."""
        self.documents = list(documents)
        self._counts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for index, document in enumerate(self.documents):
            words = words_of(f"{document.title} {document.text}")
            lengths.append(len(words))
            for word, count in Counter(words).items():
                self._counts[word].append((index, count))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]

    def search(self, query: str, top: int) -> list[tuple[float, Document]]:
        """Return the ``top`` documents with the highest scores that contain a word of the query.

        For equal scores the earlier document precedes the later.
        """
        scores: defaultdict[int, float] = defaultdict(float)
        for word in words_of(query):
            counts = self._counts.get(word, [])
            weight = math.log1p((len(self.documents) - len(counts) + 0.5) / (len(counts) + 0.5))
            for index, count in counts:
                scores[index] += weight * count / (count + self._norms[index])
        best = nsmallest(top, scores, key=lambda index: (-scores[index], index))
        return [(scores[index], self.documents[index]) for index in best]


class Lookup(ToolEnv):
    """Questions with a search in a corpus: reward 1 for the right answer, else 0.

    Reads the columns ``prompt`` (the question) and ``ground_truth`` (a right answer or a list of
    right answers). The last line of the answer is compared as in SQuAD (Rajpurkar et al., 2016):
    without case, punctuation, articles and white space.
    """

    def __init__(
        self,
        *,
        seed: int,
        prompt: str,
        ground_truth: str | Sequence[str],
        corpus: str,
        top: int = 3,
        form: Form = "hermes",
        **columns: Any,
    ) -> None:
        """Create the environment of a row.

        ``corpus``: a file of documents (`load_corpus`). ``top``: number of documents of a result.
        """
        del seed, columns
        if top < 1:
            raise ConfigError(f"search: top={top} must be at least 1")
        super().__init__([self.search], form)
        self._corpus, self._top, self._prompt = load_corpus(corpus), top, prompt
        accepted = [ground_truth] if isinstance(ground_truth, str) else ground_truth
        self._accepted = {normalised(str(text)) for text in accepted}

    def search(self, query: str) -> str:
        """Search documents by words.

        Args:
            query: Words that the documents should have.
        """
        documents = [document for _, document in self._corpus.search(query, self._top)]
        return "\n".join(map(_shown, documents)) or "nothing found"

    def question(self) -> str:
        """Return the question of the row."""
        return self._prompt

    def answered(self, text: str) -> Turn:
        """Compare the last line of the answer with the ground truth."""
        lines = text.strip().splitlines()
        right = float(bool(lines) and normalised(lines[-1]) in self._accepted)
        return Turn(reward={"reward": right, "accuracy": right}, done=True)


def load_corpus(path: str) -> Corpus:
    """Read a ``.jsonl`` or ``.parquet`` file, a folder of such files, or a ``.txt`` file.

    A row is a document with the column ``text`` and optionally ``title``. Each line of a ``.txt``
    file is a document. A process reads a file once.

    Raises:
        ConfigError: the file does not exist.
        DataError: a row is not a document, or there are no rows.
    """
    file = Path(path).expanduser()
    if not file.exists():
        raise ConfigError(f"search: corpus={path!r} does not exist. Name a .jsonl or .txt file")
    return _load(str(file), file.stat().st_mtime_ns)


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, English articles and extra white space."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())


@lru_cache(maxsize=4)
def _load(path: str, modified: int) -> Corpus:
    del modified  # part of the cache's key, so that a changed file is read again
    documents, column = [], "prompt" if path.endswith(".txt") else "text"
    for row in read_rows(path):
        text, title = row.columns.get(column), row.columns.get("title")
        if not isinstance(text, str) or not isinstance(title, str | None):
            raise DataError(
                f"{row.location}: a document needs the column text, and an optional title must be "
                f"text. Columns found: {sorted(row.columns)}"
            )
        documents.append(Document(title or "", text))
    if not documents:
        raise DataError(f"search: corpus={path!r} contains no document. Add rows with text")
    return Corpus(documents)


def _shown(document: Document) -> str:
    text = " ".join(document.text.split())
    more = "…" if len(text) > _MOST_CHARACTERS else ""
    title = f"{document.title}: " if document.title else ""
    return f"{title}{text[:_MOST_CHARACTERS]}{more}"
