"""The list of the suites: what each needs, and how its server is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

_PYTEST = "pytest==8.4.2"


@dataclass(frozen=True)
class Checkout:
    """Files of a checkout that the environment variable names. They are copied, and nothing is written into it."""

    variable: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """One tool. The first of `packages` is the tool. `servers` are the flags of each server by the end of its variable:
    "" for PACELINE_URL, "plain" for PACELINE_URL_PLAIN. `checks` is a file of checks/, or with `plugin` what pytest
    runs in the copy of the checkout."""

    name: str
    checks: str
    packages: tuple[str, ...]
    servers: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})
    kind: Literal["python", "node"] = "python"
    model: Literal["smollm2-135m", "tiny"] = "smollm2-135m"
    checkout: Checkout | None = None
    plugin: str = ""
    root: str = "."  # the folder of the copy where pytest runs
    stubs: str = ""  # a folder of checks/ with packages that stand for theirs

    @property
    def tool(self) -> str:
        return self.packages[0].partition("==")[0].partition("[")[0]


_JSONSCHEMA, _REQUESTS = "jsonschema==4.26.0", "requests==2.34.2"
_ASYNC = ("regex==2026.11.15", "pytest-asyncio==1.5.0")
_SMALL = ("--max-num-seqs", "1", "--max-queued", "0", "--api-key", "right")
_ENTRYPOINTS = "tests/entrypoints"
_VLLM_FILES = tuple(f"{_ENTRYPOINTS}/{name}.py" for name in
                    ("conftest", "openai/completion/test_completion", "openai/chat_completion/test_chat"))  # fmt: skip

SUITES: tuple[Suite, ...] = (
    Suite("openai-python", "openai_python.py", ("openai==3.51.0", _PYTEST), {"": (), "small": _SMALL}),
    Suite("openai-node", "openai_node.mjs", ("openai@6.30.1",), kind="node"),
    Suite("schemathesis", "schemathesis_fuzz.py", ("schemathesis==4.32.5", _PYTEST),
          {"": ("--max-num-seqs", "4", "--max-model-len", "256")}, model="tiny"),
    Suite("openai-openapi", "openai_schemas.py", (_JSONSCHEMA, _REQUESTS, _PYTEST),
          checkout=Checkout("OPENAI_OPENAPI", ("openapi.json",))),
    Suite("llama.cpp", "unit", ("openai==2.14.0", _REQUESTS, "wget==3.2", _PYTEST), {},
          checkout=Checkout("LLAMA_CPP_DIR", ("tools/server/tests",)), plugin="llama_cpp", root="tools/server/tests"),
    Suite("vllm", ".", ("openai==2.14.0", _REQUESTS, _JSONSCHEMA, *_ASYNC, _PYTEST), {},
          checkout=Checkout("VLLM_DIR", _VLLM_FILES), plugin="vllm_suite", root=_ENTRYPOINTS, stubs="vllm_stubs"),
    Suite("lm-eval", "lm_eval_tasks.py", ("lm-eval[api]==0.4.13", _PYTEST), {"": (), "plain": ("--draft", "none")}),
    Suite("litellm", "litellm_client.py", ("litellm==1.98.0", _PYTEST)),
    Suite("langchain-openai", "langchain_client.py", ("langchain-openai==1.7.3", _PYTEST)),
    Suite("instructor", "instructor_client.py", ("instructor==1.17.0", _PYTEST)),
    Suite("llm", "llm_cli.py", ("llm==0.36", _PYTEST)),
    Suite("guidellm", "guidellm_load.py", ("guidellm==0.8.1", "torch==2.13.0", _PYTEST)),
    Suite("aiperf", "aiperf_load.py", ("aiperf==0.13.0", _PYTEST)),
)  # fmt: skip
