"""`SpeculativeDecoder`: the public interface."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, Union, overload

from torch import nn
from typing_extensions import Unpack

from paceline.common.errors import InputError, UnknownNameError, UnsupportedError, shown
from paceline.common.registry import build_options
from paceline.core.contracts import RULES, Drafter, Rule
from paceline.core.protocols import (
    Adaptive,
    ChoosesLength,
    Resolvable,
    chooses_length,
    speculates,
    takes_prediction,
    uses_all_nodes,
)
from paceline.core.sampling import Constraint
from paceline.core.trace import Trace
from paceline.drafters.resolve import make_drafter
from paceline.engine.beam_rows import BeamGroup
from paceline.engine.decoder_config import DEFAULT_DRAFT, KEYS, DecoderOptions, decoder_settings
from paceline.engine.drafter_calls import claimed
from paceline.engine.kept_rows import Parked, weights_stamp
from paceline.engine.loop import Loop
from paceline.engine.prompts import encode_all, encode_prediction
from paceline.engine.request import Array, Batch, Generation, OnePrompt, Piece, Request, Settings, build_requests
from paceline.engine.rows import Event, Row
from paceline.engine.scheduler import Party, Scheduler
from paceline.engine.stopping import Detokenizer, Stopper, special_stops
from paceline.models import load
from paceline.models.grammars.token_grammar import grammars_of
from paceline.models.language_model import LanguageModel
from paceline.models.reader import check_prompt
from paceline.models.runtime import parts, prepare, quantization_of, running, usual_nodes, with_strict
from paceline.models.slot_cache import SlotCache, caches_held_by
from paceline.models.tensor_parallel import check_alike, is_sharded, of_the_first

# ---- The arguments of a decoder: their types, transformers' names for them, counts, and the rule

Question: TypeAlias = Callable[[], bool]
Cancel: TypeAlias = Question | threading.Event
Target: TypeAlias = Union[str, "os.PathLike[str]", LanguageModel, nn.Module]
Draft: TypeAlias = Union[
    str, "os.PathLike[str]", Drafter, LanguageModel, nn.Module, "Mapping[str, Any]", "tuple[Any, Mapping[str, Any]]"
]

_ALIASES = ("assistant_model", "num_assistant_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size")


def is_chosen(draft: Any) -> bool:
    """Return whether the caller chose a drafter. If not, a prediction is the draft."""
    return draft is not None and not (isinstance(draft, str) and draft == DEFAULT_DRAFT)


def question_of(cancel: Any) -> Question | None:
    """Return a function that says whether to stop: a callable, or `is_set` of an event (`threading.Event`,
    `multiprocessing.Event`)."""
    question = getattr(cancel, "is_set", cancel)
    if question is not None and not callable(question):
        raise InputError(f"cancel must be a callable without arguments or a threading.Event, got {shown(cancel)}.")
    return question  # type: ignore[no-any-return]


def translate(
    aliases: Mapping[str, Any], draft: Any, gamma: int | str | None, options: Mapping[str, Any]
) -> tuple[Any, int | str | None, Mapping[str, Any]]:
    """Return draft, gamma and options, with transformers' names replaced by ours."""
    for name, value in aliases.items():
        if name in _ALIASES and value is None:  # transformers' default
            continue
        if name == "assistant_model":
            draft = value
        elif name == "num_assistant_tokens":
            gamma = value
        elif name == "prompt_lookup_num_tokens":
            draft, gamma = draft if is_chosen(draft) else "prompt-lookup", value
        elif name == "max_matching_ngram_size":
            options = {**options, "longest": value}
        else:
            raise UnknownNameError("argument", name, [*KEYS, *_ALIASES])
    return draft, gamma, options


def make_rule(rule: str | Rule, options: Mapping[str, Any]) -> Rule:
    """Return a rule from its name and its options."""
    if isinstance(rule, Rule):
        if options:
            raise InputError(f"rule_options {sorted(options)} belong to a rule given by name; this one is made.")
        return rule
    return RULES[rule](build_options(RULES[rule].Options, options, f"rule '{rule}'"))


def check_lossless(rule: Rule, allow_lossy: bool) -> None:
    """Refuse a rule that changes the text, unless the caller allows it."""
    if not rule.exact and not allow_lossy:
        raise InputError(
            f"Rule '{rule.name}' is lossy: the text does not follow the target's distribution; allow that with "
            "allow_lossy=True (--allow-lossy), or use rule 'match' or 'ratio'."
        )


# ---- The text while it is decoded


