"""What may be a prompt, and one sentence for what may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.toys import letters, llama

from paceline import InputError, LanguageModel, SpeculativeDecoder
from paceline.engine.prompts import encode_all

CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}!{% endfor %}{% if add_generation_prompt %}.{% endif %}"


def lm(*, text: bool = True, template: bool = True) -> LanguageModel:
    tokenizer = letters() if text else None
    if tokenizer is not None and template:
        tokenizer.chat_template = TEMPLATE
    return LanguageModel(llama(), tokenizer, name="toy")


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("abc", [0, 1, 2]),
        ([4, 5, 6], [4, 5, 6]),
        ((4, 5, 6), [4, 5, 6]),
        ([7], [7]),
        (torch.tensor([4, 5]), [4, 5]),
        (np.array([4, 5]), [4, 5]),
        (CHAT, [0, 1, 2, 39, 3, 39, 37]),
        (tuple(CHAT), [0, 1, 2, 39, 3, 39, 37]),
    ],
    ids=str,
)
def test_one_prompt(prompt: Any, ids: list[int]) -> None:
    assert encode_all(prompt, lm()) == ([ids], True)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (["abc", "d"], [[0, 1, 2], [3]]),
        (["abc"], [[0, 1, 2]]),
        ([[4, 5], [6]], [[4, 5], [6]]),
        (torch.tensor([[4, 5], [6, 7]]), [[4, 5], [6, 7]]),
        ([torch.tensor([4, 5]), torch.tensor([6])], [[4, 5], [6]]),
        ([CHAT, CHAT[:1]], [[0, 1, 2, 39, 3, 39, 37], [0, 1, 2, 39, 37]]),
        (["a", [4, 5], CHAT[:1]], [[0], [4, 5], [0, 1, 2, 39, 37]]),
    ],
    ids=str,
)
def test_a_batch(prompt: Any, ids: list[list[int]]) -> None:
    assert encode_all(prompt, lm()) == (ids, False)


def test_a_single_prompt_gives_one_result_and_a_batch_of_one_a_list() -> None:
    decoder = SpeculativeDecoder(lm(), draft=None)
    single = decoder.generate("abc", max_new_tokens=3)
    (propose_lists,) = decoder.generate(["abc"], max_new_tokens=3)
    assert single.tokens == propose_lists.tokens
    assert single.prompt_tokens == [0, 1, 2]


def test_a_conversation_gets_no_second_bos() -> None:
    """The template writes the special tokens itself (T#46124: BOS inserted again)."""
    model = lm()
    tokenizer = model.tokenizer
    encode = tokenizer.encode
    tokenizer.encode = lambda text, add_special_tokens=True, **others: (
        [30] * add_special_tokens + encode(text, add_special_tokens=False)
    )
    assert encode_all(CHAT[:1], model)[0] == [[0, 1, 2, 39, 37]]
    assert encode_all("abc", model)[0] == [[30, 0, 1, 2]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "The prompt is empty"),
        (["a", ""], "The prompt is empty"),
        ([[1], []], "The prompt is empty"),
        (torch.tensor([], dtype=torch.int64), "The prompt is empty"),
        (None, "A prompt is a string, token ids or a list of messages, not NoneType."),
        ({"input_ids": [1]}, "A prompt is a string, token ids or a list of messages, not dict."),
        (5, "A prompt is a string, token ids or a list of messages, not int."),
        ([1.5, 2.5], "A prompt is a string, a list of token ids or a list of messages, not float."),
        ([True, False], "A prompt is a string, a list of token ids or a list of messages, not bool."),
        ([1, "a"], "A prompt is a string, a list of token ids or a list of messages, not int."),
        ([{"role": "user"}], "Message 0 of the conversation must have a text as its content, got None."),
        ([{"prompt": "a"}], "Message 0 of the conversation has no role; give"),
    ],
    ids=str,
)
def test_what_is_no_prompt(prompt: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        encode_all(prompt, lm())
    assert str(error.value).startswith(message)


def test_words_need_a_tokenizer_and_conversations_a_template() -> None:
    with pytest.raises(InputError, match="toy has no tokenizer, so a prompt must be token ids"):
        encode_all("abc", lm(text=False))
    with pytest.raises(InputError, match="toy has no tokenizer"):
        encode_all(CHAT, lm(text=False))
    with pytest.raises(InputError, match="toy has no chat template, so it cannot read a conversation"):
        encode_all(CHAT, lm(template=False))
    assert encode_all([1, 2], lm(text=False)) == ([[1, 2]], True)


def test_ids_in_and_out_need_no_tokenizer() -> None:
    """Speech or semantic tokens: no text is needed."""
    out = SpeculativeDecoder(lm(text=False), "prompt-lookup").generate([1, 2, 1, 2], max_new_tokens=6)
    assert (len(out.tokens), out.text) == (6, "")
