"""Grammars over the tokens of a model: compiled once for a request, then one cursor for each sequence."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paceline.common.errors import InputError, UnsupportedError, in_one_line
from paceline.models.grammars.grammar_sources import source_of
from paceline.models.translation import Pieces

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

# Limits of one grammar, against hostile ones: the work to compile it, and the work of one step.
_LIMITS: dict[str, Any] = {"max_items_in_row": 2000, "initial_lexer_fuel": 100_000, "step_lexer_fuel": 200_000,
           "step_max_items": 50_000, "max_lexer_states": 20_000, "max_grammar_size": 20_000,
           "verbose_errors": False}  # fmt: skip
_AHEAD = 256  # the most characters of forced text that are encoded
_NO_TEXT = ("NoExtension", "NoExtensionBias")
_SOURCE_LINE = re.compile(r"\d+ \| ")
_BITS = torch.arange(8, dtype=torch.uint8)


def grammars_of(lm: LanguageModel) -> GrammarCompiler:
    """Return the compiler of a model. It is made once, because it reads the whole vocabulary."""
    made: dict[int, GrammarCompiler] = lm.record.grammars
    if lm.vocabulary not in made:
        made[lm.vocabulary] = GrammarCompiler(lm.tokenizer, lm.vocabulary, lm.name)
    return made[lm.vocabulary]


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Any thread may use it."""

    def __init__(self, tokenizer: Any, vocabulary: int, name: str) -> None:
        self._tokenizer, self._vocabulary, self._name = tokenizer, vocabulary, name
        self._lock = threading.Lock()

    def compile(self, setting: str, value: Any) -> Grammar:
        """Compile the setting of a request, such as `json_schema`. Raise `InputError` if it cannot be used."""
        try:
            import llguidance
        except ModuleNotFoundError:
            told = f"{setting} needs the package llguidance; install it with: pip install 'paceline[grammar]'."
            raise UnsupportedError(told) from None
        if self._tokenizer is None:
            raise InputError(f"{setting} needs a tokenizer, and {self._name} has none; load the model with one.")
        source = source_of(setting, value, llguidance)
        try:
            with self._lock:
                tokens = self._tokens
        except Exception as error:  # tokenizers raise errors of many kinds
            told = f"{setting} cannot be used with the tokenizer of {self._name}: {in_one_line(error)}."
            raise UnsupportedError(told) from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(tokens, source, log_level=0, limits=limits)
        _try_out(matcher, setting, self._vocabulary)
        return Grammar(matcher, self._vocabulary)

    def prepare(self) -> None:
        """Read the vocabulary now, so that the first grammar need not wait. Do nothing without the package."""
        if self._tokenizer is not None and find_spec("llguidance") is not None:
            with self._lock:
                assert self._tokens is not None

    @cached_property
    def _tokens(self) -> Any:
        """The vocabulary in the form of llguidance."""
        import llguidance

        words: Any = _Vocabulary(self._tokenizer, self._vocabulary)
        return llguidance.LLTokenizer(words, n_vocab=self._vocabulary + 1)


def _try_out(matcher: Any, setting: str, vocabulary: int) -> None:
    """Refuse a grammar with an error, or without a text. The first steps find errors that compiling does not find."""
    problem = _problem(matcher)
    if not problem:
        matcher = matcher.deep_copy()
        first = _mask_of(matcher, vocabulary, ())
        problem = "it allows no text but the empty one" if first.complete else first.problem
        if not problem:
            matcher.try_consume_tokens(matcher.compute_ff_tokens())
            problem = _mask_of(matcher, vocabulary, ()).problem
    if problem:
        raise InputError(f"{setting} cannot be used: {problem}.")


def _problem(matcher: Any) -> str:
    """Return the error of a matcher in one line; "" if there is none."""
    if not matcher.is_error():
        return ""
    told = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    if told in _NO_TEXT:
        return "it allows no text"
    lines = [line.strip() for line in told.splitlines()]
    text = " ".join(line for line in lines if line.strip("^ ") and not _SOURCE_LINE.match(line))
    return text[:200].rstrip(".") or "it has an error"


