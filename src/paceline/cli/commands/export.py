"""`paceline export`: write a trained head in the format of other programs."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import typer

from paceline.cli.settings import command_from
from paceline.cli.terminal import preparing
from paceline.common.options import option


@dataclass(frozen=True)
class ExportOptions:
    """The options of `paceline export`."""

    folder: Path = option(MISSING, "The folder of a trained eagle, medusa or draft-lm.", argument=True)
    target: str = option(MISSING, "The target of the head: a name, a hub id or a folder.", metavar="MODEL",
                         names="model")  # fmt: skip
    to: Literal["speculators", "medusa", "hf"] = option(MISSING, "speculators for eagle, vLLM's medusa, hf for "
                                                        "draft-lm.")  # fmt: skip
    out: Path = option(MISSING, "The folder to write.", metavar="FOLDER")


@command_from(ExportOptions, config=False)
def export(ctx: typer.Context, options: ExportOptions) -> None:
    """Write a trained head in the format that vLLM and others read."""
    with preparing(f"exporting {options.folder}"):
        from paceline.drafters.heads.export_head import export_head

        export_head(options.folder, options.target, options.out, options.to)
    print(f"{options.out}: the head in {options.folder} for {options.target}, as {options.to}")
