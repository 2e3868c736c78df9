"""`paceline chat`: talk to a model, and see how speculation works while it answers."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.chat_commands import Again, ChatState, Leave, execute, show_rounds, words_to_complete
from paceline.cli.command_options import ChatOptions, resolve_drafter
from paceline.cli.decoder_session import fitting, open_decoder, read_settings
from paceline.cli.result_lines import beginning, dump, result_as_dict, summary
from paceline.cli.settings import command_from
from paceline.cli.terminal import Terminal, error, info, write_text
from paceline.common.errors import PacelineError

if TYPE_CHECKING:
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation


@command_from(ChatOptions, resolve_drafter)
def chat(ctx: typer.Context, options: ChatOptions) -> None:
    """Talk to a target model. /help lists the commands. Messages can also come from a pipe."""
    settings = read_settings(options)
    decoder = open_decoder(options, settings)
    state = ChatState(options, decoder.target, drafters={"speculative": decoder.drafter})
    state.change()  # refuses settings with which every message would fail
    debug = bool(ctx.params.get("debug"))
    chat = bool(getattr(state.target.tokenizer, "chat_template", None))
    state.switches.update(chat=chat, drafts=options.show_drafts, debug=debug)
    info(beginning(decoder, settings))
    if sys.stdin.isatty():
        info("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
    terminal = Terminal()
    if options.prompt is not None and options.prompt != "-":  # messages come from standard input in any case
        _message(state, options.prompt, terminal)
    for line in _lines():
        if not _line(state, line, terminal):
            break


def _line(state: ChatState, line: str, terminal: Terminal) -> bool:
    """Handle one line of the user; false if it was the last. An error is shown, and the chat continues."""
    try:
        if line.startswith("/"):
            execute(line, state, terminal)
        elif line.strip():
            _message(state, line, terminal)
    except Leave:
        return False
    except Again:
        assert state.asked is not None
        if state.messages and state.answers:
            del state.messages[-2:]
        for mode in state.unlearn():
            info(f"the drafter of '{mode}' cannot discard what it learned, so it may know this answer already")
        return _line(state, state.asked, terminal)
    except PacelineError as failure:
        if state.switches["debug"]:
            traceback.print_exc()
        error(str(failure))
    return True


def _message(state: ChatState, text: str, terminal: Terminal) -> None:
    """Every mode that is on answers with the same seed. The conversation keeps the speculative answer."""
    from paceline.core.noise import fresh_seed

    state.asked, state.answers = text, {}
    settings = {"seed": fresh_seed(), **read_settings(state.options)}
    prompt = _prompt(state, text)
    for mode, wanted in state.modes.items():
        if not wanted:
            continue
        decoder = state.decoder(mode)
        if sum(state.modes.values()) > 1:
            terminal.write(f"[{mode}]\n")
        drafts, fitted = state.switches["drafts"], fitting(decoder, settings)
        result, shown = write_text(decoder, prompt, fitted, state.options, drafts, terminal)
        if state.options.json:
            print(dump(result_as_dict(result, state.target.tokenizer)), flush=True)
        else:
            shown.finish(terminal, result)
        state.answers[mode] = result
        info(_summary(state, decoder, result))
        if state.switches["debug"]:
            show_rounds(result, state.target.tokenizer, terminal)
        if result.finish_reason == "cancelled":
            break
    if state.switches["chat"]:
        kept = state.answers.get("speculative", next(iter(state.answers.values())))
        state.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": kept.text}]


def _prompt(state: ChatState, text: str) -> Any:
    if not state.switches["chat"]:
        return text
    system = state.options.system
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, *state.messages, {"role": "user", "content": text}]


def _summary(state: ChatState, decoder: SpeculativeDecoder, result: Generation) -> str:
    """Return the numbers of one answer, and its speed against the first answer."""
    line = summary(result, speculates=decoder.speculates)
    mode, first = next(iter(state.answers.items()))
    if len(state.answers) > 1 and first.stats.tokens_per_second > 0:
        ratio = result.stats.tokens_per_second / first.stats.tokens_per_second
        same = "the same text" if result.tokens == first.tokens else "another text"
        line += f", {ratio:.2f} times the speed of {mode}, {same}"
    return line


# ---- reading lines


def _lines() -> Iterator[str]:
    """Yield lines from a terminal with history and completion, or from a pipe. A backslash at the end continues one."""
    if sys.stdin.isatty():
        yield from _typed()
        return
    waiting = ""
    for raw in sys.stdin:
        line = raw.rstrip("\r\n")
        if line.endswith("\\"):
            waiting += line[:-1] + "\n"
            continue
        yield waiting + line
        waiting = ""
    if waiting:
        yield waiting


def _typed() -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import NestedCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from paceline.core.contracts import DRAFTERS, RULES

    words = {name: dict.fromkeys(values) or None for name, values in words_to_complete().items()}
    words["/draft"], words["/rule"] = dict.fromkeys(DRAFTERS), dict.fromkeys(RULES)
    place = history_file()
    history = InMemoryHistory() if place is None else FileHistory(str(place))
    session: PromptSession[str] = PromptSession(history=history, completer=NestedCompleter.from_nested_dict(words))
    while True:
        try:
            line = session.prompt("› ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + session.prompt("… ")
        except KeyboardInterrupt:  # Ctrl-C clears the line
            continue
        except EOFError:
            return
        yield line


def history_file() -> Path | None:
    """Return the file with the lines of earlier chats. It is in the state folder of the user, else in the cache folder;
    None if neither can be written. A file that an older version left in the cache folder stays in use."""
    from paceline.models.loading.disk_cache import cache_folder

    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    places = [state / "paceline" / "chat_history", cache_folder() / "chat_history"]
    for place in sorted(places, key=lambda place: not place.is_file()):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("a"):
                os.chmod(place, 0o600)  # chats are private
        except OSError:
            continue
        return place
    return None
