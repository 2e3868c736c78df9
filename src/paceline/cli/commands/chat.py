"""`paceline chat`: talk to a model, and see what speculation does while it answers."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.chat_commands import Again, Leave, execute, show_rounds, words_to_complete
from paceline.cli.chat_state import Answer, ChatState
from paceline.cli.command_options import ChatOptions
from paceline.cli.decoder_session import config_of, drafting, fitting, open_decoder, read_settings
from paceline.cli.naming import check_pair
from paceline.cli.result_lines import beginning, dump, result_as_dict, summary
from paceline.cli.settings import takes
from paceline.cli.terminal import Terminal, TokenPrinter, complain, counted, plain_warnings, say, silent_keys
from paceline.common.errors import PacelineError
from paceline.common.interrupts import interruptible

if TYPE_CHECKING:
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation


@takes(ChatOptions)
def chat(ctx: typer.Context, said: ChatOptions) -> None:
    """Talk to a target model; /help lists what can be switched, set, compared and saved. A pipe works, too."""
    how = drafting(ctx, said)
    if said.print_config:
        typer.echo(config_of(ctx, said, how))
        return
    check_pair(said, how)
    with plain_warnings(said.debug):
        settings = read_settings(said)
        decoder = open_decoder(said, how, settings)
        state = ChatState(said, how, decoder.target, drafters={"speculative": decoder.drafter})
        state.change()  # nothing; but what every message would be refused for is refused here
        state.switches.update(chat=_has_template(state.target), drafts=said.show_drafts, debug=said.debug)
        say(beginning(decoder, settings))
        if sys.stdin.isatty():
            say("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        ink = Terminal()
        if said.prompt is not None and said.prompt != "-":  # standard input is where messages come from anyway
            _message(state, said.prompt, ink)
        for line in _lines():
            if not _line(state, line, ink):
                break


def _has_template(lm: Any) -> bool:
    return bool(getattr(lm.tokenizer, "chat_template", None))


def _line(state: ChatState, line: str, ink: Terminal) -> bool:
    """One line of the user; false when it was the last. An error is told, and the chat goes on."""
    try:
        if line.startswith("/"):
            execute(line, state, ink)
        elif line.strip():
            _message(state, line, ink)
    except Leave:
        return False
    except Again:
        assert state.asked is not None
        state.take_back()
        for mode in state.unlearn():
            say(f"the drafter of '{mode}' cannot forget, so it may know this answer already")
        return _line(state, state.asked, ink)
    except PacelineError as error:
        if state.switches["debug"]:
            traceback.print_exc()
        complain(str(error))
    return True


def _message(state: ChatState, text: str, ink: Terminal) -> None:
    """Every mode that is on answers, with the same seed; the conversation goes on with the speculative answer."""
    from paceline.core.noise import fresh_seed

    state.asked, state.answers = text, []
    settings = {"seed": fresh_seed(), **read_settings(state.said)}
    prompt = _prompt(state, text)
    for mode, wanted in state.modes.items():
        if not wanted:
            continue
        decoder = state.decoder(mode)
        if sum(state.modes.values()) > 1:
            ink.write(f"[{mode}]\n")
        result = _answer(decoder, prompt, fitting(decoder, settings), state, ink)
        state.answers.append(Answer(mode, result))
        say(_told(state, decoder, result))
        if state.switches["debug"]:
            show_rounds(result, state.target.tokenizer, ink)
        if result.finish_reason == "cancelled":
            break
    if state.switches["chat"]:
        kept = next((a for a in state.answers if a.mode == "speculative"), state.answers[0])
        state.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": kept.result.text}]


def _prompt(state: ChatState, text: str) -> Any:
    if not state.switches["chat"]:
        return text
    system = state.said.system
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, *state.messages, {"role": "user", "content": text}]


def _answer(decoder: SpeculativeDecoder, prompt: Any, settings: Any, state: ChatState, ink: Terminal) -> Generation:
    tokenizer = decoder.target.tokenizer
    live = not state.said.json and (ink.is_terminal if state.said.stream is None else state.said.stream)
    with silent_keys(), interruptible() as cancelled:
        stream = decoder.stream(prompt, cancel=cancelled, **settings)
        shown = TokenPrinter(stream, ink if live else None, tokenizer, state.switches["drafts"])
        try:
            for piece in counted(stream, "writing", live):
                shown.add(piece)
        except KeyboardInterrupt:  # the second Ctrl-C: what was written is kept all the same
            stream.close()
        (result,) = stream.results
    if state.said.json:
        print(dump(result_as_dict(result, tokenizer)), flush=True)
    else:
        shown.finish(ink, result)
    return result


def _told(state: ChatState, decoder: SpeculativeDecoder, result: Generation) -> str:
    """The numbers of one answer, and its speed beside the first one's."""
    line = summary(result, speculates=decoder.drafter.speculates)
    first = state.answers[0].result.stats.tokens_per_second
    if len(state.answers) > 1 and first > 0:
        ratio = result.stats.tokens_per_second / first
        same = "the same text" if result.tokens == state.answers[0].result.tokens else "another text"
        line += f", {ratio:.2f} times the speed of {state.answers[0].mode}, {same}"
    return line


# ---- reading lines


def _lines() -> Iterator[str]:
    """From a terminal with history and completion, or from a pipe; a backslash at the end continues a line."""
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

    words = {name: dict.fromkeys(values) or None for name, values in words_to_complete().items()}
    words["/draft"], words["/rule"] = (dict.fromkeys(names) for names in _names())
    place = history_file()
    history = InMemoryHistory() if place is None else FileHistory(str(place))
    session: PromptSession[str] = PromptSession(history=history, completer=NestedCompleter.from_nested_dict(words))
    while True:
        try:
            line = session.prompt("› ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + session.prompt("… ")
        except KeyboardInterrupt:  # an empty line again
            continue
        except EOFError:
            return
        yield line


def _names() -> tuple[list[str], list[str]]:
    from paceline.core.contracts import DRAFTERS, RULES

    return list(DRAFTERS), list(RULES)


def history_file() -> Path | None:
    """The file with the lines of earlier chats: in the state folder of the user, else in the cache folder; None where
    neither can be written. A file that an older version left in the cache folder is continued."""
    from paceline.models.loading.disk_cache import cache_folder

    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    places = [state / "paceline" / "chat_history", cache_folder() / "chat_history"]
    for place in sorted(places, key=lambda place: not place.is_file()):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("a"):
                os.chmod(place, 0o600)  # what people say to a model is theirs
        except OSError:
            continue
        return place
    return None