class Stream(Iterator[Piece]):
    """The pieces of a text while it is decoded. `close()` cancels, `traces` grow, `results` are those of `generate`."""

    def __init__(self, rows: list[Row], events: Iterator[Event], tokenizer: Any = None) -> None:
        self._rows = rows
        self._events = events
        self._tokenizer = tokenizer

    def __next__(self) -> Piece:
        event = next(self._events)
        stop = event.row.stopper.stop
        last = stop is not None and event.count == len(event.row.tokens)
        reason = stop.finish_reason if stop is not None and last else None
        return Piece(event.text, event.token, event.from_draft, event.row.index, reason)

    def close(self) -> None:
        """Stop now and keep the text so far."""
        close = getattr(self._events, "close", None)
        if close is not None:
            close()
        for row in self._rows:
            row.cancel()

    @property
    def traces(self) -> list[Trace]:
        return [row.trace for row in self._rows]

    @property
    def results(self) -> list[Generation]:
        """One result per prompt. This cancels the prompts that are not at their end."""
        self.close()
        return results_of(self._rows, self._tokenizer)

    def __repr__(self) -> str:
        count = len(self._rows)
        written = sum(len(row.tokens) for row in self._rows)
        return f"Stream({count} prompt{'s' * (count != 1)}, {written} token{'s' * (written != 1)} so far)"


def results_of(rows: list[Row], tokenizer: Any) -> list[Generation]:
    """Return the results of rows that ended, with the tokenizer that shows them in a notebook."""
    return [row.result().shown_by(tokenizer, row.drafter) for row in rows]


# ---- The parts of a decoder, from its options

_USUAL, _DEEPEST = 5, 16  # gamma if the caller gives none: of most drafters, and of those that choose the length


@dataclass(frozen=True)
class Plan:
    """The parts of a decoder: a target that is loaded, a drafter that was checked for it, the rule, and the limits."""

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    gamma: int
    nodes: int


def resolve(options: DecoderOptions) -> Plan:
    """Load the target, make the rule and the drafter, and refuse what does not fit together."""
    target = load(options.target, runner=options.runner, quantize=options.quantize)
    target = with_strict(target) if options.strict else target
    rule = make_rule(options.rule, options.rule_options or {})
    check_lossless(rule, options.allow_lossy)
    drafter = _drafter_for(target, rule, options)
    for lm in (target, getattr(drafter, "lm", None)):
        if isinstance(lm, LanguageModel):
            prepare(lm)
    gamma = _gamma_of(drafter, options.gamma)
    return Plan(target, drafter, rule, gamma, options.nodes or usual_nodes(target, uses_all_nodes(drafter), gamma))


def _drafter_for(target: LanguageModel, rule: Rule, options: DecoderOptions) -> Drafter:
    drafter = make_drafter(options.draft, options.options, target.device, parts(target)[0].runner)
    if options.gamma == "auto" and speculates(drafter) and not chooses_length(drafter):
        drafter = make_drafter(("auto", {"drafters": (drafter,)}))
    if is_sharded(target) and isinstance(drafter, Adaptive):
        raise UnsupportedError(
            f"Drafter '{drafter.name}' decides by measured times, which differ between the processes of a sharded "
            "target (tp_plan); name another drafter, such as 'suffix' or a smaller model, or draft=None."
        )
    drafter.check(target)
    return drafter.resolve_for(target, rule) if isinstance(drafter, Resolvable) else drafter


def _gamma_of(drafter: Drafter, gamma: int | str | None) -> int:
    if isinstance(gamma, int):
        return gamma
    return (drafter.depth or _DEEPEST) if isinstance(drafter, ChoosesLength) else _USUAL


# ---- `SpeculativeDecoder`


