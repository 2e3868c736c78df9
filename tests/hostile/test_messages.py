"""Conversations of odd messages: written, or refused in a sentence without a word of jinja."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import InputError, LanguageModel
from paceline.engine.prompts import ROLES, encode_all
from tests.toys import letters, llama

PLAIN = "{% for m in messages %}{{ m.role[0] + ' ' + m.content }}.{% endfor %}"
TOOLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %}.{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p['text'] }}!{% endfor %}.{% endfor %}"
PICKY = "{% if messages[0].role != 'user' %}{{ raise_exception('The first one must be the user\\'s') }}{% endif %}a"
OWN = "{% for m in messages %}{% if m.role == 'observation' %}o{% endif %}{{ m.content }}{% endfor %}"


def written(messages: Any, template: str = PLAIN) -> str:
    tokenizer = letters()
    tokenizer.chat_template = template
    ids, single = encode_all(messages, LanguageModel(llama(), tokenizer, "toy"))
    assert single
    return str(tokenizer.decode(ids[0]))


def turn(role: Any, content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more}]


def test_text_parts_are_joined_unless_the_template_reads_parts() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert written(turn("user", parts)) == "u abc."
    assert written(turn("user", parts), PARTS) == "ab!c!."


@pytest.mark.parametrize("message", [{"content": None}, {}], ids=["None", "no content"])
def test_an_assistant_that_calls_tools_needs_no_content(message: dict[str, Any]) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "add"}], **message}
    assert written([call], TOOLS) == "add."
    with pytest.raises(InputError, match="has tool calls, which the chat template of toy cannot write; leave them out"):
        written([call], PLAIN)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (turn("usr", "a"), "Unknown role 'usr'. Did you mean 'user'? Available: assistant, developer, function,"),
        (turn("User", "a"), "Unknown role 'User'. Did you mean 'user'?"),
        (turn("", "a"), "Unknown role ''. Available"),
        (turn(5, "a"), "Unknown role 5. Available"),
        (turn(None, "a"), "Unknown role None. Available"),
        (turn(["user"], "a"), "Unknown role ['user']. Available"),
        (turn("x" * 10**6, "a"), "Unknown role 'xxxxxxx"),
        (turn("user", None), "Message 0 of the conversation must have a text as its content, got None."),
        (turn("user", 5), "Message 0 of the conversation must have a text as its content, got 5."),
        (turn("user", []), "Message 0 of the conversation must have a text as its content, got []."),
        (turn("user", {"text": "a"}), "Message 0 of the conversation must have a text as its content, got {'text'"),
        (
            turn("user", [{"type": "image", "url": "x"}]),
            "Message 0 of the conversation has the part {'type': 'image'",
        ),
        (turn("user", ["a"]), "Message 0 of the conversation has the part 'a'; only parts like"),
        (turn("user", [{"type": "text"}]), "Message 0 of the conversation has the part {'type': 'text'}; only parts"),
        ([{"content": "a"}], "Message 0 of the conversation has no role; give {'role': 'user', 'content': '...'}, got"),
        ([*turn("user", "a"), {"content": "a"}], "Message 1 of the conversation has no role"),
        (turn("user", "a\ud800b"), "Character 3 of the prompt is '\\ud800', half of a UTF-16 pair"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_message(messages: Any, told: str) -> None:
    with pytest.raises(InputError) as error:
        written(messages)
    assert str(error.value).startswith(told)
    assert len(str(error.value)) < 400


def test_a_template_may_refuse_in_its_own_words() -> None:
    with pytest.raises(InputError) as error:
        written(turn("system", "a"), PICKY)
    wanted = "The chat template of toy cannot write this conversation: The first one must be the user's."
    assert str(error.value) == wanted


def test_an_error_inside_a_template_is_not_quoted() -> None:
    with pytest.raises(InputError) as error:
        written(turn("user", "a"), "{{ messages[0].content + 5 }}")
    assert str(error.value) == "The chat template of toy cannot write this conversation; check its roles and contents."


def test_roles_are_those_of_templates() -> None:
    for role in ROLES:
        assert written(turn(role, "ab")) == f"{role[0]} ab."
    assert written(turn("observation", "a"), OWN) == "oa"  # the template names it
    with pytest.raises(InputError, match="Unknown role 'observation'"):
        written(turn("observation", "a"))


@pytest.mark.parametrize("prompt", ["\ud800", ["a", "b\udfff"]], ids=ascii)
def test_half_a_character_is_no_text(prompt: Any) -> None:
    with pytest.raises(InputError, match="half of a UTF-16 pair; decode the text as UTF-8"):
        encode_all(prompt, LanguageModel(llama(), letters(), "toy"))
