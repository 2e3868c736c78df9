"""The entry point: the commands, and the place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from paceline.cli.commands.audit import EPILOG as AUDIT_EPILOG
from paceline.cli.commands.audit import audit
from paceline.cli.commands.bench import EPILOG as BENCH_EPILOG
from paceline.cli.commands.bench import bench
from paceline.cli.commands.chat import chat
from paceline.cli.commands.doctor import doctor
from paceline.cli.commands.export import export
from paceline.cli.commands.generate import EPILOG, INTERRUPTED, generate
from paceline.cli.commands.list import list_names
from paceline.cli.commands.playground import EPILOG as PLAYGROUND_EPILOG
from paceline.cli.commands.playground import playground
from paceline.cli.commands.serve import EPILOG as SERVE_EPILOG
from paceline.cli.commands.serve import serve
from paceline.cli.commands.train import EPILOG as TRAIN_EPILOG
from paceline.cli.commands.train import train
from paceline.cli.commands.tune import EPILOG as TUNE_EPILOG
from paceline.cli.commands.tune import tune
from paceline.cli.result_lines import versions
from paceline.cli.settings import CONTEXT, PREFIX, SettingsCommand
from paceline.cli.terminal import error
from paceline.common import process
from paceline.common.errors import InputError, PacelineError

# typer's errors of usage: of click in older versions, its own in newer ones
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class OneLineErrors(TyperGroup):
    """Shows an error as one line on stderr, with an exit code; --debug adds the traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        given = sys.argv[1:] if args is None else list(args)
        if any(arg.startswith("--tp-plan") for arg in given) and os.environ.get("RANK", "0") != "0":
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  all processes write the same text; one shows it
        debug = "--debug" in given or os.environ.get(f"{PREFIX}_DEBUG", "") not in ("", "0", "false")
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(INTERRUPTED)
        except Exception as failure:
            if debug:
                traceback.print_exc()
            message, code = _explain(failure)
            error(message)
        sys.exit(code if isinstance(code, int) else 0)


def _explain(failure: Exception) -> tuple[str, int]:
    """Return the message and the exit code of an error."""
    if isinstance(failure, PacelineError):
        return str(failure), failure.exit_code
    if isinstance(failure, _UsageError):
        usage: Any = failure
        context = getattr(usage, "ctx", None)
        see = f" See '{context.command_path} --help'." if context is not None else ""
        message = usage.format_message()
        return f"{message}{'' if message.endswith(('.', '?')) else '.'}{see}", InputError.exit_code
    what = " ".join(str(failure).split()) or "no message"
    text = f"unexpected {type(failure).__name__}: {what}. Run again with --debug to see the traceback."
    return text, PacelineError.exit_code


app = typer.Typer(
    cls=OneLineErrors,
    help="Faster generation with Hugging Face models by speculative decoding, with the same text.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", cls=SettingsCommand, context_settings=CONTEXT, epilog=EPILOG)(generate)
app.command("chat", cls=SettingsCommand, context_settings=CONTEXT)(chat)
app.command("serve", cls=SettingsCommand, context_settings=CONTEXT, epilog=SERVE_EPILOG)(serve)
app.command("playground", cls=SettingsCommand, context_settings=CONTEXT, epilog=PLAYGROUND_EPILOG)(playground)
app.command("audit", cls=SettingsCommand, context_settings=CONTEXT, epilog=AUDIT_EPILOG)(audit)
app.command("bench", cls=SettingsCommand, context_settings=CONTEXT, epilog=BENCH_EPILOG)(bench)
app.command("tune", cls=SettingsCommand, context_settings=CONTEXT, epilog=TUNE_EPILOG)(tune)
app.command("train", cls=SettingsCommand, context_settings=CONTEXT, epilog=TRAIN_EPILOG)(train)
app.command("export")(export)
app.command("doctor")(doctor)
app.command("list")(list_names)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", is_eager=True, callback=_version, help="Show the versions and stop."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    process.decide(sys.argv[1:])
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its log would mix with the output
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may lack a character
    app(prog_name="paceline")


if __name__ == "__main__":
    main()
