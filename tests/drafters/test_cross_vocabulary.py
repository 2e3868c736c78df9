"""A draft model with another tokenizer: the text stays the target's, and what both can say is really drafted."""

from __future__ import annotations

from typing import Any

import pytest
from tests.selection import covering
from tests.toys import LETTERS, letters, llama, raw_bytes, scripted
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline import LanguageModel, SpeculativeDecoder, UnsupportedError
from paceline.models.reader import TransformersExecutor
from paceline.models.translation import Pieces, Transcript, Translation

MERGES = ["t h", "th e", "Ġ the", "c a", "ca t", "Ġ cat", "l o", "h e", "he l", "hel lo"]
MODES = ("intersection", "text")


def bpe(special: tuple[str, ...] = ("<s>", "<end>")) -> PreTrainedTokenizerFast:
    """Byte-level, with some words, and special tokens at the end of its ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [merge.replace(" ", "") for merge in MERGES]
    pairs = [(one, two) for one, two in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate([*alphabet, *words])}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1])


def sentencepiece() -> PreTrainedTokenizerFast:
    """Spaces as a mark before a word, one before every text, and bytes written out."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", *bytes_of, "\u2581", "\u2581the", "lo", "\u2581hel", *LETTERS[:26]]
    tokenizer = Tokenizer(models.Unigram([(word, -float(len(word) < 2)) for word in words], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"letters": letters(), "bytes": raw_bytes(), "bpe": bpe(), "pieces": sentencepiece()}
SEEDS = {name: seed for seed, name in enumerate(TOKENIZERS)}


def model(name: str, seed: int = 0) -> LanguageModel:
    tokenizer = TOKENIZERS[name]
    return LanguageModel(llama(seed + SEEDS[name], vocab_size=len(tokenizer)), tokenizer, name)


PAIRS = [("letters", "bytes"), ("bytes", "bpe"), ("bpe", "letters"), ("bpe", "pieces"), ("pieces", "bpe")]


@pytest.mark.parametrize(("mode", "pair"), covering(MODES, PAIRS))
def test_the_text_is_that_of_plain_decoding(mode: str, pair: tuple[str, str]) -> None:
    """Random models write random bytes: broken characters, unknown letters, all of it. Nothing may fail or change."""
    ours, theirs = map(model, pair)
    prompts = ["the cat the cat", "hello", "a", "lo the hello cat cat"]
    plain = SpeculativeDecoder(ours, draft=None)
    decoder = SpeculativeDecoder(ours, "cross-vocabulary", options={"model": theirs, "mode": mode}, gamma=4, rows=3)
    for settings in ({}, {"temperature": 1.0, "seed": [1, 2, 3, 4]}, {"repetition_penalty": 1.4}):
        told = {"max_new_tokens": 20, "ignore_eos": True, **settings}
        outs = decoder.generate(prompts, **told)
        assert [out.tokens for out in outs] == [out.tokens for out in plain.generate(prompts, **told)]
        assert sum(out.stats.drafted for out in outs) > 0
        assert decoder.drafter.name == "cross-vocabulary"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.2, "seed": 3}], ids=["greedy", "sampled"])
def test_one_text_in_two_tokenizers_is_accepted_whole(mode: str, settings: dict[str, Any]) -> None:
    """Ids that are not translated, or a memory that is out of step, would be rejected."""
    story = "abcdefghijklmnopqrstuvwxyz0123456789"
    bytes_of = raw_bytes()
    ours = LanguageModel(scripted(letters().encode(story)), letters(), "letters")
    theirs = LanguageModel(scripted(bytes_of.encode(story), 256), bytes_of, "bytes")
    decoder = SpeculativeDecoder(ours, "cross-vocabulary", options={"model": theirs, "mode": mode}, gamma=4)
    out = decoder.generate("ab", max_new_tokens=30, **settings)
    assert out.text == story[2:32]
    assert out.stats.acceptance_rate == 1.0


def test_letters_become_words_of_the_target() -> None:
    """By text: the draft spells, the target writes words; single letters would all be rejected."""
    spelled, words = letters(), bpe()
    tokens = words.encode("he cat.")
    assert len(tokens) == 3
    ours = LanguageModel(scripted(tokens, len(words)), words, "words")
    theirs = LanguageModel(scripted(spelled.encode("he cat.")), spelled, "spelled")
    decoder = SpeculativeDecoder(ours, "cross-vocabulary", options={"model": theirs, "mode": "text"}, gamma=4)
    out = decoder.generate("he", max_new_tokens=2)
    assert out.text == " cat."
    assert (out.stats.rounds, out.stats.accepted) == (1, 1)


def translation(target: str, draft: str) -> Translation:
    return Translation(model(target), model(draft))


def test_what_the_draft_wrote_continues_the_text() -> None:
    both = translation("bpe", "letters")
    words, spelled = bpe(), letters()

    def after(text: str, written: str) -> list[str]:
        return words.convert_ids_to_tokens(both.decode(words.encode(text), spelled.encode(written)))

    assert after("see", " the cat.") == ["Ġthe", "Ġcat", "."]
    assert after("hel", "lo the x") == ["lo", "Ġthe", "Ġ", "x"]  # "hello" would reach across the end of the text
    assert after("see", " the ca") == ["Ġthe", "Ġ"]  # "ca" may become "cat": it is not drafted
    assert after("x", "") == []


