"""Every class of transformers that completes text, built tiny: does Paceline decode it rightly, or refuse it?

    python -m tests.models.survey                 all classes; writes docs/models.md
    python -m tests.models.survey doge paligemma  some model types; writes nothing

A class is built from its default config with small numbers (`paceline.models.probe`), random weights and windows that
are longer than what the probe reads from a given model. Each class has a process of its own, with limits.
"""

from __future__ import annotations

import multiprocessing
import platform
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from paceline import LanguageModel, SpeculativeDecoder, UnsupportedError
from paceline.common.errors import in_one_line
from paceline.models import probe  # noqa: F401 - before the processes part
from paceline.models.loading.hub import quiet
from paceline.models.probe import small_config, small_models

PAGE, MARK = Path(__file__).parents[2] / "docs" / "models.md", "<!-- written by make models -->"
WINDOW = 48  # of every window in a surveyed model: the probe reads fewer tokens from a given model
PROMPTS = [[7, 9, 4, 21, 9, 4, 33, 7, 9, 4, 21, 9, 4, 33, 7, 9, 4, 21], [5, 6, 11, 50, 6, 11, 50]]
TOKENS = 64  # written after each prompt: more than a window
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3}
SECONDS, BYTES, JOBS = 600, 16 << 30, 2
RIGHT, REFUSED, WRONG, CRASH, UNBUILT = "right", "refused", "WRONG", "CRASH", "not built"
VERDICTS = {
    RIGHT: "accepted and right",
    REFUSED: "refused by a sentence",
    WRONG: "accepted and wrong",
    CRASH: "crash",
    UNBUILT: "cannot be built tiny here",
}
TASKS = ("causal", "image-text")

