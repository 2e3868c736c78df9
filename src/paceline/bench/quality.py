"""Measure whether texts are right, and whether they are varied, without a model.

Words are compared as in SQuAD: small letters, no punctuation or symbols, no English articles (a, an, the), single
spaces between the other words. Of several right answers the best one counts, separately for each number.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean
from typing import Any

from paceline.common.errors import InputError

_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class Quality:
    """Means over texts, each from 0 to 1."""

    texts: int
    exact_match: float  # the text is an answer, word for word
    token_f1: float  # words shared with an answer: the harmonic mean of precision and recall
    similarity: float  # cosine of the counts of character trigrams
    tf_idf: float  # cosine of the counts of words, each weighed by how rare it is among the answers
    distinct_1: float  # different words, over words
    distinct_2: float  # different pairs of neighbouring words, over pairs


def judge(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> Quality:
    """Compare each text with its right answers. Each text needs at least one."""
    if len(texts) != len(answers):
        raise InputError(f"Quality needs the answers of every text, got {len(texts)} texts and {len(answers)} answers.")
    if not texts:
        raise InputError("Quality needs at least one text with an answer, got none; use prompts that have answers.")
    for number, right in enumerate(answers, 1):
        if not right:
            raise InputError(f"Text {number} of {len(texts)} has no answer to judge it by; use prompts with answers.")
    pairs = list(zip(texts, answers, strict=True))
    words = TfIdf([answer for right in answers for answer in right])
    measures = {"exact_match": exact_match, "token_f1": token_f1, "similarity": similarity, "tf_idf": words.similarity}
    means = {
        name: fmean(max(measure(text, answer) for answer in right) for text, right in pairs)
        for name, measure in measures.items()
    }
    return Quality(len(texts), **means, distinct_1=distinct(texts, 1), distinct_2=distinct(texts, 2))


def normalise(text: str) -> str:
    """Small letters, without punctuation, symbols and articles, with single spaces."""
    kept = "".join(sign for sign in text.casefold() if unicodedata.category(sign)[0] not in "PS")
    return " ".join(_ARTICLES.sub(" ", kept).split())


def exact_match(text: str, answer: str) -> float:
    return float(normalise(text) == normalise(answer))


def token_f1(text: str, answer: str) -> float:
    """Return the F1 of words, which count as often as they occur. Two texts without words give 1; only one gives 0."""
    ours, theirs = normalise(text).split(), normalise(answer).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def similarity(text: str, answer: str) -> float:
    """Return the cosine of the counts of character trigrams, with a space before and after: 1 for the same words in the
    same order, and still high for other endings and small errors."""
    ours, theirs = (Counter(_grams(f" {normalise(one)} ", 3)) for one in (text, answer))
    if not ours or not theirs:
        return float(ours == theirs)
    return _cosine(ours, theirs)


class TfIdf:
    """TF-IDF over a set of answers, as by scikit-learn's defaults: the weight of a word is its count times
    ln((1 + n) / (1 + d)) + 1, where d of the n answers have it. A word that no answer has counts as the rarest."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._count = len(answers)
        self._having = Counter(word for answer in answers for word in set(normalise(answer).split()))

    def similarity(self, text: str, answer: str) -> float:
        """Return the cosine of the weighted words. Two texts without words give 1; only one gives 0."""
        ours, theirs = self._weights(text), self._weights(answer)
        return _cosine(ours, theirs) if ours and theirs else float(ours == theirs)

    def _weights(self, text: str) -> dict[Hashable, float]:
        counts = Counter(normalise(text).split())
        return {word: n * (log((1 + self._count) / (1 + self._having[word])) + 1) for word, n in counts.items()}


def distinct(texts: Iterable[str], n: int) -> float:
    """Return distinct-n: the different n-grams of words over all n-grams, as the mean of the texts with n or more
    words; 0 without such texts. It is a mean per text, so that it does not depend on the number of texts."""
    shares = []
    for text in texts:
        grams = list(_grams(text.casefold().split(), n))
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return fmean(shares) if shares else 0.0


def _grams(items: Sequence[Hashable], n: int) -> Iterable[tuple[Hashable, ...]]:
    return zip(*(items[i:] for i in range(n)), strict=False)


def _cosine(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> float:
    product = sum(weight * theirs.get(name, 0) for name, weight in ours.items())
    norms = sqrt(sum(weight**2 for weight in ours.values()) * sum(weight**2 for weight in theirs.values()))
    return min(1.0, product / norms)
