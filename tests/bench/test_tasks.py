"""Prompts become tasks: through a template or as they are, in batches, turn after turn, and only what fits."""

from __future__ import annotations

import pytest

from paceline import InputError, LanguageModel
from paceline.bench.candidate import Prompt, Task
from paceline.bench.tasks import Skipped, conversations, text_of
from tests.toys import CONTEXT, LETTERS, letters, llama

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}!{% endfor %}{% if add_generation_prompt %}.{% endif %}"
)


def lm(*, template: bool = False, eos: int | None = None) -> LanguageModel:
    tokenizer = letters()
    if template:
        tokenizer.chat_template = TEMPLATE
    return LanguageModel(llama(eos_token_id=eos), tokenizer, name="toy")


def ids(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(letter) for letter in text)


def first_tasks(prompts: list[Prompt], lm: LanguageModel, *sizes: int, **how: bool) -> tuple[list[Task], list[Skipped]]:
    begun, skipped = conversations(prompts, lm, *sizes, **how)
    return [each.task for each in begun], skipped


def test_a_template_where_there_is_one_and_it_is_wanted() -> None:
    talk, code = Prompt("1", "a", ("hi",)), Prompt("2", "b", ("def",), chat=False)
    assert [t.prompts for t in first_tasks([talk, code], lm(template=True), 1, 8)[0]] == [
        (ids("uhi!."),),
        (ids("def"),),
    ]
    assert first_tasks([talk], lm(template=True), 1, 8, chat=False)[0][0].prompts == (ids("hi"),)
    assert first_tasks([talk], lm(), 1, 8)[0][0].prompts == (ids("hi"),)


def test_batches_are_of_one_category_in_file_order() -> None:
    prompts = [Prompt(str(i), "ab"[i % 2], (LETTERS[i],), (f"r{i}",) if i else ()) for i in range(6)]
    tasks, skipped = first_tasks(prompts, lm(), 2, 8)
    assert not skipped
    assert [(t.id, t.category, t.prompts) for t in tasks] == [
        ("0+2", "a", (ids("a"), ids("c"))),
        ("4", "a", (ids("e"),)),
        ("1+3", "b", (ids("b"), ids("d"))),
        ("5", "b", (ids("f"),)),
    ]
    assert tasks[0].answers == ((), ("r2",))


def test_what_does_not_fit_is_skipped_and_counted() -> None:
    fits, long = Prompt("1", "a", ("a" * (CONTEXT - 8),)), Prompt("2", "a", ("a" * (CONTEXT - 7),))
    tasks, skipped = first_tasks([long, fits], lm(), 4, 8)
    assert [t.id for t in tasks] == ["1"]
    assert skipped == [Skipped("2", "89 tokens and 8 to write are more than the context of 96.")]
    assert first_tasks([long], lm(), 1, 8)[0] == []


def test_the_next_turn_of_a_conversation() -> None:
    prompt = Prompt("81", "a", ("hi", "and", "so"), ("x",), later_answers=(("y", "z"),))
    (talk,), _ = conversations([prompt], lm(template=True, eos=LETTERS.index(",")), 1, 8, turns=3)
    assert talk.turns == 3
    assert talk.task == Task("81", "a", (ids("uhi!."),), (("x",),))
    second = Task("81/2", "a", (ids("uhi!aabc!uand!."),), (("y", "z"),))
    assert talk.next_task([ids("abc,de,f")]) == second  # tokens after the end of text are dropped
    assert talk.task == second
    third = talk.next_task([ids(",aaaaaaa")])
    assert third == Task("81/3", "a", (ids("uhi!aabc!uand!a!uso!."),), ((),))
    assert talk.next_task([ids("aaaaaaaa")]) is None
    assert not talk.skipped


def test_the_next_turn_without_a_template() -> None:
    model = lm(eos=LETTERS.index(","))
    (talk,), _ = conversations([Prompt("1", "a", ("hi", "and"))], model, 1, 8, turns=2)
    task = talk.next_task([ids("abc,defg")])
    assert task is not None
    assert task.prompts == ((*ids("hiabc"), *model.tokenizer.encode("\n\nand\n\n", add_special_tokens=False)),)


def test_rows_of_a_batch_end_one_by_one() -> None:
    prompts = [
        Prompt("1", "a", ("a",)),
        Prompt("2", "a", ("b", "c")),
        Prompt("3", "a", ("d", "e" * 80)),
        Prompt("4", "a", ("f", "g", "h")),
    ]
    (talk,), _ = conversations(prompts, lm(template=True), 4, 8, turns=9)
    assert talk.turns == 3
    second = talk.next_task([ids("11111111"), ids("22222222"), ids("33333333"), ids("44444444")])
    assert second is not None
    assert second.id == "2/2+4/2"
    assert second.prompts == (ids("ub!a22222222!uc!."), ids("uf!a44444444!ug!."))
    assert [one.id for one in talk.skipped] == ["3/2"]
    assert "to write are more than the context of 96" in talk.skipped[0].reason
    third = talk.next_task([ids("22222222"), ids("44444444")])
    assert third is not None
    assert third.id == "4/3"


def test_no_more_turns_than_asked_for() -> None:
    (talk,), _ = conversations([Prompt("1", "a", ("hi", "and", "so"))], lm(), 1, 8, turns=2)
    assert talk.turns == 2
    assert talk.next_task([ids("aaaaaaaa")]) is not None
    assert talk.next_task([ids("aaaaaaaa")]) is None
    (talk,), _ = conversations([Prompt("1", "a", ("hi", "and"))], lm(), 1, 8)
    assert talk.turns == 1
    assert talk.next_task([ids("aaaaaaaa")]) is None


def test_text_ends_where_the_model_wanted_to_end() -> None:
    assert text_of(ids("ab,cd"), lm(eos=LETTERS.index(","))) == "ab"
    assert text_of(ids("ab,cd"), lm()) == "ab,cd"


def test_a_model_without_a_tokenizer_says_so() -> None:
    with pytest.raises(InputError, match="toy has no tokenizer"):
        first_tasks([Prompt("1", "a", ("hi",))], LanguageModel(llama(), None, name="toy"), 1, 8)