class _Mask(NamedTuple):
    """The tokens that may follow, one bit each."""

    bits: bytes
    complete: bool = False  # no token but an end may follow
    problem: str = ""  # why no token may follow


def _mask_of(matcher: Any, vocabulary: int, ends: Sequence[int]) -> _Mask:
    """Return the mask at the place of a matcher. The token after the vocabulary stands for the end of the text."""
    bits = bytearray(matcher.compute_bitmask())
    problem = _problem(matcher)
    if problem:
        return _Mask(bytes(len(bits)), problem=problem)
    at, bit = divmod(vocabulary, 8)
    may_end = bits[at] >> bit & 1
    bits[at] &= ~(1 << bit)
    complete = not any(bits)
    if complete and not may_end:
        return _Mask(bytes(bits), problem="no text can follow")
    for token in ends:
        if may_end:
            bits[token >> 3] |= 1 << (token & 7)
        elif bits[token >> 3] >> (token & 7) & 1 and not _accepts_after(matcher, token):
            bits[token >> 3] &= ~(1 << (token & 7))  # the text would end here
    if not complete and not any(bits):
        return _Mask(bytes(bits), problem="no text can follow but an end token, which would end the text too early")
    if complete and not ends:  # the text ends here without a token: what follows is discarded
        return _Mask(b"\xff" * len(bits), complete)
    return _Mask(bytes(bits), complete)


def _accepts_after(matcher: Any, token: int) -> bool:
    """Return True if the grammar accepts the text with this token."""
    if not matcher.try_consume_tokens([token]):
        return False
    accepts = bool(matcher.is_accepting())
    matcher.rollback(1)
    return accepts