def test_special_tokens_are_theirs_if_they_know_them() -> None:
    ours, theirs = bpe(("<s>", "<end>")), bpe(("<begin>", "<end>"))
    both = Translation(
        LanguageModel(llama(0, vocab_size=len(ours)), ours), LanguageModel(llama(1, vocab_size=len(theirs)), theirs)
    )
    start, end = ours.convert_tokens_to_ids(["<s>", "<end>"])
    begin, also = theirs.convert_tokens_to_ids(["<begin>", "<end>"])
    assert both.encode([start, *ours.encode("the"), end])[0] == [begin, *theirs.encode("the"), also]
    assert both.decode(ours.encode("see"), [*theirs.encode(" the"), also, *theirs.encode("cat")]) == [
        *ours.encode(" the"), end,
    ]  # fmt: skip


def test_a_beginning_of_text_is_put_once() -> None:
    class Leading(PreTrainedTokenizerFast):
        def encode(self, text: str, add_special_tokens: bool = True, **more: Any) -> list[int]:  # type: ignore[override]
            bare = super().encode(text, add_special_tokens=False)
            return [self.bos_token_id, *bare] if add_special_tokens else bare

    made = bpe(("<s>", "<end>"))
    theirs = Leading(tokenizer_object=made.backend_tokenizer, bos_token="<s>", eos_token="<end>")
    ours = bpe(("<s>", "<other>"))
    both = Translation(
        LanguageModel(llama(0, vocab_size=len(ours)), ours), LanguageModel(llama(1, vocab_size=len(theirs)), theirs)
    )
    bare = theirs.encode("the cat", add_special_tokens=False)
    for text in (ours.encode("the cat"), [ours.bos_token_id, *ours.encode("the cat")]):
        transcript = Transcript(both, 0)
        for end in range(1, len(text) + 1):
            transcript.follow(text[:end])
        assert transcript.ids == [theirs.bos_token_id, *bare]


@pytest.mark.parametrize("draft", ["letters", "bytes", "pieces"])
def test_a_text_that_grows_is_the_text_encoded_whole(draft: str) -> None:
    """Token by token, with a tail that is taken back now and then, as inside another drafter."""
    both = translation("bpe", draft)
    text = bpe().encode("hello the cat the the cat hello lo lo cat the hello the cat" * 3)
    transcript = Transcript(both, 0)
    for end in range(1, len(text) + 1):
        transcript.follow([*text[:end], *bpe().encode(" cat the hello")])
        transcript.rewind(end)
        kept = transcript.follow(text[:end])
        assert kept >= len(transcript.ids) - 40
    assert both.pieces is not None
    assert both.pieces[1].join(transcript.ids) == both.pieces[0].join(text)
    assert transcript.ids == both.pieces[1].encode(both.pieces[0].join(text).decode())


def test_half_a_character_is_no_text_yet() -> None:
    """The text ends inside a character: bytes where the draft has them, else silence (transformers #46124)."""
    euro = bpe().encode("a\u20ac")
    assert len(euro) == 4
    for draft, says_it in (("bytes", True), ("letters", False)):
        both = translation("bpe", draft)
        transcript = Transcript(both, 0)
        for end in (1, 2, 3, 4):
            transcript.follow(euro[:end])
            assert transcript.complete == (says_it or end in (1, 4))
    both = translation("bpe", "bytes")
    rest = raw_bytes().encode("\u20ac the")
    assert both.decode(euro[:2], rest[1:]) == [*euro[2:], *bpe().encode(" the")]


def test_pieces_of_a_sentence_stand_in_the_middle_of_it() -> None:
    """A tokenizer that puts a space before every text must not put one into a word."""
    pieces = Pieces(TOKENIZERS["pieces"], len(TOKENIZERS["pieces"]))
    for text in ("lo the", " the lo", "x", "\u20ac"):
        assert pieces.join(pieces.encode(text)) == text.encode()
    assert pieces.by_bytes[b"a"] not in pieces.byte_tokens


def test_what_was_read_stays_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is read once: later rounds read a few tokens, not the text again."""
    ours, theirs = model("letters"), model("bytes")
    fed: list[int] = []
    run = TransformersExecutor.__call__

    def counted(self: TransformersExecutor, cache: Any, plan: Any, *given: Any) -> Any:
        fed.extend([plan.ids.shape[1]] if self._lm is theirs else [])
        return run(self, cache, plan, *given)

    monkeypatch.setattr(TransformersExecutor, "__call__", counted)
    for mode in MODES:
        fed.clear()
        decoder = SpeculativeDecoder(ours, "cross-vocabulary", options={"model": theirs, "mode": mode}, gamma=3)
        decoder.generate("the cat says hello to the other cat and " * 2, max_new_tokens=12, ignore_eos=True)
        assert max(fed[1:]) <= 8
        assert fed[0] > 70


def test_refusals() -> None:
    ours = LanguageModel(llama(0))
    with pytest.raises(UnsupportedError, match="different vocabularies"):
        SpeculativeDecoder(ours, "cross-vocabulary", options={"model": LanguageModel(llama(1, vocab_size=50))})
    greek = letters("αβγ")
    theirs = LanguageModel(llama(1, vocab_size=3), greek)
    with pytest.raises(UnsupportedError, match="no token in common"):
        SpeculativeDecoder(model("letters"), "cross-vocabulary", options={"model": theirs})
    SpeculativeDecoder(model("letters"), "cross-vocabulary", options={"model": theirs, "mode": "text"})
