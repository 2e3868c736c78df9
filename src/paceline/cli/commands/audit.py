"""`paceline audit`: is speculation lossless here?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from paceline.cli.command_options import AuditOptions, resolve_drafter
from paceline.cli.decoder_session import open_decoder, open_rule
from paceline.cli.result_lines import print_json, token_text
from paceline.cli.settings import command_from
from paceline.cli.terminal import Terminal, info, preparing
from paceline.common.process import interruptible

if TYPE_CHECKING:
    from paceline.audit import Report
    from paceline.engine.decoder import SpeculativeDecoder

_ROWS = 64  # samples of a batch

EPILOG = """
[bold]Examples[/bold]

paceline audit --target ./big --draft ./small --rule ratio --report audit.html

paceline audit --prompts mine.jsonl --limit 20 --json > audit.json

paceline audit --rule typical --allow-lossy --only-rule

[bold]Exit code[/bold] 0: exact, or exact up to ties of the number format; 1: not lossless; 2: a mistake in the call; \
3: models or rules that do not go together, or cannot be audited; 4: weights that cannot be read; 5: NaN from a model; \
70: an unforeseen error; 130: cancelled.
"""


@command_from(AuditOptions, resolve_drafter)
def audit(ctx: typer.Context, options: AuditOptions) -> None:
    """Test whether speculation changes the text of a target: first the rule alone, then your models on prompts."""
    report, decoder = _run(options)
    _show(report, decoder, options)
    raise typer.Exit(report.exit_code)


def _run(options: AuditOptions) -> tuple[Report, SpeculativeDecoder | None]:
    from paceline.audit import audit as audit_pair
    from paceline.audit import audit_only_rule
    from paceline.audit.agreement import AuditPlan
    from paceline.audit.audit_run import PROMPTS, check_path, read_prompts

    plan = {name: getattr(options, name) for name in ("tokens", "positions", "samples", "temperature", "false_alarm")}
    AuditPlan(**plan)  # refuses wrong values before a model is loaded
    if options.report is not None:
        check_path(options.report)
    if options.only_rule:
        with preparing("enumerating") as progress:
            return audit_only_rule(open_rule(options), progress), None
    prompts = list(PROMPTS) if options.prompts is None else read_prompts(options.prompts)
    decoder = open_decoder(options, {}, rows=_ROWS)
    info(decoder.describe())
    with interruptible() as cancel, preparing("auditing") as progress:
        report = audit_pair(
            decoder, prompts[: options.limit], seed=options.seed, progress=progress, cancel=cancel, **plan
        )
    return report, decoder


def _show(report: Report, decoder: SpeculativeDecoder | None, options: AuditOptions) -> None:
    from paceline.audit.audit_run import as_text, write_report

    tokenizer = None if decoder is None else decoder.target.tokenizer

    def words(token: int) -> str:
        return "" if tokenizer is None else repr(token_text(token, tokenizer))

    if options.json:
        print_json(report.as_dict())
    else:
        Terminal().write(as_text(report, words))
    if options.report is not None:
        write_report(report, options.report, words)
        info(f"the report is in {options.report}")