class Grammar:
    """A compiled grammar; see `core.sampling.Constraint`."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def start(self, ends: Sequence[int]) -> GrammarCursor:
        return GrammarCursor(self._matcher, self._vocabulary, ends)


class GrammarCursor:
    """The place of one sequence in a grammar; see `core.sampling.Cursor`.

    The matcher has read the committed tokens and one path after them. It goes from path to path, and back only as far
    as two paths differ: the sorted paths of a tree are its nodes, depth first. Masks are kept as long as their paths
    belong to the text.
    """

    def __init__(self, fresh: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._fresh, self._vocabulary, self._ends = fresh, vocabulary, sorted(set(ends))
        width = -(-(vocabulary + 1) // 32) * 4
        self._nothing, self._everything = bytes(width), b"\xff" * width
        self._matcher = fresh.deep_copy()
        self._tokens: list[int] = []  # committed
        self._beyond: list[int] = []  # committed after those, when the text had ended or had left the grammar
        self._path: tuple[int, ...] = ()  # uncommitted, after `_tokens`
        self._masks: dict[tuple[int, ...], _Mask] = {}
        self.problem = ""

    # ---- what may follow

    def allowed(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        for path in sorted(set(paths) - self._masks.keys()):
            self._mask(path)
        packed = bytearray().join(self._masks[path].bits for path in paths)
        bits = torch.frombuffer(packed, dtype=torch.uint8).view(len(paths), -1, 1)
        return (bits >> _BITS & 1).bool().flatten(1)[:, : self._vocabulary]

    def forced(self, most: int) -> list[int]:
        if self._beyond or not self._walk(()):
            return []
        tokens = [int(token) for token in self._matcher.compute_ff_tokens()]
        return tokens[:most] if max(tokens, default=0) < self._vocabulary else []

    def _mask(self, path: tuple[int, ...]) -> _Mask:
        known = self._masks.get(path)
        if known is None:
            known = self._masks[path] = self._find_mask(path)
        if known.problem and not path:
            self.problem = known.problem
        return known

    def _find_mask(self, path: tuple[int, ...]) -> _Mask:
        if self._beyond:
            return _Mask(self._nothing if self.problem else self._everything)
        if self._walk(path):
            mask = _mask_of(self._matcher, self._vocabulary, self._ends)
        else:  # the target never accepts this path, so that its mask has no effect
            mask = _Mask(self._everything)
        problem = _problem(self._matcher)
        if not problem:
            return mask
        self._begin_again()
        return _Mask(self._nothing, problem=problem)

    # ---- where the text is

    def commit(self, token: int) -> bool:
        if self._beyond or not (self._path[:1] == (token,) or self._walk((token,))):
            self._leave(token)
            return False
        self._tokens.append(token)
        self._path = self._path[1:]
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path[:1] == (token,)}
        return self._mask(()).complete

    def seek(self, tokens: Sequence[int]) -> bool:
        same = 0
        for ours, theirs in zip([*self._tokens, *self._beyond], tokens, strict=False):
            if ours != theirs:
                break
            same += 1
        self._go_back(same)
        for token in tokens[same:]:
            self.commit(token)
        return not self._beyond and self._mask(()).complete

    def _leave(self, token: int) -> None:
        """Commit a token that the grammar cannot read: an end of the text where it may end, or an error."""
        if not self._beyond:
            problem = _problem(self._matcher)
            if problem:
                self._begin_again()
            elif token not in self._ends or not self._mask(()).bits[token >> 3] >> (token & 7) & 1:
                problem = f"token {token} is not of the grammar"
            self.problem = self.problem or problem
        self._beyond.append(token)
        self._masks.clear()

    def _go_back(self, length: int) -> None:
        """Keep only the first `length` committed tokens."""
        surplus = len(self._tokens) - length
        if surplus < 0:
            self._beyond = self._beyond[:-surplus]
            return
        if not surplus and not self._beyond:
            return
        self._walk(())
        self._tokens, self._beyond, self.problem = self._tokens[:length], [], ""
        self._masks.clear()
        if surplus and not self._matcher.rollback(surplus):
            self._begin_again()

    def _walk(self, path: tuple[int, ...]) -> bool:
        """Let the matcher read this path after the committed tokens. Return False if it is not of the grammar."""
        same = 0
        while same < min(len(path), len(self._path)) and path[same] == self._path[same]:
            same += 1
        if same < len(self._path):
            self._matcher.rollback(len(self._path) - same)
        rest = path[same:]
        read = 0 if rest and not 0 <= min(rest) <= max(rest) < self._vocabulary else self._read(rest)
        self._path = path[: same + read]
        return read == len(rest)

    def _read(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens the matcher could read."""
        return int(self._matcher.try_consume_tokens(list(tokens))) if tokens else 0

    def _begin_again(self) -> None:
        """Use a fresh matcher, because a matcher with an error keeps it."""
        self._matcher, self._path = self._fresh.deep_copy(), ()
        read = self._read(self._tokens)
        if read < len(self._tokens):
            self.problem = self.problem or _problem(self._matcher) or "the text left the grammar"
            self._tokens, self._beyond = self._tokens[:read], self._tokens[read:] + self._beyond


class _Vocabulary:
    """The bytes of every token, and the encoding of a text, with the interface of llguidance. One token more stands for
    the end of the text, because a request may have other ends than the tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._pieces = Pieces(copy.deepcopy(tokenizer), vocabulary)  # a tokenizer is not safe in two threads
        self._lock = threading.Lock()
        special = {token: name.encode() for token, name in self._pieces.special.items()}
        known = {**self._pieces.of, **special}
        self.tokens = [*(known.get(token, b"") for token in range(vocabulary)), b"<end of the text>"]
        self.special_token_ids = [*special, vocabulary]
        self.eos_token_id = vocabulary
        self._longest = max(map(len, self._pieces.of.values()), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text. Text that the tokenizer does not know is spelled by its longest tokens."""
        text = (text if isinstance(text, str) else text.decode("utf-8", "ignore"))[:_AHEAD]
        data = text.encode()
        with self._lock:
            tokens = self._pieces.agreeing(self._pieces.encode(text), data)
        at = len(self._pieces.join(tokens))
        while at < len(data):
            ways = (self._pieces.by_bytes.get(data[at : at + size]) for size in range(self._longest, 0, -1))
            token = next((token for token in ways if token is not None), None)
            if token is None:
                break
            tokens.append(token)
            at += len(self._pieces.of[token])
        return tokens
