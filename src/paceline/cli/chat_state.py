"""The state of a chat: settings, modes, conversation, and the last results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from paceline.cli.command_options import ChatOptions
from paceline.cli.decoder_session import (
    check_settings,
    make_decoder,
    open_drafter,
    open_rule,
    plain_decoder,
    read_settings,
)
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.options import from_text

if TYPE_CHECKING:
    from paceline.core.contracts import Drafter
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation
    from paceline.models import LanguageModel

# what can run for a message, in this order; the others are compared with the first
MODES = {
    "target": "the target alone",
    "speculative": "the target with the drafter of /draft",
    "ngram": "the target with an n-gram store",
    "drafter": "the draft model alone, if the drafter has one",
}
SWITCHES = {
    "chat": "apply the chat template and keep the conversation",
    "drafts": "show rejected drafts",
    "debug": "show tracebacks and the rounds of every answer",
}
NUMBERS: dict[str, type] = {
    "max_new_tokens": int, "gamma": int, "nodes": int, "temperature": float, "top_k": int, "top_p": float,
    "min_p": float, "typical_p": float, "noise": float, "dynamic_temperature": float, "repetition_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "seed": int,
}  # fmt: skip
SHORT = {"length": "max_new_tokens", "temp": "temperature", "topk": "top_k", "topp": "top_p"}
# samplers with a name; a sampler switches off the controls that it does not use
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "multinomial": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "nucleus": {"temperature": 1.0, "top_p": 0.9},
    "top-k-nucleus": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top-k-noise": {"temperature": 1.0, "top_k": 20, "noise": 0.3},
    "dynamic": {"temperature": 0.8, "dynamic_temperature": 0.4},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "typical": {"temperature": 1.0, "typical_p": 0.9},
}
_SAMPLER_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "noise", "dynamic_temperature")


@dataclass
class Answer:
    """The answer of one mode to one message."""

    mode: str
    result: Generation


@dataclass
class ChatState:
    options: ChatOptions
    target: LanguageModel
    modes: dict[str, bool] = field(default_factory=lambda: {name: name == "speculative" for name in MODES})
    switches: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(SWITCHES, False))
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # to the last message
    asked: str | None = None  # the last message
    drafters: dict[str, Drafter] = field(default_factory=dict)  # by mode; they keep what they have learned
    decoders: dict[str, SpeculativeDecoder] = field(default_factory=dict)  # made again after every change

    # ---- settings

    def change(self, drafter: Drafter | None = None, **values: Any) -> None:
        """Set options, or refuse all of them if the next message would be refused."""
        from paceline.core.protocols import takes_prediction

        options = replace(self.options, **values)
        drafter = drafter or self.drafter("speculative")
        settings, rule = read_settings(options), open_rule(options)
        check_settings(settings, rule)
        if "prediction" in settings and not takes_prediction(drafter):
            raise InputError(
                f"--prediction was given, and drafter '{drafter.name}' cannot use one; leave one of them out."
            )
        decoder = make_decoder(options, self.target, drafter, rule)
        self.options = options
        self.drafters["speculative"] = drafter
        self.decoders = {"speculative": decoder}

    def set_number(self, name: str, text: str) -> None:
        """Set one of NUMBERS. "off" or "default" restores the default of the library."""
        optional = name not in ("gamma", "max_new_tokens")
        if text.lower() in ("off", "none", "default", "new") and optional:
            self.change(**{name: None})
            return
        value = from_text(name, text, int | Literal["auto"] if name == "gamma" else NUMBERS[name])
        if name in ("gamma", "nodes", "max_new_tokens") and value != "auto" and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
        self.change(**{name: value})

    def sampler(self, name: str) -> None:
        if name not in SAMPLERS:
            raise UnknownNameError("sampler", name, SAMPLERS)
        self.change(**{field: SAMPLERS[name].get(field) for field in _SAMPLER_FIELDS})

    def draft(self, name: str, options: dict[str, str]) -> None:
        values: dict[str, Any] = {"draft": name, "options": options}
        self.change(open_drafter(replace(self.options, **values)), **values)

    def rule(self, name: str, options: dict[str, str]) -> None:
        self.change(rule=name, rule_options=options)

    def learn_from(self, store: str | None) -> None:
        """Use the n-gram store of a file, or an empty one."""
        self.drafters["ngram"] = self._ngram_drafter(store)
        self.decoders.pop("ngram", None)

    def _ngram_drafter(self, store: str | None) -> Drafter:
        values = {"persistent": True, **({} if store is None else {"store": store})}
        return open_drafter(replace(self.options, draft="ngram", options=values))

    # ---- what runs

    def drafter(self, mode: str) -> Drafter:
        """The drafter of a mode. It is made once, so a setting neither removes what it has learned nor loads its model
        again."""
        if mode not in self.drafters:
            is_ngram = mode != "speculative"
            self.drafters[mode] = self._ngram_drafter(None) if is_ngram else open_drafter(self.options)
        return self.drafters[mode]

    def decoder(self, mode: str) -> SpeculativeDecoder:
        """The decoder of a mode with the current settings."""
        if mode not in self.decoders:
            self.decoders[mode] = self._make(mode)
        return self.decoders[mode]

    def _make(self, mode: str) -> SpeculativeDecoder:
        if mode in ("speculative", "ngram"):
            return make_decoder(self.options, self.target, self.drafter(mode), open_rule(self.options))
        rule = self.decoder("speculative").rule
        if mode == "target":
            return plain_decoder(self.target, rule)
        lm = getattr(self.drafter("speculative"), "lm", None)
        if lm is None:
            name = self.options.draft
            raise InputError(f"The drafter '{name}' has no model of its own to run alone; use /draft with a model.")
        return plain_decoder(lm, rule)

    def unlearn(self) -> list[str]:
        """Make drafters discard what they learned, because a drafter that has seen an answer copies it. Returns the
        modes whose drafter cannot do that."""
        kept = []
        for mode in [mode for mode, wanted in self.modes.items() if wanted]:
            decoder = self.decoder(mode)
            before = decoder.drafter
            if not decoder.forget():
                kept.append(mode)
            elif self.drafters.get(mode) is before:
                self.drafters[mode] = decoder.drafter
        return kept

    def take_back(self) -> None:
        """Remove the last message and its answer from the conversation."""
        if self.messages and self.answers:
            del self.messages[-2:]

    def forget(self) -> None:
        self.messages, self.answers, self.asked = [], [], None
