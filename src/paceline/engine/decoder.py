"""`SpeculativeDecoder`: what people hold in their hands."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.core.contracts import DRAFTERS, RULES, Drafter, Rule
from paceline.core.errors import InputError, UnknownNameError
from paceline.core.registry import build_options
from paceline.drafters.draft_model import DraftModel
from paceline.models import catalogue_names, is_model, load
from paceline.models.language_model import LanguageModel, check_prompt

from .loop import Loop
from .prompts import encode_all
from .request import Request, build_requests
from .rows import Event, Row
from .stopping import Detokenizer, Stopper, special_stops
from .stream import Stream

_NAMES = ("target", "draft", "gamma", "rule", "options", "rule_options", "nodes", "rows")
_ALIASES = ("assistant_model", "num_assistant_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size")
Cancel = Callable[[], bool]


class SpeculativeDecoder:
    """Decodes with a target and a drafter; what it writes is what the target alone would have written.

    target: a LanguageModel, a transformers model, or anything `paceline.load` takes. draft: the name of a drafter, a
    Drafter, a model (object, catalogue name, hub id, folder, .gguf), or None for plain decoding. options: of the
    drafter, by name; rule_options: of the rule. gamma: tokens drafted in a row; nodes: of a tree, in all; rows: prompts
    decoded at once.
    Transformers' names (assistant_model, num_assistant_tokens, prompt_lookup_num_tokens, max_matching_ngram_size) work.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        *,
        gamma: int = 5,
        rule: str | Rule = "match",
        options: Mapping[str, Any] | None = None,
        rule_options: Mapping[str, Any] | None = None,
        nodes: int | None = None,
        rows: int = 16,
        **aliases: Any,
    ) -> None:
        draft, gamma, options = _translate(aliases, draft, gamma, options or {})
        for name, value in (("gamma", gamma), ("rows", rows), ("nodes", 1 if nodes is None else nodes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}.")
        self.target = target if isinstance(target, LanguageModel) else load(target)
        self.rule = make_rule(rule, rule_options or {})
        self.drafter = make_drafter(draft, options, self.target.device)
        self.drafter.check(self.target)
        self.gamma, self.rows = gamma, rows
        self.nodes = max(gamma, 64) if nodes is None else nodes
        self._busy = threading.Lock()
        self._owner: int | None = None

    def describe(self) -> str:
        """One line: what speculates with what."""
        lm = self.target
        where = f"{lm.name} ({str(lm.dtype).removeprefix('torch.')}, {lm.device})"
        if not self.drafter.speculates:
            return f"{where}, plain decoding"
        return f"{where} with {self.drafter.describe()}, γ={self.gamma}, rule {self.rule.name}"

    # ---- the two ways to use it

    def generate(self, prompt: Any, *, cancel: Cancel | None = None, **settings: Any) -> Any:
        """Write on. `prompt` is a string, a list of token ids, or a conversation; a list of those is a batch.

        Settings: max_new_tokens, temperature, top_k, top_p, min_p, typical_p, noise, dynamic_temperature,
        repetition_penalty, presence_penalty, frequency_penalty, logit_bias, banned_tokens, min_new_tokens, processors,
        seed, do_sample, dynamic_exponent, stop, eos_token_ids, ignore_eos, criteria, logprobs; a list holds one value
        per prompt. Returns a `Generation`, or a list of them for a batch.
        """
        prompts, single = encode_all(prompt, self.target)
        rows = self._rows(prompts, build_requests(len(prompts), settings))
        for _ in self._run(rows, cancel):
            pass
        results = [row.result() for row in rows]
        return results[0] if single else results

    def stream(self, prompt: Any, *, cancel: Cancel | None = None, **settings: Any) -> Stream:
        """The same, one `Piece` per token as it is committed."""
        prompts, _ = encode_all(prompt, self.target)
        rows = self._rows(prompts, build_requests(len(prompts), settings))
        return Stream(rows, self._run(rows, cancel))

    # ---- inside

    def _rows(self, prompts: list[list[int]], requests: list[Request]) -> list[Row]:
        rows = []
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            check_prompt(prompt, self.target)
            request.sampling.check_vocabulary(self.target.vocabulary)
            tokenizer = self.target.tokenizer
            if request.stop and tokenizer is None:
                raise InputError("stop strings need a tokenizer; load the model with one, or use eos_token_ids.")
            eos = self.target.eos if request.eos_token_ids is None else request.eos_token_ids
            for token in request.eos_token_ids or ():
                if not isinstance(token, int) or not 0 <= token < self.target.vocabulary:
                    raise InputError(
                        f"eos_token_ids has {token!r}, not a token id below {self.target.vocabulary}; "
                        "use ignore_eos=True for a text without an end."
                    )
            limit = min(request.max_new_tokens, self.target.context - len(prompt))
            detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
            tokens: list[int] = []
            stopper = Stopper(
                () if request.ignore_eos else eos,
                request.stop,
                limit,
                detokenizer,
                _criterion(request, prompt, tokens),
                special_stops(tokenizer, request.stop),
            )
            rows.append(Row(index, prompt, request, eos, stopper, limit, tokens))
        return rows

    def _run(self, rows: list[Row], cancel: Cancel | None) -> Iterator[Event]:
        """Decode all rows, at most `self.rows` at once; latecomers are admitted as others end."""
        self._claim()
        try:
            loop = Loop(self.target, self.drafter, self.rule, self.gamma, self.nodes)
            waiting = list(rows)
            while waiting or loop.rows.count:
                if cancel is not None and cancel():
                    break
                free = self.rows - loop.rows.count
                if waiting and free > 0:
                    loop.admit(waiting[:free])
                    del waiting[:free]
                yield from loop.step()
        finally:
            for row in rows:
                row.cancel()
            self._owner = None
            self._busy.release()

    def _claim(self) -> None:
        """A drafter remembers its rows, so a decoder does one batch at a time; other threads wait for their turn."""
        if self._owner == threading.get_ident():
            raise InputError(
                "This decoder is still streaming in this thread; finish or close that stream, or make a second one."
            )
        self._busy.acquire()
        self._owner = threading.get_ident()


def _translate(
    aliases: Mapping[str, Any], draft: Any, gamma: int, options: Mapping[str, Any]
) -> tuple[Any, int, Mapping[str, Any]]:
    """Transformers' names for the same things."""
    for name, value in aliases.items():
        if name in _ALIASES and value is None:  # transformers' default
            continue
        if name == "assistant_model":
            draft = value
        elif name == "num_assistant_tokens":
            gamma = value
        elif name == "prompt_lookup_num_tokens":
            draft, gamma = draft or "prompt-lookup", value
        elif name == "max_matching_ngram_size":
            options = {**options, "longest": value}
        else:
            raise UnknownNameError("argument", name, [*_NAMES, *_ALIASES])
    return draft, gamma, options


def _criterion(request: Request, prompt: list[int], tokens: list[int]) -> Callable[[], bool] | None:
    if not request.criteria:
        return None
    return lambda: any(criterion(prompt + tokens) for criterion in request.criteria)


def make_drafter(draft: Any, options: Mapping[str, Any], device: Any = None) -> Drafter:
    """A drafter from whatever people call one; a model that has to be loaded goes to `device`."""
    if isinstance(draft, Drafter):
        if options:
            raise InputError(f"options {sorted(options)} belong to a drafter given by name; this one is already made.")
        return draft
    if draft is None:
        draft = "none"
    if isinstance(draft, str) and draft in DRAFTERS:
        cls = DRAFTERS[draft]
        if options.get("model") is not None:
            options = {**options, "model": _load_draft(options["model"], device)}
        return cls(build_options(cls.Options, options, f"drafter '{draft}'"))  # type: ignore[call-arg]
    if isinstance(draft, str) and not is_model(draft):
        raise UnknownNameError("drafter or model", draft, [*DRAFTERS, *catalogue_names()])
    options = {**options, "model": _load_draft(draft, device)}
    return DraftModel(build_options(DraftModel.Options, options, "drafter 'draft-model'"))


def make_rule(rule: str | Rule, options: Mapping[str, Any]) -> Rule:
    """A rule from its name and its options."""
    if isinstance(rule, Rule):
        if options:
            raise InputError(f"rule_options {sorted(options)} belong to a rule given by name; this one is made.")
        return rule
    return RULES[rule](build_options(RULES[rule].Options, options, f"rule '{rule}'"))


def _load_draft(model: Any, device: Any) -> LanguageModel:
    return load(model, device=device) if isinstance(model, (str, os.PathLike)) else load(model)