# Default configs that are not complete: what every published checkpoint of the class has.
_HEAD, _ROPE = {"head_dim": 128}, {"rope_type": "default", "rope_theta": 10000.0}
_HALF_ROPE = {"text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}}
_FULL_ROPE = {"rope_parameters": {"full_attention": _ROPE}}
_CHOSEN = {"num_experts_per_tok": 6}
_CONV = {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2}
_BLOCKS = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 2}
_INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 64, "budget": 64, "compress_ratio": 4}
_INDEXED = {
    **{f"indexer_{name}": value for name, value in _INDEXER.items()},
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
}
_VISION_START = {"vision_start_token_id": 201}
_IMAGE = {"vocabulary_map": {"<image>": 200}}
COMPLETED: dict[str, dict[str, Any]] = {
    "chameleon": _IMAGE,
    "cohere_compass": {"text_config": _FULL_ROPE},
    "cohere_compass_text": _FULL_ROPE,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {**_CHOSEN, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v2": _CHOSEN,
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "dots1": {**_CHOSEN, "n_routed_experts": 128, "n_shared_experts": 2},
    "emu3": _IMAGE,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm46v": _HALF_ROPE,
    "glm4v": _HALF_ROPE,
    "glm4v_moe": {"text_config": {**_HALF_ROPE["text_config"], **_HEAD}},
    "glmga": _HALF_ROPE,
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
    "hunyuan_vl": {"text_config": {**_HEAD, "rope_parameters": {**_ROPE, "mrope_section": [16, 16, 16, 16]}}},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "lfm2_vl": {"text_config": _CONV},
    "minimax_m3_vl": {"text_config": _BLOCKS},
    "minimax_m3_vl_text": _BLOCKS,
    "ministral": _HEAD,
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_5_omni_thinker": _VISION_START,
    "qwen3_omni_moe_thinker": _VISION_START,
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "step3p7": {"text_config": {"sliding_window": 512}},
    "xmod": {"default_language": "en_XX"},
}


@dataclass(frozen=True)
class Subject:
    """A class to survey. task: which mapping of transformers has it."""

    model_type: str
    class_name: str
    task: str


@dataclass(frozen=True)
class Outcome:
    verdict: str
    reason: str = ""
    notes: list[str] = field(default_factory=list)


def subjects() -> list[Subject]:
    """All classes of both mappings, each once."""
    mappings = (
        ("causal", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("image-text", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    )
    found = {}
    for task, mapping in mappings:
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault((model_type, name), Subject(model_type, name, task))
    return list(found.values())


def build(subject: Subject, window: int = WINDOW) -> Any:
    """A tiny random model, in float64 where it can run in that. None: no small model of the class reads a text."""
    kind = getattr(transformers, subject.class_name)
    with quiet():
        config = CONFIG_MAPPING[subject.model_type](**COMPLETED.get(subject.model_type, {}))
    if kind.config_class is not type(config):
        parts = [value for value in vars(config).values() if type(value) is kind.config_class]
        config = parts[0] if parts else config
    if subject.task == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True  # classes of the BERT family look ahead without it
    for dtype in (torch.float64, torch.float32):
        for model in small_models(kind, config, window, dtype):
            model.generation_config.eos_token_id = model.config.eos_token_id = None
            return model
    return _unable(kind, config, window)


def _unable(kind: Any, config: Any, window: int) -> Any:
    """A model that cannot read a text by itself: one that needs an image, or sizes that do not fit together."""
    with quiet():
        return kind._from_config(small_config(config, window), dtype=torch.float32).eval()


def judge(model: Any, tokens: int = TOKENS) -> Outcome:
    """Is a model refused, or does it write what transformers writes: alone, in a batch, with chains and with trees?"""
    try:
        target = LanguageModel(model)
    except UnsupportedError as refusal:
        return Outcome(REFUSED, str(refusal))
    notes = [] if model.dtype == torch.float64 else [str(model.dtype).removeprefix("torch.")]
    with torch.no_grad(), quiet():
        wanted = [_by_transformers(model, prompt, tokens, notes) for prompt in PROMPTS]
    if max(len(set(text)) for text in wanted) < 6:
        notes.append("its greedy text repeats a few tokens")
    plain = SpeculativeDecoder(target, None)
    for prompt, text in zip(PROMPTS, wanted, strict=True):
        if plain.generate(prompt, max_new_tokens=tokens).tokens != text:
            return Outcome(WRONG, "plain decoding differs from transformers", notes)
    lawful = [plain.generate(prompt, max_new_tokens=tokens, **SAMPLED).tokens for prompt in PROMPTS]
    for name, decoder in _decoders(target):
        for prompts in (PROMPTS, PROMPTS[:1]):  # in a ragged batch, and alone
            for texts, settings in ((wanted, {}), (lawful, SAMPLED)):
                out = decoder.generate(prompts, max_new_tokens=tokens, **settings)
                if [one.tokens for one in out] != texts[: len(prompts)]:
                    return Outcome(WRONG, f"{name}: another {'sampled' if settings else 'greedy'} text", notes)
    return Outcome(RIGHT, "", notes)


def _decoders(target: LanguageModel) -> Iterator[tuple[str, SpeculativeDecoder]]:
    yield "plain decoding", SpeculativeDecoder(target, None)
    yield "chains of prompt-lookup", SpeculativeDecoder(target, "prompt-lookup")
    yield "trees of token recycling", SpeculativeDecoder(target, "recycling")
    yield "trees of a draft model", SpeculativeDecoder(target, target, gamma=4, options={"tree": "best-first"})


def _by_transformers(model: Any, prompt: list[int], tokens: int, notes: list[str]) -> list[int]:
    """The greedy text by `generate`; by whole forward passes where `generate` cannot run without an image."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
    try:
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return list(out[0, len(prompt) :].tolist())
    except Exception as error:
        notes.append(f"`generate` fails ({in_one_line(error, 80)})")
    for _ in range(tokens):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return list(ids[0, len(prompt) :].tolist())


# ---- one process per class


def _work(subject: Subject, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    torch.set_num_threads(1)
    try:
        model = build(subject)
    except Exception as error:
        pipe.send(Outcome(UNBUILT, f"{type(error).__name__}: {in_one_line(error, 120)}"))
        return
    try:
        pipe.send(judge(model))
    except Exception as error:
        pipe.send(Outcome(CRASH, f"{type(error).__name__}: {in_one_line(error)}"))


def survey(subject: Subject) -> Outcome:
    """The outcome for one class, in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(subject, theirs))
    start = time.monotonic()
    process.start()
    theirs.close()
    try:
        outcome = ours.recv() if ours.poll(SECONDS) else Outcome(CRASH, f"it runs for more than {SECONDS} s")
    except EOFError:
        outcome = Outcome(CRASH, "its process ended without a word")
    process.kill()
    process.join()
    line = f"{outcome.verdict:9} {subject.model_type:28} {subject.class_name:44} {time.monotonic() - start:5.0f} s"
    print(f"{line}  {outcome.reason} {'; '.join(outcome.notes)}", flush=True)
    return outcome


# ---- the page


def main(names: list[str]) -> int:
    chosen = [each for each in subjects() if not names or each.model_type in names]
    with ThreadPoolExecutor(JOBS) as pool:
        found = dict(zip(chosen, pool.map(survey, chosen), strict=True))
    counts = Counter(outcome.verdict for outcome in found.values())
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    if not names:
        text = PAGE.read_text("utf-8").partition(MARK)[0] + MARK + _page(found)
        PAGE.write_text(text, "utf-8")
        print(f"written to {PAGE}")
    return 1 if counts[WRONG] or counts[CRASH] else 0


def _page(found: dict[Subject, Outcome]) -> str:
    """The tables, as Markdown."""
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    counts = Counter((outcome.verdict, subject.task) for subject, outcome in found.items())
    lines = ["", "", f"Written by `make models` with {versions}.", ""]
    lines += [f"| | {' | '.join(TASKS)} |", "|---|" + "---|" * len(TASKS)]
    for verdict, words in VERDICTS.items():
        lines.append(f"| {words} | {' | '.join(str(counts[verdict, task]) for task in TASKS)} |")
    for task in TASKS:
        right = [s.class_name for s, o in found.items() if (o.verdict, s.task) == (RIGHT, task)]
        lines += ["", f"**Accepted and right, {task}:** {', '.join(sorted(set(right)))}."]
    for verdict in (REFUSED, UNBUILT, WRONG, CRASH):
        rows = sorted({(s.class_name, _why(o)) for s, o in found.items() if o.verdict == verdict})
        if rows:
            lines += ["", f"## {VERDICTS[verdict].capitalize()}", "", "| class | why |", "|---|---|"]
            lines += [f"| {name} | {why} |" for name, why in rows]
    return "\n".join(lines) + "\n"


def _why(outcome: Outcome) -> str:
    """The reason without the name of the class, which stands beside it."""
    output = re.sub(r"^(A small copy of )?\w+ \([\w-]+\) ", lambda m: "a small copy " if m[1] else "", outcome.reason)
    return output.replace("; it is refused because its text could come out wrong", "").replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
