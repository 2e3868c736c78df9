"""The bodies that clients may send: strict models with OpenAI's and vLLM's names. Every other field is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_FIELDS = 128  # fields of an object: a body with a million names would give a million errors
STOPS, STOP_LENGTH = 64, 1024
CHOICES, PROMPTS = 128, 1024
MESSAGES, PARTS = 4096, 16_384  # each item of a list of objects takes time in the event loop
LOGPROBS = 20
_INT64 = 2**63

Text = Annotated[str, Field(max_length=2**26)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=PROMPTS)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]


def _truth_value(value: Any) -> Any:
    """Refuse 0 and 1: they equal False and True, so that `Literal` takes them."""
    if value is not None and not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


Off = Annotated[Literal[False], BeforeValidator(_truth_value)]
On = Annotated[Literal[True], BeforeValidator(_truth_value)]


class Strict(BaseModel):
    """No conversion of types, no unknown fields, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _FIELDS:
            raise ValueError(f"an object has {len(given):,} fields, and the limit is {_FIELDS}")
        return given


class StreamOptions(Strict):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_rounds: bool | None = False
    include_likeliest: Annotated[int, Field(ge=0, le=LOGPROBS)] | None = None
    include_obfuscation: bool | None = False

    @model_validator(mode="after")
    def _likeliest_need_rounds(self) -> StreamOptions:
        if self.include_likeliest is not None and not self.include_rounds:
            raise ValueError("stream_options.include_likeliest needs include_rounds=true")
        return self


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = False


class SchemaFormat(Strict):
    name: str = "response"
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's shape. `schema` beside the type json_object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _schema_of_an_object(self) -> ResponseFormat:
        if self.object_schema is not None and self.type != "json_object":
            raise ValueError("response_format.schema is only for the type json_object; use json_schema.schema")
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("response_format.json_schema is only for the type json_schema")
        return self


class StructuredOutputs(Strict):
    """vLLM's structured outputs: one of these fields is set."""

    json_schema: str | dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=4096)] | None = None
    grammar: str | None = None


class SpeculativeConfig(Strict):
    """vLLM's keys. `method` and `tree` choose another drafter of the playground."""

    num_speculative_tokens: Annotated[int, Field(ge=0, le=4096)] | None = None
    method: Annotated[str, Field(max_length=64)] | None = None
    tree: bool | None = None

    @model_validator(mode="after")
    def _a_number_or_a_method(self) -> SpeculativeConfig:
        if self.num_speculative_tokens is None and self.method is None:
            raise ValueError("speculative_config needs num_speculative_tokens or method")
        if self.tree is not None and self.method is None:
            raise ValueError("speculative_config.tree needs method")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MESSAGES)]


class Sampled(Strict):
    """The parameters that completions and chat have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES)] | None = 1
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 0
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=STOPS)] | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=STOP_LENGTH)] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=4096)] | None = None
    prediction: Prediction | None = None
    speculative_config: SpeculativeConfig | bool | Annotated[int, Field(ge=0, le=4096)] | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = 0
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    # without effect on the text
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # only the value that changes nothing
    skip_special_tokens: On | None = None
    spaces_between_special_tokens: On | None = None
    use_beam_search: Off | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self


class CompletionRequest(Sampled):
    """The body of `/v1/completions`."""

    prompt: (
        Text
        | Texts
        | Annotated[Ids, Field(min_length=1)]
        | Annotated[list[Annotated[Ids, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=PROMPTS)]
    )
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS)] | None = None
    add_special_tokens: bool | None = True
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None


class CalledFunction(Strict):
    name: str
    arguments: str


class Call(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients send back what a stream gave them


class Message(Strict):
    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MESSAGES)] | None = None
    tool_call_id: str | None = None
    # clients send back messages of this server as they are
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: NamedFunction


def _few_parts(given: Any) -> Any:
    """Refuse messages with too many parts and calls together, before each of them is read."""
    lists = [
        inner
        for message in (given[:MESSAGES] if isinstance(given, list) else ())
        if isinstance(message, dict)
        for inner in (message.get("content"), message.get("tool_calls"))
        if isinstance(inner, list)
    ]
    parts = sum(map(len, lists))
    if parts > PARTS:
        raise ValueError(f"the messages have {parts:,} parts and calls, and the limit is {PARTS:,}")
    return given


Messages = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MESSAGES), BeforeValidator(_few_parts)
]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]


class Conversation(Strict):
    """The parameters that decide how a conversation becomes a prompt."""

    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Sampled, Conversation):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    echo: Off | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Off | None = None
    safety_identifier: str | None = None
    functions: None = None
    function_call: None = None
    reasoning_effort: None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self


class FlatTool(Strict):
    """A function as `/v1/responses` writes it."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatNamedTool(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _fields_of_a_schema(self) -> TextFormat:
        for name, value in (("schema", self.json_schema), ("name", self.name), ("description", self.description),
                            ("strict", self.strict)):  # fmt: skip
            if value is not None and self.type != "json_schema":
                raise ValueError(f"text.format.{name} is only for the type json_schema")
        return self


class TextOptions(Strict):
    format: TextFormat | None = None


class ResponsesRequest(Strict):
    """The body of `/v1/responses`: the stateless part of it."""

    input: Text | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = True
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    speculative_config: SpeculativeConfig | bool | Annotated[int, Field(ge=0, le=4096)] | None = None
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = 0
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    # only the value that changes nothing
    store: Off | None = None
    background: Off | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    previous_response_id: None = None
    conversation: None = None
    reasoning: None = None
    prompt: None = None

    @model_validator(mode="after")
    def _options_need_what_they_change(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        if self.top_logprobs and not self.include:
            raise ValueError("top_logprobs needs include=['message.output_text.logprobs']")
        return self


class TokenizeRequest(Conversation):
    """The body of `/tokenize`: a text or a conversation. `content` is llama.cpp's name of the text."""

    model: str | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if sum(value is not None for value in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give one of prompt, content and messages")
        return self

    @model_validator(mode="after")
    def _fields_of_the_form(self) -> TokenizeRequest:
        """A field of the other form would have no effect."""
        if self.messages is None:
            for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(self, name) not in (None, False):
                    raise ValueError(f"{name} is only for messages; leave it out")
        elif self.add_special is not None:
            raise ValueError("add_special is only for a text; use add_special_tokens")
        if self.add_special is not None and self.add_special_tokens is not None:
            raise ValueError("add_special and add_special_tokens are one setting; give one of them")
        return self


class DetokenizeRequest(Strict):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Ids
