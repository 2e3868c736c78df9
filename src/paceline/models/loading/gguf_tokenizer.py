"""The tokenizer of a GGUF file, built from its metadata only.

transformers builds one too, with errors that change from version to version: it drops SmolLM2's splitting of digits,
reads TinyLlama's end of text as `<s>`, cuts Gemma into characters. A GGUF names its text splitter
(`tokenizer.ggml.pre`), its special ids and whether a text begins with BOS, so this module uses those. A file with an
unknown splitter is refused, because a tokenizer with a small error makes texts with errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from paceline.common.errors import in_one_line, shown

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # llama.cpp's token types; 5 is unused, 6 a raw byte
_BLANK = "▁"  # how sentencepiece writes a space
_SAMPLES = 256
_HEALTHY = 0.5  # this share of sampled tokens must be found in their own text; real files reach 1.0, broken ones 0.0


_MOST_WORK = 1 << 29  # characters that are read to split every token in two; Gemma's 262,144 tokens take 2^25
_KEY = "tokenizer.ggml."
# the type of a value, and the type of its items if it is a list
_TYPES: dict[str, tuple[Any, Any]] = {
    f"{_KEY}model": (str, None),
    f"{_KEY}pre": (str, None),
    f"{_KEY}tokens": (list, str),
    f"{_KEY}merges": (list, str),
    f"{_KEY}token_type": (list, int),
    f"{_KEY}scores": (list, (int, float)),
    **{f"{_KEY}{role}_token_id": (int, None) for role in ("bos", "eos", "unknown", "padding", "eot")},
    "tokenizer.chat_template": (str, None),
}


class TokenizerError(Exception):
    """Why no tokenizer can be built from a file, as the middle of a sentence."""


@dataclass(frozen=True)
class _Splitter:
    """The split of a text before merging, for a family: by a pattern, or as in GPT-2, with or without single digits."""

    pattern: str | None = None
    single_digits: bool = False
    whole_words_first: bool = False  # a piece in the vocabulary is one token, without merges
    composed: bool = False  # Unicode NFC before anything else
    starts_with_bos: bool = False  # if the file does not say


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FAMILIES = (
    (_Splitter(), ("gpt-2", "phi-2", "mpt", "olmo", "jais")),
    (
        _Splitter(single_digits=True),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    (
        _Splitter(_LLAMA3, whole_words_first=True, starts_with_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
    ),
    (_Splitter(_LLAMA3), ("dbrx", "smaug-bpe")),
    (_Splitter(_QWEN2, composed=True), ("qwen2", "deepseek-r1-qwen", "megrez")),
    (_Splitter(_QWEN2), ("stablelm2",)),
    (_Splitter(_TEKKEN, whole_words_first=True, starts_with_bos=True), ("tekken",)),
    (_Splitter(_GPT4O), ("gpt-4o", "llama4")),
)
_SPLITTERS = {name: splitter for splitter, names in _FAMILIES for name in names}


@dataclass(frozen=True)
class _Vocabulary:
    """The token table of a file, and the facts that both kinds of tokenizer need."""

    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    adds_bos: bool
    adds_eos: bool

    def spelled(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]


def build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of these metadata; None for a model without one (its tokens are not text)."""
    _check_types(metadata)
    try:
        return _built(metadata)
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers and transformers raise every kind of error
        raise TokenizerError(f"its tokenizer cannot be built: {in_one_line(error, 120)}") from error


def _built(metadata: dict[str, Any]) -> PreTrainedTokenizerFast | None:
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind == "gpt2":
        name = str(metadata.get("tokenizer.ggml.pre", "default"))
        if name not in _SPLITTERS:
            raise TokenizerError(f"its text splitter {shown(name)} is not known")
        splitter = _SPLITTERS[name]
        vocabulary = _read_vocabulary(metadata, adds_bos=splitter.starts_with_bos)
        backend = _byte_level(vocabulary, metadata, splitter)
    elif kind == "llama":
        vocabulary = _read_vocabulary(metadata, adds_bos=True, defaults={"bos": 1, "eos": 2, "unknown": 0})
        # some files hold runs of blanks as real spaces, but text is looked up with "▁" for every space
        blank = (_BLANK * len(t) if t and not t.strip(" ") else t for t in vocabulary.tokens)
        vocabulary = replace(vocabulary, tokens=list(blank))
        backend = _sentencepiece(vocabulary, prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    else:
        raise TokenizerError(f"its tokenizer is of the kind {shown(kind)}, and only 'gpt2' and 'llama' can be rebuilt")
    _add_special_tokens(backend, vocabulary)
    _refuse_if_broken(backend, vocabulary, start=_BLANK if kind == "llama" else "")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=vocabulary.spelled(vocabulary.bos),
        eos_token=vocabulary.spelled(vocabulary.eos),
        unk_token=vocabulary.spelled(vocabulary.unknown),
        pad_token=vocabulary.spelled(vocabulary.padding if vocabulary.padding is not None else vocabulary.eos),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 2**31)),
    )


