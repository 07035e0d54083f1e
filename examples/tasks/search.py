"""Search over a local corpus as a tool: BM25, without an index on disk and without a server."""

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
    """A text of the corpus; ``title``: empty where it has none."""

    title: str
    text: str


class Corpus:
    """Documents, and the words in them.

    The score of a document d for a query q is that of BM25 (Robertson and Zaragoza, 2009, "The
    Probabilistic Relevance Framework: BM25 and Beyond"), with the weight of words that Lucene
    uses, which is never negative::

        score(d, q) = Σ over words w of q:  ln(1 + (N - n_w + 0.5) / (n_w + 0.5))
                        · f_wd / (f_wd + k1 · (1 - b + b · |d| / mean |d|))

    N documents, n_w of them with w, f_wd times in d; k1 = 1.2, b = 0.75. Words are runs of letters
    and digits, whatever their case.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        """Count the words."""
        self.documents = list(documents)
        self._found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for index, document in enumerate(self.documents):
            words = words_of(f"{document.title} {document.text}")
            lengths.append(len(words))
            for word, count in Counter(words).items():
                self._found[word].append((index, count))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]

    def search(self, query: str, top: int) -> list[tuple[float, Document]]:
        """The ``top`` documents with the greatest scores, of those that have a word of the query.

        Of equal scores the earlier document comes first.
        """
        scores: defaultdict[int, float] = defaultdict(float)
        for word in words_of(query):
            found = self._found.get(word, [])
            weight = math.log1p((len(self.documents) - len(found) + 0.5) / (len(found) + 0.5))
            for index, count in found:
                scores[index] += weight * count / (count + self._norms[index])
        best = nsmallest(top, scores, key=lambda index: (-scores[index], index))
        return [(scores[index], self.documents[index]) for index in best]


class Lookup(ToolEnv):
    """Questions with a search over a corpus: 1 for the right answer, 0 else.

    Reads the columns ``prompt``, the question, and ``ground_truth``, a text or a list of texts of
    which each is right. The last line of the answer is compared as SQuAD compares (Rajpurkar et
    al., 2016): without case, punctuation, articles and white space.
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
        """``corpus``: a file of documents, see `load_corpus`; ``top``: documents of a result."""
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
        found = [document for _, document in self._corpus.search(query, self._top)]
        return "\n".join(map(_shown, found)) or "nothing found"

    def question(self) -> str:
        """The row's question."""
        return self._prompt

    def answered(self, text: str) -> Turn:
        """Compare the last line of the answer."""
        lines = text.strip().splitlines()
        right = float(bool(lines) and normalised(lines[-1]) in self._accepted)
        return Turn(reward={"reward": right, "accuracy": right}, done=True)


def load_corpus(path: str) -> Corpus:
    """Read a ``.jsonl`` or ``.parquet`` file, a folder of such files, or a ``.txt`` file.

    A row is a document, with the column ``text`` and perhaps ``title``; of a ``.txt`` each line is
    one. A file is read once a process.

    Raises:
        ConfigError: no such file.
        DataError: a row that is no document, or none at all.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise ConfigError(f"search: corpus={path!r} does not exist. Name a .jsonl or .txt file")
    return _load(str(place), place.stat().st_mtime_ns)


def words_of(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return _WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Text without case, punctuation, English articles and superfluous white space."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())


@lru_cache(maxsize=4)
def _load(path: str, modified: int) -> Corpus:
    del modified  # a file that changed is read again
    documents, column = [], "prompt" if path.endswith(".txt") else "text"
    for row in read_rows(path):
        text, title = row.columns.get(column), row.columns.get("title")
        if not isinstance(text, str) or not isinstance(title, str | None):
            raise DataError(
                f"{row.place}: a document needs the column text, and title is text where there is "
                f"one; columns found: {sorted(row.columns)}"
            )
        documents.append(Document(title or "", text))
    if not documents:
        raise DataError(f"search: corpus={path!r} holds no document")
    return Corpus(documents)


def _shown(document: Document) -> str:
    text = " ".join(document.text.split())
    more = "…" if len(text) > _MOST_CHARACTERS else ""
    title = f"{document.title}: " if document.title else ""
    return f"{title}{text[:_MOST_CHARACTERS]}{more}"
