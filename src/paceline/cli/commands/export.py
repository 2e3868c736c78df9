"""`paceline export`: a head that was trained here, in the format that others serve."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.naming import completing
from paceline.cli.terminal import preparing
from paceline.common.names import check_model


class Format(str, Enum):
    """What others read."""

    SPECULATORS = "speculators"
    MEDUSA = "medusa"
    HF = "hf"


def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a trained eagle, medusa or draft-lm.")],
    target: Annotated[
        str,
        typer.Option(
            help="The model it was trained for: a name, a hub id or a folder.", autocompletion=completing("model")
        ),
    ],
    to: Annotated[Format, typer.Option(help="Eagle goes to speculators, medusa to vLLM's medusa, draft-lm to hf.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
) -> None:
    """Write a trained head in the format that vLLM and others serve."""
    check_model(target)
    with preparing(f"exporting {folder}"):
        from paceline.drafters.heads.formats import export_head

        export_head(folder, target, out, to.value)
    print(f"{out}: the head in {folder} for {target}, as {to.value}")