def _check_types(metadata: dict[str, Any]) -> None:
    """Refuse a value of a wrong type."""
    for name, (wanted, inner) in _TYPES.items():
        value = metadata.get(name)
        if value is None:
            continue
        right = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
        if not right or (inner is not None and not all(isinstance(each, inner) for each in value)):
            raise TokenizerError(f"its {name} is {shown(value)}")
    work = sum(len(token) ** 2 for token in metadata.get("tokenizer.ggml.tokens") or ())
    if work > _MOST_WORK:
        raise TokenizerError("its tokens are too long")


def _read_vocabulary(
    metadata: dict[str, Any], *, adds_bos: bool, defaults: dict[str, int] | None = None
) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError("it names a tokenizer but holds no list of tokens")
    count = len(tokens)
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * count
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * count
    if not len(kinds) == len(scores) == count:
        raise TokenizerError(f"it lists {count} tokens but {len(kinds)} token types and {len(scores)} scores")
    ids: dict[str, Any] = {}
    for role in ("bos", "eos", "unknown", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id", (defaults or {}).get(role))
        if token_id is not None and not 0 <= token_id < count:
            raise TokenizerError(f"its {role} token is number {token_id} of {count} tokens")
        ids[role] = token_id
    return _Vocabulary(
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        **ids,
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        adds_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def _numbered(tokens: list[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for index, token in enumerate(tokens):
        numbers.setdefault(token, index)  # a token listed twice keeps its first number
    return numbers


def _byte_level(vocabulary: _Vocabulary, metadata: dict[str, Any], splitter: _Splitter) -> Tokenizer:
    """Return a tokenizer with merges over bytes that are written as letters (GPT-2 and its successors)."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    if any(len(pair) != 2 for pair in merges):
        raise TokenizerError("its list of merges holds something that is not a pair")
    try:
        model = models.BPE(_numbered(vocabulary.tokens), merges, ignore_merges=splitter.whole_words_first)
    except Exception as error:  # tokenizers raises a bare Exception when a merge names a token that is not there
        raise TokenizerError(f"its merges do not fit its tokens ({in_one_line(error, 120)})") from error
    backend = Tokenizer(model)
    if splitter.composed:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitter.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitter.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitter.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, *, prefix: bool) -> Tokenizer:
    """Return a tokenizer with merges over characters, by tokens and scores, and bytes for unknown ones (Llama 2)."""
    numbers = _numbered(vocabulary.tokens)
    model = models.BPE(
        numbers,
        _merges_by_score(vocabulary, numbers),
        unk_token=vocabulary.spelled(vocabulary.unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    respell = normalizers.Replace(" ", _BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), respell]) if prefix else respell
    steps: list[decoders.Decoder] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary, numbers: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, best score first, as sentencepiece chooses."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True):
        if kind not in (_NORMAL, _USER_DEFINED):
            continue
        rank = 0.0 if kind == _USER_DEFINED else score  # a user-defined token is never split
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in numbers and right in numbers]
        pairs.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        ranked.extend((rank, len(left), len(right), left, right) for left, right in pairs)
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in ranked]


def _add_special_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add tokens that are never split, and the BOS and EOS that the file wants around a text."""
    special, plain = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind in (_CONTROL, _UNKNOWN) or index in (vocabulary.bos, vocabulary.eos):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
    before = [vocabulary.bos] if vocabulary.adds_bos and vocabulary.bos is not None else []
    after = [vocabulary.eos] if vocabulary.adds_eos and vocabulary.eos is not None else []
    first, last = ([vocabulary.tokens[index] for index in ids] for ids in (before, after))
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
        special_tokens=[(vocabulary.tokens[index], index) for index in {*before, *after}],
    )


def _refuse_if_broken(backend: Tokenizer, vocabulary: _Vocabulary, *, start: str) -> None:
    """Refuse a tokenizer that does not encode the texts of tokens as these tokens. A broken one splits them.

    Only tokens with this `start` are sampled: if a text gets a blank in front, no other token can begin it.
    """
    pairs = enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    ordinary = [index for index, (token, kind) in pairs if kind == _NORMAL and token.startswith(start)]
    asked = right = 0
    for index in ordinary[:: max(1, len(ordinary) // (4 * _SAMPLES))]:
        text = backend.decode([index])
        if len(text.strip()) < 3 or not text.strip().isalpha():
            continue
        asked += 1
        right += backend.encode(text, add_special_tokens=False).ids == [index]
    if asked and right < _HEALTHY * asked:
        raise TokenizerError(f"only {right} of {asked} sampled tokens are found again in their own text")
