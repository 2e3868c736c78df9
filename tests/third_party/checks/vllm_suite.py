"""A plugin of pytest for vLLM's tests of completions and chat: it skips the cases that do not apply. `vllm_stubs` has
the packages that they import."""

from __future__ import annotations

import pytest
from cases import skip_what_does_not_apply

_CLASSES = "tests a class of vLLM, not a server"
_TEXT = "depends on the text of their model"
REASONS = {
    "(zephyr-lora)": "no LoRA",
    "test_completion_request_*": _CLASSES,
    "test_chat_completion_request_*": _CLASSES,
    "test_single_completion(*": "counts the tokens of OPT's tokenizer",
    "test_single_chat_session(*": "counts the tokens of Zephyr's tokenizer",
    "test_completion_truncation_side_controls_prompt_truncation(*": "their field truncate_prompt_tokens",
    "test_logprob_token_ids*": "their fields logprob_token_ids and allowed_token_ids",
    "test_batch_completions(*": "needs use_beam_search",
    "test_long_seed": "compares with words of pydantic's error; ours is a sentence with status 400",
    "test_extra_fields_allowed": "an unknown field is refused with its name",
    "test_complex_message_content": _TEXT,
    "test_more_than_one_prompt_logprobs_chat(*": _TEXT + ": the fourth token must be the likeliest",
    "test_structured_outputs_choice_chat": _TEXT + ": a second answer must differ from the first",
    "test_structured_outputs_json_chat": _TEXT + ": a second answer must differ from the first",
    "test_structured_outputs_regex_chat": _TEXT + ": a second answer must differ from the first",
    "test_custom_role": "the roles are those of chat templates; another one is refused",
    "test_completion_streaming(*": _TEXT + ", which does not end within 5 tokens",
    "test_response_format_json_object": _TEXT,
    "test_response_format_json_schema": _TEXT,
    "test_invocations": "their endpoint /invocations",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_what_does_not_apply(items, REASONS)
