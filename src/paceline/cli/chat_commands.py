"""The state of `paceline chat` (settings, modes, conversation, last results) and its slash commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.cli import decoder_session as session
from paceline.cli.command_options import ChatOptions
from paceline.cli.result_lines import beginning, dump, result_as_dict, settings_of, token_text
from paceline.cli.terminal import ACCEPTED, OWN, REJECTED, Terminal
from paceline.common.errors import InputError, UnknownNameError
from paceline.common.options import from_text
from paceline.common.text_formats import writing

if TYPE_CHECKING:
    from paceline.core.contracts import Drafter
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation
    from paceline.models import LanguageModel

# the modes that can answer a message, in this order; answers are compared with the first answer
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
class ChatState:
    options: ChatOptions
    target: LanguageModel
    modes: dict[str, bool] = field(default_factory=lambda: {name: name == "speculative" for name in MODES})
    switches: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(SWITCHES, False))
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: dict[str, Generation] = field(default_factory=dict)  # to the last message, by mode
    asked: str | None = None  # the last message
    drafters: dict[str, Drafter] = field(default_factory=dict)  # by mode; they keep what they have learned
    decoders: dict[str, SpeculativeDecoder] = field(default_factory=dict)  # made again after every change

    # ---- settings

    def change(self, drafter: Drafter | None = None, **values: Any) -> None:
        """Set options, or refuse all of them if the next message would be refused."""
        from paceline.core.protocols import takes_prediction

        options = replace(self.options, **values)
        drafter = drafter or self.drafter("speculative")
        settings, rule = session.read_settings(options), session.open_rule(options)
        session.check_settings(settings, rule)
        if "prediction" in settings and not takes_prediction(drafter):
            raise InputError(
                f"--prediction was given, and drafter '{drafter.name}' cannot use one; leave one of them out."
            )
        decoder = session.make_decoder(options, self.target, drafter, rule)
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

    def learn_from(self, **store: str) -> Drafter:
        """Use the n-gram store of a file, or an empty one. Return its drafter."""
        options = replace(self.options, draft="ngram", options={"persistent": True, **store})
        self.drafters["ngram"] = session.open_drafter(options)
        self.decoders.pop("ngram", None)
        return self.drafters["ngram"]

    # ---- what runs

    def drafter(self, mode: str) -> Drafter:
        """The drafter of a mode. It is made once, so a setting neither removes what it has learned nor loads its model
        again."""
        if mode not in self.drafters:
            self.drafters[mode] = session.open_drafter(self.options) if mode == "speculative" else self.learn_from()
        return self.drafters[mode]

    def decoder(self, mode: str) -> SpeculativeDecoder:
        """Return the decoder of a mode with the current settings."""
        if mode not in self.decoders:
            self.decoders[mode] = self._make(mode)
        return self.decoders[mode]

    def _make(self, mode: str) -> SpeculativeDecoder:
        if mode in ("speculative", "ngram"):
            rule = session.open_rule(self.options)
            return session.make_decoder(self.options, self.target, self.drafter(mode), rule)
        lm = self.target if mode == "target" else getattr(self.drafter("speculative"), "lm", None)
        if lm is None:
            name = self.options.draft
            raise InputError(f"The drafter '{name}' has no model of its own to run alone; use /draft with a model.")
        return session.plain_decoder(lm, self.decoder("speculative").rule)

    def unlearn(self) -> list[str]:
        """Make drafters discard what they learned, because a drafter that has seen an answer copies it. Return the
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

    def forget(self) -> None:
        self.messages, self.answers, self.asked = [], {}, None


# ---- commands: each a small function of the state, found by its name


class Leave(Exception):  # noqa: N818  not an error: the user leaves
    """/quit"""


class Again(Exception):  # noqa: N818  not an error: answer the last message again
    """/again"""


def execute(line: str, state: ChatState, terminal: Terminal) -> None:
    """Run a line that begins with a slash."""
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
            example = 64 if NUMBERS[setting] is int else 0.8
            raise InputError(f"/{name} needs one value, such as /{name} {example}.")
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


def _settings(state: ChatState, words: list[str], terminal: Terminal) -> None:
    options = state.options
    named = {f"draft {options.draft}": options.options, f"rule {options.rule}": options.rule_options}
    parts = [" ".join([name, *(f"{key}={value}" for key, value in given.items())]) for name, given in named.items()]
    terminal.write(", ".join(parts) + "\n")
    numbers = {name: _shown(state, name) for name in NUMBERS}
    terminal.write(", ".join(f"{_key(name)} {value}" for name, value in numbers.items() if value != "default") + "\n")


def _cache(state: ChatState, words: list[str], terminal: Terminal) -> None:
    terminal.write("the KV cache is always on: it costs nothing to discard a rejected draft\n")


# ---- sampler, drafter and rule


