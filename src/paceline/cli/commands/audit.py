"""`paceline audit`: is speculation lossless here?"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer

from paceline.cli.command_options import AuditOptions
from paceline.cli.decoder_session import check_counts, drafting, open_decoder, open_rule
from paceline.cli.naming import check_pair, check_rule
from paceline.cli.result_lines import dump, token_text, versions
from paceline.cli.settings import show_config, source, takes
from paceline.cli.terminal import Terminal, plain_warnings, preparing, say
from paceline.common.interrupts import interruptible

if TYPE_CHECKING:
    from paceline.audit import Report
    from paceline.cli.decoder_session import Drafting
    from paceline.engine.decoder import SpeculativeDecoder

_ROWS = 64  # texts that are sampled at once

EPILOG = """
[bold]Examples[/bold]

paceline audit --target ./big --draft ./small --rule ratio --report audit.html

paceline audit --prompts mine.jsonl --limit 20 --json > audit.json

paceline audit --rule typical --allow-lossy --only-rule

[bold]Exit code[/bold] 0: exact, or exact up to ties of the number format; 1: not lossless; 2: a mistake in the call;
3: models or rules that do not go together, or cannot be audited; 4: weights that cannot be read; 5: NaN from a model;
70: an unforeseen error; 130: cancelled.
"""


@takes(AuditOptions)
def audit(ctx: typer.Context, said: AuditOptions) -> None:
    """Test whether speculation changes what a target writes: the rule on toy laws, then your models on prompts."""
    how = drafting(ctx, said)
    if said.print_config:
        values = asdict(replace(said, draft=how.draft, speculative_config=None)) | {"gamma": how.gamma}
        origins = {**{name: source(ctx, name) for name in values}, **how.origins}
        tables = {"drafter_options": how.options, "rule_options": how.rule_options}
        typer.echo(show_config(str(ctx.info_name), values, origins, tables))
        return
    if said.only_rule:
        check_rule(said.rule, how.rule_options)
    else:
        check_pair(said, how)
    with plain_warnings(said.debug):
        report, decoder = _run(said, how)
        _tell(report, decoder, said)
    raise typer.Exit(report.exit_code)


def _run(said: AuditOptions, how: Drafting) -> tuple[Report, SpeculativeDecoder | None]:
    from paceline.audit import audit as audit_pair
    from paceline.audit import audit_only_rule
    from paceline.audit.audit_inputs import PROMPTS, read_prompts
    from paceline.audit.audit_report import check_path
    from paceline.audit.audit_run import check_plan

    plan = {name: getattr(said, name) for name in ("tokens", "positions", "samples", "temperature", "false_alarm")}
    check_plan(**plan)
    check_counts(limit=said.limit)
    if said.report is not None:
        check_path(said.report)
    if said.only_rule:
        with preparing("enumerating") as progress:
            return audit_only_rule(open_rule(said, how), progress), None
    prompts = list(PROMPTS) if said.prompts is None else read_prompts(said.prompts)
    decoder = open_decoder(said, how, {}, rows=_ROWS)
    say(decoder.describe())
    with interruptible() as cancel, preparing("auditing") as progress:
        found = audit_pair(decoder, prompts[: said.limit], seed=said.seed, progress=progress, cancel=cancel, **plan)
    return found, decoder


def _tell(report: Report, decoder: SpeculativeDecoder | None, said: AuditOptions) -> None:
    from paceline.audit.audit_report import as_text, write_report

    tokenizer = None if decoder is None else decoder.target.tokenizer

    def words(token: int) -> str:
        return "" if tokenizer is None else repr(token_text(token, tokenizer))

    if said.json:
        print(dump({**report.as_dict(), "versions": versions()}), flush=True)
    else:
        Terminal().write(as_text(report, words))
    if said.report is not None:
        write_report(report, said.report, words)
        say(f"the report is in {said.report}")
