"""The state of `paceline chat` (settings, modes, conversation, last results) and its slash commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from paceline.cli.result_lines import beginning, dump, result_as_dict, settings_of, token_text
from paceline.cli.terminal import ACCEPTED, OWN, REJECTED, Terminal
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


# ---- commands: each a small function of the state, found by its name

Run = Callable[[ChatState, list[str], Terminal], None]


@dataclass(frozen=True)
class Command:
    name: str
    usage: str
    help: str
    run: Run
    values: tuple[str, ...] = ()  # what can follow, for completion


class Leave(Exception):  # noqa: N818  not an error: the user leaves
    """/quit"""


class Again(Exception):  # noqa: N818  not an error: answer the last message again
    """/again"""


def command(name: str, usage: str, help: str, values: tuple[str, ...] = ()) -> Callable[[Run], Command]:
    """Make a function a command. `COMMANDS` lists it."""
    return lambda run: Command(name, usage, help, run, values)


def execute(line: str, state: ChatState, terminal: Terminal) -> None:
    """One line that begins with a slash."""
    try:
        name, *words = shlex.split(line[1:])
    except ValueError as error:
        raise InputError(f"'{line}' is no command: {error}; see /help.") from None
    name = name.lower().replace("_", "-")
    if name in COMMANDS:
        COMMANDS[name].run(state, words, terminal)
        return
    setting = SHORT.get(name, name.replace("-", "_"))
    if setting in NUMBERS:
        if len(words) != 1:
            raise InputError(f"/{name} needs one value, such as /{name} {_example(setting)}.")
        state.set_number(setting, words[0])
        terminal.write(f"{_key(setting)} = {_shown(state, setting)}\n")
    elif name in MODES or name in SWITCHES:
        _toggle(state, name, words, terminal)
    else:
        known = [*COMMANDS, *MODES, *SWITCHES, *map(_key, NUMBERS), *SHORT]
        raise UnknownNameError("command", name, known)


def words_to_complete() -> dict[str, tuple[str, ...]]:
    """Every command and the words that can follow it."""
    found = {f"/{name}": entry.values for name, entry in COMMANDS.items()}
    found.update({f"/{name}": ("on", "off") for name in (*MODES, *SWITCHES)})
    found.update({f"/{_key(name)}": () for name in NUMBERS})
    return found


def _toggle(state: ChatState, name: str, words: list[str], terminal: Terminal) -> None:
    table = state.modes if name in MODES else state.switches
    if words and words[0] not in ("on", "off"):
        raise InputError(f"/{name} takes on or off, or nothing to toggle; got '{words[0]}'.")
    table[name] = words[0] == "on" if words else not table[name]
    if name in MODES and not any(state.modes.values()):
        table[name] = True
        raise InputError(f"One mode must be on: switch another of {', '.join(MODES)} on first.")
    terminal.write(f"{name} is {'on' if table[name] else 'off'}\n")


# ---- help and values


@command("help", "/help", "this list, with every current value")
def _help(state: ChatState, words: list[str], terminal: Terminal) -> None:
    lines = ["what runs for each message (a name switches it on or off):"]
    lines += [f"  /{name:18} {_on(state.modes[name]):28} {text}" for name, text in MODES.items()]
    lines.append("switches:")
    lines += [f"  /{name:18} {_on(state.switches[name]):28} {text}" for name, text in SWITCHES.items()]
    lines.append("settings (/name value; off restores the default):")
    lines += [f"  /{_key(name):18} {_shown(state, name)}" for name in NUMBERS]
    lines.append("commands:")
    lines += [f"  {entry.usage:40} {entry.help}" for entry in COMMANDS.values()]
    terminal.write("\n".join(lines) + "\n")


def _on(value: bool) -> str:
    return "on" if value else "off"


def _key(name: str) -> str:
    return name.replace("_", "-")


def _shown(state: ChatState, name: str) -> str:
    value = getattr(state.options, name)
    return "default" if value is None else str(value)


def _example(name: str) -> str:
    return "64" if NUMBERS[name] is int else "0.8"


@command("settings", "/settings", "models, drafter, rule, and every setting that is not the default")
def _settings(state: ChatState, words: list[str], terminal: Terminal) -> None:
    options = state.options
    named = {f"draft {options.draft}": options.options, f"rule {options.rule}": options.rule_options}
    parts = [" ".join([name, *(f"{key}={value}" for key, value in given.items())]) for name, given in named.items()]
    terminal.write(", ".join(parts) + "\n")
    numbers = {name: _shown(state, name) for name in NUMBERS}
    terminal.write(", ".join(f"{_key(name)} {value}" for name, value in numbers.items() if value != "default") + "\n")


@command("cache", "/cache", "whether the KV cache is used")
def _cache(state: ChatState, words: list[str], terminal: Terminal) -> None:
    terminal.write("the KV cache is always on: to discard a rejected draft costs nothing\n")


# ---- sampler, drafter and rule


@command("sampler", "/sampler NAME", f"{', '.join(SAMPLERS)}", tuple(SAMPLERS))
def _sampler(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if len(words) != 1:
        raise InputError(f"/sampler needs one of {', '.join(SAMPLERS)}.")
    state.sampler(words[0])
    _settings.run(state, [], terminal)


@command("draft", "/draft NAME [option=value …]", "a drafter, or a smaller model")
def _draft(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if not words:
        raise InputError("/draft needs the name of a drafter or a model, such as /draft suffix.")
    state.draft(words[0], _options("drafter", words[1:]))
    terminal.write(_begun(state) + "\n")


@command("rule", "/rule NAME [option=value …]", "the rule that verifies a draft")
def _rule(state: ChatState, words: list[str], terminal: Terminal) -> None:
    from paceline.core.contracts import RULES

    if not words:
        raise InputError(f"/rule needs one of {', '.join(RULES)}.")
    state.rule(words[0], _options("rule", words[1:]))
    terminal.write(_begun(state) + "\n")


def _options(owner: str, words: list[str]) -> dict[str, str]:
    bad = next((word for word in words if "=" not in word), None)
    if bad is not None:
        raise InputError(f"Options of a {owner} are name=value, got '{bad}'.")
    given = (word.split("=", 1) for word in words)
    return {name.replace("-", "_"): value for name, value in given}


def _begun(state: ChatState) -> str:
    return beginning(state.decoder("speculative"), read_settings(state.options))


@command("system", "/system TEXT", "the system message of the conversation; without TEXT none")
def _system(state: ChatState, words: list[str], terminal: Terminal) -> None:
    state.change(system=" ".join(words) or None)
    state.forget()
    terminal.write("a new conversation begins\n")


@command("store", "/store reset|save FILE|load FILE", "reset, save or load the n-gram store", ("reset", "save", "load"))
def _store(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if words == ["reset"]:
        state.learn_from(None)
    elif len(words) == 2 and words[0] == "save":
        drafter: Any = state.decoder("ngram").drafter
        drafter.save(Path(words[1]))
    elif len(words) == 2 and words[0] == "load":
        state.learn_from(words[1])
    else:
        raise InputError("/store needs reset, save FILE or load FILE.")
    terminal.write(f"n-gram store: {' '.join(words)}\n")


# ---- the conversation


@command(
    "again",
    "/again",
    "answer the last message again with the current settings",
)
def _again(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if state.asked is None:
        raise InputError("There is no message yet to answer again.")
    raise Again


@command("history", "/history", "the conversation so far")
def _history(state: ChatState, words: list[str], terminal: Terminal) -> None:
    for message in state.messages:
        terminal.write(f"{message['role']}: {message['content']}\n")


@command("clear", "/clear", "remove the conversation")
def _clear(state: ChatState, words: list[str], terminal: Terminal) -> None:
    state.forget()
    terminal.write("a new conversation begins\n")


@command("save", "/save FILE [--force]", "conversation, settings and the last answers as JSON")
def _save(state: ChatState, words: list[str], terminal: Terminal) -> None:
    words, force = _without_force(words)
    if len(words) != 1:
        raise InputError("/save needs the name of a file, such as /save chat.json.")
    tokenizer = state.target.tokenizer
    answers = [{"mode": each.mode, **result_as_dict(each.result, tokenizer)} for each in state.answers]
    settings = settings_of(state.decoder("speculative"), {name: _shown(state, name) for name in NUMBERS})
    content = {"messages": state.messages, "asked": state.asked, "answers": answers, "settings": settings}
    _write("/save", words[0], dump(content) + "\n", force)
    terminal.write(f"saved to {words[0]}\n")


@command("trace", "/trace [FILE [--force]]", "the rounds of the last answers, here or in a file as JSON lines")
def _trace(state: ChatState, words: list[str], terminal: Terminal) -> None:
    words, force = _without_force(words)
    if not state.answers:
        raise InputError("There is no answer yet to trace.")
    if words:
        rounds = [
            {
                "mode": answer.mode,
                "drafted": r.drafted,
                "parents": r.parents,
                "path": r.path,
                "own": r.own,
                "bonus": r.bonus,
            }
            for answer in state.answers
            for r in answer.result.trace.rounds
        ]
        _write("/trace", words[0], "".join(json.dumps(entry) + "\n" for entry in rounds), force)
        terminal.write(f"saved {len(rounds)} rounds to {words[0]}\n")
        return
    for answer in state.answers:
        terminal.write(f"[{answer.mode}]\n")
        show_rounds(answer.result, state.target.tokenizer, terminal)


def show_rounds(result: Any, tokenizer: Any, terminal: Terminal) -> None:
    """One line per round: accepted tokens, the token of the target, rejected tokens."""
    for number, entry in enumerate(result.trace.rounds, 1):
        terminal.write(f"{number:4} ")
        for node in entry.path:
            terminal.write(_quoted(entry.drafted[node], tokenizer), ACCEPTED)
        if entry.own is not None:
            terminal.write(_quoted(entry.own, tokenizer), OWN)
        for token in entry.rejected[:12]:
            terminal.write(_quoted(token, tokenizer), REJECTED)
        terminal.write(" …\n" if len(entry.rejected) > 12 else "\n")


def _quoted(token: int, tokenizer: Any) -> str:
    return f" {token}" if tokenizer is None else " " + repr(token_text(token, tokenizer))


def _without_force(words: list[str]) -> tuple[list[str], bool]:
    """The words without --force, and whether --force was among them."""
    return [word for word in words if word != "--force"], "--force" in words


def _write(command: str, name: str, content: str, force: bool) -> None:
    try:
        with Path(name).open("w" if force else "x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        raise InputError(
            f"'{name}' exists; write {command} {shlex.quote(name)} --force to replace it, or name another file."
        ) from None
    except OSError as error:
        raise InputError(f"'{name}' cannot be written: {error.strerror or error}.") from error


@command("quit", "/quit", "leave the chat; Ctrl-D does the same")
def _quit(state: ChatState, words: list[str], terminal: Terminal) -> None:
    raise Leave


# in the order of /help
COMMANDS = {
    entry.name: entry
    for entry in (
        _help,
        _settings,
        _cache,
        _sampler,
        _draft,
        _rule,
        _system,
        _store,
        _again,
        _history,
        _clear,
        _save,
        _trace,
        _quit,
    )
}