def _sampler(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if len(words) != 1:
        raise InputError(f"/sampler needs one of {', '.join(SAMPLERS)}.")
    if words[0] not in SAMPLERS:
        raise UnknownNameError("sampler", words[0], SAMPLERS)
    state.change(**{field: SAMPLERS[words[0]].get(field) for field in _SAMPLER_FIELDS})
    _settings(state, [], terminal)


def _draft(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if not words:
        raise InputError("/draft needs the name of a drafter or a model, such as /draft suffix.")
    values: dict[str, Any] = {"draft": words[0], "options": _options("drafter", words[1:])}
    state.change(session.open_drafter(replace(state.options, **values)), **values)
    _begin(state, terminal)


def _rule(state: ChatState, words: list[str], terminal: Terminal) -> None:
    from paceline.core.contracts import RULES

    if not words:
        raise InputError(f"/rule needs one of {', '.join(RULES)}.")
    state.change(rule=words[0], rule_options=_options("rule", words[1:]))
    _begin(state, terminal)


def _options(owner: str, words: list[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise InputError(f"Options of a {owner} are name=value, got '{word}'.")
    given = (word.split("=", 1) for word in words)
    return {name.replace("-", "_"): value for name, value in given}


def _begin(state: ChatState, terminal: Terminal) -> None:
    terminal.write(beginning(state.decoder("speculative"), session.read_settings(state.options)) + "\n")


def _system(state: ChatState, words: list[str], terminal: Terminal) -> None:
    state.change(system=" ".join(words) or None)
    _clear(state, words, terminal)


def _store(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if words == ["reset"]:
        state.learn_from()
    elif len(words) == 2 and words[0] == "save":
        drafter: Any = state.decoder("ngram").drafter
        drafter.save(Path(words[1]))
    elif len(words) == 2 and words[0] == "load":
        state.learn_from(store=words[1])
    else:
        raise InputError("/store needs reset, save FILE or load FILE.")
    terminal.write(f"n-gram store: {' '.join(words)}\n")


# ---- the conversation


def _again(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if state.asked is None:
        raise InputError("There is no message yet to answer again.")
    raise Again


def _history(state: ChatState, words: list[str], terminal: Terminal) -> None:
    for message in state.messages:
        terminal.write(f"{message['role']}: {message['content']}\n")


def _clear(state: ChatState, words: list[str], terminal: Terminal) -> None:
    state.forget()
    terminal.write("a new conversation begins\n")


def _save(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if len(words) - ("--force" in words) != 1:
        raise InputError("/save needs the name of a file, such as /save chat.json.")
    tokenizer = state.target.tokenizer
    answers = [{"mode": mode, **result_as_dict(each, tokenizer)} for mode, each in state.answers.items()]
    settings = settings_of(state.decoder("speculative"), {name: _shown(state, name) for name in NUMBERS})
    content = {"messages": state.messages, "asked": state.asked, "answers": answers, "settings": settings}
    terminal.write(f"saved to {_write('/save', words, dump(content))}\n")


def _trace(state: ChatState, words: list[str], terminal: Terminal) -> None:
    if not state.answers:
        raise InputError("There is no answer yet to trace.")
    if words:
        names = ("drafted", "parents", "path", "own", "bonus")
        rounds = [
            json.dumps({"mode": mode, **{name: getattr(entry, name) for name in names}})
            for mode, result in state.answers.items()
            for entry in result.trace.rounds
        ]
        terminal.write(f"saved {len(rounds)} rounds to {_write('/trace', words, *rounds)}\n")
        return
    for mode, result in state.answers.items():
        terminal.write(f"[{mode}]\n")
        show_rounds(result, state.target.tokenizer, terminal)


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


def _write(command: str, words: list[str], *lines: str) -> str:
    """Write lines to the file that the words name; only --force replaces a file. Return its name."""
    name = next((word for word in words if word != "--force"), "")
    if Path(name).is_file() and "--force" not in words:
        raise InputError(
            f"'{name}' exists; write {command} {shlex.quote(name)} --force to replace it, or name another file."
        )
    with writing("The file", name), Path(name).open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return name


def _quit(state: ChatState, words: list[str], terminal: Terminal) -> None:
    raise Leave


@dataclass(frozen=True)
class Command:
    usage: str
    help: str
    run: Callable[[ChatState, list[str], Terminal], None]
    values: tuple[str, ...] = ()  # what can follow, for completion


# in the order of /help
COMMANDS = {
    "help": Command("/help", "this list, with every current value", _help),
    "settings": Command("/settings", "models, drafter, rule, and every setting that is not the default", _settings),
    "cache": Command("/cache", "whether the KV cache is used", _cache),
    "sampler": Command("/sampler NAME", f"{', '.join(SAMPLERS)}", _sampler, tuple(SAMPLERS)),
    "draft": Command("/draft NAME [option=value …]", "a drafter, or a smaller model", _draft),
    "rule": Command("/rule NAME [option=value …]", "the rule that verifies a draft", _rule),
    "system": Command("/system TEXT", "the system message of the conversation; without TEXT none", _system),
    "store": Command(
        "/store reset|save FILE|load FILE", "reset, save or load the n-gram store", _store, ("reset", "save", "load")
    ),
    "again": Command("/again", "answer the last message again with the current settings", _again),
    "history": Command("/history", "the conversation so far", _history),
    "clear": Command("/clear", "remove the conversation", _clear),
    "save": Command("/save FILE [--force]", "conversation, settings and the last answers as JSON", _save),
    "trace": Command(
        "/trace [FILE [--force]]", "the rounds of the last answers, here or in a file as JSON lines", _trace
    ),
    "quit": Command("/quit", "leave the chat; Ctrl-D does the same", _quit),
}