class SpeculativeDecoder:
    """Decodes with a target and a drafter. The text is the one that the target alone would write.

    target: a LanguageModel, a transformers model, or anything `paceline.load` takes. draft: the name of a drafter, a
    Drafter, or a model (object, catalogue name, hub id, folder, .gguf). The default "auto" measures this machine and
    drafts what is fastest; None is plain decoding. options: of the drafter; rule_options: of the rule. gamma: tokens
    drafted in a row (default 5), or "auto": as many as pay by measured costs and acceptance; nodes: the most nodes of a
    tree; rows: prompts decoded at once; allow_lossy: permits rules that change the text. runner: how forward passes
    run, "auto" (Paceline's kernels if they can), "eager" (transformers), "kernels" (or an error) or, on CUDA,
    "cuda_graph" (docs/gpu.md). A draft model that is loaded by name uses the same runner. quantize: the target in
    "int8", "int4" or "bfloat16"; the text is then that of the quantized target.
    strict: a token has the same bits with and without a draft, also in bfloat16 on a GPU and for architectures without
    kernels. All passes then have one shape, which costs time.
    first_target: the target decides the first token of every text in a round without a draft; the text is the same.
    Transformers' names (assistant_model, num_assistant_tokens, prompt_lookup_num_tokens, max_matching_ngram_size) work.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = DEFAULT_DRAFT,
        *,
        gamma: int | str | None = None,
        rule: str | Rule = "match",
        options: Mapping[str, Any] | None = None,
        rule_options: Mapping[str, Any] | None = None,
        nodes: int | None = None,
        rows: int = 16,
        allow_lossy: bool = False,
        runner: str | None = None,
        quantize: str | None = None,
        strict: bool = False,
        first_target: bool = False,
        **aliases: Any,
    ) -> None:
        draft, gamma, options = translate(aliases, draft, gamma, options or {})
        plan = resolve(
            DecoderOptions(
                target,
                draft,
                gamma,
                nodes,
                rule,
                rule_options,
                options,
                rows,
                allow_lossy,
                strict,
                runner,
                quantize,
                first_target,
            )
        )
        self.target, self.drafter, self.rule = plan.target, plan.drafter, plan.rule
        self.gamma, self.nodes, self.rows, self.first_target = plan.gamma, plan.nodes, rows, first_target
        self._chosen = is_chosen(draft)  # if not, a prediction is the draft
        self._sharded = is_sharded(plan.target)
        self._loop: Loop | None = None  # of the last batch, if its CUDA graphs can be used again
        self._running: Loop | None = None  # of the batch that is decoded now
        # whether the KV cache of the last single prompt is kept for the next one, which may continue it
        self.keeps_prefix = True
        self._parked: Parked | None = None
        self._busy = threading.Lock()
        self._owner: int | None = None

    @classmethod
    def from_config(
        cls, source: str | os.PathLike[str] | Mapping[str, Any], target: Any = None, **overrides: Any
    ) -> SpeculativeDecoder:
        """Make a decoder from a TOML file (`paceline tune` writes one) or a mapping. Its arguments are at the top or
        in [decoder]. `target` and the overrides replace its values."""
        return cls(**decoder_settings(source, target, overrides))

    @property
    def speculates(self) -> bool:
        """Return whether the decoder drafts."""
        return speculates(self.drafter)

    @property
    def keeps_rounds(self) -> bool:
        """Return whether the decoder keeps CUDA graphs for the next batch."""
        return self._loop is not None

    def kv_caches(self) -> list[SlotCache]:
        """Return the KV caches that the decoder holds now: those of the target and of the drafter."""
        return caches_held_by(self)

    def forget(self) -> bool:
        """Discard the kept KV cache, and what the drafter has learned from texts. Return False if the drafter cannot be
        made again."""
        self._parked = None
        fresh = self.drafter.reset_copy()
        if fresh is not None and fresh is not self.drafter:
            fresh.check(self.target)
            if self._loop is not None and not self._loop.swap_drafter(fresh):
                self._loop = None
            self.drafter = fresh
        return fresh is not None

    def describe(self) -> str:
        """Return one line: the target, the drafter and the rule."""
        lm = self.target
        kind = quantization_of(lm)
        exact = "" if kind is None else f"; exact with respect to the {kind} model"
        where = f"{lm.name} ({lm.numbers}, {lm.device}; {running(lm).describe()}{exact})"
        if not self.speculates:
            return f"{where}, plain decoding"
        lossy = "" if self.rule.exact else " (lossy)"
        limit = f"γ≤{self.gamma}" if chooses_length(self.drafter) else f"γ={self.gamma}"
        return f"{where} with {self.drafter.describe()}, {limit}, rule {self.rule.name}{lossy}"

    def __repr__(self) -> str:
        return f"SpeculativeDecoder({self.describe()})"

    # ---- generate and stream

    @overload
    def generate(
        self, prompt: OnePrompt, *, cancel: Cancel | None = None, **settings: Unpack[Settings]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Batch, *, cancel: Cancel | None = None, **settings: Unpack[Settings]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self, prompt: Array, *, cancel: Cancel | None = None, **settings: Unpack[Settings]
    ) -> Generation | list[Generation]: ...

    def generate(self, prompt: Any, *, cancel: Cancel | None = None, **settings: Any) -> Generation | list[Generation]:
        """Continue prompts. `prompt` is a string, a list of token ids, or a conversation; a list of those is a batch,
        and an empty list an empty batch. cancel: a callable or an event; the text stops before the next round when it
        is true.

        Settings: max_new_tokens, temperature, top_k, top_p, min_p, typical_p, noise, dynamic_temperature,
        repetition_penalty, presence_penalty, frequency_penalty, logit_bias, banned_tokens, min_new_tokens, processors,
        seed, do_sample, dynamic_exponent, stop, eos_token_ids, ignore_eos, criteria, logprobs, num_beams,
        length_penalty, length_offset, beam_top_k, early_stopping, num_return_sequences, prediction (the text you
        expect), max_draft, json_schema, json_object, regex, grammar, choice (docs/grammars.md), constraint; a list
        holds one value per prompt. Return a `Generation`, or a list of them for a batch. A beam search gives its best
        text, with the others in `beams`.
        """
        prompts, single = encode_all(prompt, self.target)
        rows = self._rows(prompts, self._requests(len(prompts), settings))
        for _ in self._run(rows, question_of(cancel)):
            pass
        results = results_of(rows, self.target.tokenizer)
        return results[0] if single else results

    def stream(
        self, prompt: OnePrompt | Batch | Array, *, cancel: Cancel | None = None, **settings: Unpack[Settings]
    ) -> Stream:
        """Continue prompts as `generate`, with one `Piece` per committed token; of a beam search when it has ended."""
        prompts, _ = encode_all(prompt, self.target)
        rows = self._rows(prompts, self._requests(len(prompts), settings))
        return Stream(rows, self._run(rows, question_of(cancel)), self.target.tokenizer)

    # ---- inside

    def new_loop(self) -> Loop:
        """Return a loop with the target, the drafter and the rule. The caller must own the drafter (`claimed`)."""
        return self._loop_with(self.drafter, self.rule)

    def _loop_with(self, drafter: Drafter, rule: Rule) -> Loop:
        return Loop(self.target, drafter, rule, self.gamma, self.nodes, self.first_target)

    def _rows(self, prompts: list[list[int]], requests: list[Request]) -> list[Row]:
        if self._sharded:
            check_alike(prompts, "prompts")
        rows = []
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            check_request(self.target, prompt, request)
            rows.append(new_row(self.target, index, prompt, request, self._rule_for(request)))
        drafter = self._drafter_for(rows)  # refuses a prediction that cannot be used
        for row in rows:
            row.drafter = drafter.name
        return rows

    def _drafter_for(self, rows: Iterable[Row]) -> Drafter:
        """Return the drafter; or `prediction`, if the caller chose no drafter and gave predictions."""
        if all(row.prediction is None for row in rows) or (self._chosen and takes_prediction(self.drafter)):
            return self.drafter
        if self._chosen:
            raise InputError(
                f"A prediction was given, and drafter '{self.drafter.name}' cannot use one; use draft='prediction'."
            )
        return make_drafter("prediction", {})

    def _rule_for(self, request: Request) -> Rule:
        """Return the rule of a request: `beam` for several beams, and never for one."""
        searches = self.rule.exact == "beam"
        if searches == (request.num_beams > 1):
            return self.rule
        return make_rule("match" if searches else "beam", {})

    def _requests(self, count: int, settings: Mapping[str, Any]) -> list[Request]:
        if settings.get("num_beams") is None and self.rule.num_beams > 1:
            settings = {**settings, "num_beams": self.rule.num_beams}
        requests = with_constraints(build_requests(count, settings), self.target)
        if not self._sharded:
            return requests
        seeds = of_the_first([request.sampling.seed for request in requests])
        return [
            replace(request, sampling=replace(request.sampling, seed=seed))
            for request, seed in zip(requests, seeds, strict=True)
        ]

    def _run(self, rows: list[Row], cancel: Question | None) -> Iterator[Event]:
        """Decode all rows: first the single sequences, then the beam searches, which another rule verifies."""
        if self._owner == threading.get_ident():
            raise InputError(
                "This decoder is still streaming in this thread; finish or close that stream, or make a second one."
            )
        with self._busy:  # a drafter holds the state of its rows: other threads wait
            try:
                self._owner = threading.get_ident()
                for kind in (
                    [[row] for row in rows if row.group is None],
                    [row.group.rows for row in rows if row.group is not None],
                ):
                    if kind:
                        yield from self._decode(kind, cancel)
            finally:
                self._owner = None
                for row in rows:
                    row.cancel()

    def _decode(self, waiting: list[list[Row]], cancel: Question | None) -> Iterator[Event]:
        """Decode rows of one rule. They own the drafter until they end, or until the iterator is closed."""
        rule = self._rule_for(waiting[0][0].request)
        drafter = self._drafter_for(row for party in waiting for row in party)
        with claimed(drafter):
            yield from self._decode_with(drafter, rule, waiting, cancel)

    def _decode_with(
        self, drafter: Drafter, rule: Rule, waiting: list[list[Row]], cancel: Question | None
    ) -> Iterator[Event]:
        """Decode at most `self.rows` rows at once, but at least one prompt; admit others as rows end."""
        loop, self._loop = self._loop, None
        if loop is None or (loop.drafter, loop.rule) != (drafter, rule) or not loop.owns_drafter:
            loop = self._loop_with(drafter, rule)
        else:
            loop.begin_batch()
        self._running = loop
        alone = len(waiting) == 1 and len(waiting[0]) == 1 and self.keeps_prefix and not loop.captures
        scheduler = Scheduler(loop, self.rows, total=int(alone))
        kept, stamp = scheduler.kept, None
        if kept is not None and kept.is_exact:
            stamp, parked = weights_stamp(self.target), self._parked
            self._parked = None
            if parked is not None:
                kept.resume(parked, stamp)
        for rows in waiting:
            scheduler.submit(Party(rows))
        try:
            while scheduler.busy:
                if cancel is not None and cancel():
                    break
                yield from scheduler.step()
                if loop.rows.failed:
                    raise loop.rows.failed[0].error or AssertionError
        finally:  # also if the caller leaves a stream
            self._running = None
            if loop.reusable:
                self._loop = loop
            elif kept is not None and stamp is not None and not loop.rows.count:
                self._parked = kept.park(stamp)


def check_request(lm: LanguageModel, prompt: list[int], request: Request) -> None:
    """Refuse a prompt that this model cannot read, and settings that it does not support."""
    check_prompt(prompt, lm)
    request.sampling.check_vocabulary(lm.vocabulary)
    if request.stop and lm.tokenizer is None:
        raise InputError("stop strings need a tokenizer; load the model with one, or use eos_token_ids.")
    for token in request.eos_token_ids or ():
        if type(token) is not int or not 0 <= token < lm.vocabulary:
            raise InputError(
                f"eos_token_ids has {shown(token)}, not a token id below {lm.vocabulary}; "
                "use ignore_eos=True for a text without an end."
            )


def with_constraints(requests: Sequence[Request], lm: LanguageModel) -> list[Request]:
    """Return the requests with `constraint` in the place of a grammar. Requests with the same grammar share it."""
    known: dict[tuple[str, int], Constraint] = {}
    made = []
    for request in requests:
        name, value = request.grammar_setting() or ("constraint", None)
        if name != "constraint":
            constraint = known.get((name, id(value))) or grammars_of(lm).compile(name, value)
            known[name, id(value)] = constraint
            sampling = replace(request.sampling, constraint=constraint)
            request = replace(request, sampling=sampling, **{name: getattr(Request, name)})
        made.append(request)
    return made


def new_row(lm: LanguageModel, index: int, prompt: list[int], request: Request, rule: Rule) -> Row:
    """Return the row of a prompt that was checked."""
    (request,) = with_constraints([request], lm)
    eos = lm.eos if request.eos_token_ids is None else request.eos_token_ids
    limit = min(request.max_new_tokens, lm.context - len(prompt))
    tokens: list[int] = []
    make = partial(_stopper, request, prompt, eos, limit, lm.tokenizer)
    expected = encode_prediction(request.prediction, lm)
    row = Row(index, prompt, request, eos, make(tokens), limit, tokens, expected, rule=rule.name, lossy=not rule.exact)
    if request.sampling.constraint is not None:
        row.cursor = request.sampling.constraint.start(() if request.ignore_eos else eos)
    row.group = BeamGroup(row, make) if request.num_beams > 1 else None
    return row


def _stopper(
    request: Request, prompt: list[int], eos: tuple[int, ...], limit: int, tokenizer: Any, tokens: list[int]
) -> Stopper:
    """Return the stops of one text, whose tokens will be in `tokens`."""
    return Stopper(
        () if request.ignore_eos else eos,
        request.stop,
        limit,
        None if tokenizer is None else Detokenizer(tokenizer, prompt),
        _criterion(request, prompt, tokens),
        special_stops(tokenizer, request.stop),
    )


def _criterion(request: Request, prompt: list[int], tokens: list[int]) -> Callable[[], bool] | None:
    if not request.criteria:
        return None
    return lambda: any(criterion(prompt + tokens) for criterion in request.criteria)
