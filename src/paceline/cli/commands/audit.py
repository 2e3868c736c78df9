"""`paceline audit`: test whether speculation is lossless here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.command_options import AuditOptions, resolve_drafter
from paceline.cli.decoder_session import open_decoder, open_rule
from paceline.cli.result_lines import print_json, token_text
from paceline.cli.settings import command_from
from paceline.cli.terminal import Terminal, info, preparing
from paceline.common.errors import InputError
from paceline.common.process import interruptible

if TYPE_CHECKING:
    from paceline.audit import Report
    from paceline.audit.report_page import Page
    from paceline.audit.server_report import ServerReport
    from paceline.engine.decoder import SpeculativeDecoder

_ROWS = 64  # samples of a batch

_OF_BOTH = {"prompts", "limit", "tokens", "temperature", "seed", "report", "json"}
_OF_SERVERS = {"server", "against", "model", "api_key", "against_api_key", "requests", "concurrency", "timeout"}

EPILOG = """
[bold]Examples[/bold]

paceline audit --target ./big --draft ./small --rule ratio --report audit.html

paceline audit --prompts mine.jsonl --limit 20 --json > audit.json

paceline audit --rule typical --allow-lossy --only-rule

paceline audit --server http://localhost:8000 --concurrency 16

paceline audit --server http://localhost:8000 --against http://localhost:8001

[bold]Exit code[/bold] 0: exact, or exact up to ties of the number format; 1: not lossless; 2: a mistake in the call; \
3: models or rules that do not go together, or cannot be audited; 4: weights that cannot be read; 5: NaN from a model; \
70: an unforeseen error; 130: cancelled.
"""


@command_from(AuditOptions, resolve_drafter)
def audit(ctx: typer.Context, options: AuditOptions) -> None:
    """Test whether speculation changes the text of a target: first the rule alone, then your models on prompts. With
    --server, test the texts of a server: alone and under load, with a cold and a warm cache, with and without
    speculation."""
    _check_flags(options, {name for name, origin in ctx.obj.items() if origin == "flag"})
    if options.server is not None:
        served = _run_server(options)
        _show(served.page(), served.as_dict(), options)
        raise typer.Exit(served.exit_code)
    report, decoder = _run(options)
    _show(_page(report, decoder), report.as_dict(), options)
    raise typer.Exit(report.exit_code)


def _check_flags(options: AuditOptions, flags: set[str]) -> None:
    """Refuse flags that the audit would not use."""
    if options.server is None:
        unused, why = flags & (_OF_SERVERS - {"server"}), "is for --server; give its URL too"
    else:
        unused, why = flags - _OF_BOTH - _OF_SERVERS, "is for models here, and --server audits a server; leave one out"
    if unused:
        raise InputError(f"--{min(unused).replace('_', '-')} {why}.")


def _run_server(options: AuditOptions) -> ServerReport:
    from paceline.audit.audit_run import PROMPTS, read_prompts
    from paceline.audit.report_page import check_path
    from paceline.audit.server_audit import ServerPlan, Target, audit_server

    assert options.server is not None
    names = ("requests", "concurrency", "tokens", "temperature", "seed", "timeout")
    plan = ServerPlan(**{name: getattr(options, name) for name in names})
    if options.report is not None:
        check_path(options.report)
    prompts = list(PROMPTS) if options.prompts is None else read_prompts(options.prompts)
    server = Target(options.server, options.api_key, options.model)
    other = None if options.against is None else Target(options.against, options.against_api_key, options.model)
    with interruptible() as cancel, preparing("auditing") as progress:
        return audit_server(server, other, prompts[: options.limit], plan, progress, cancel)


def _run(options: AuditOptions) -> tuple[Report, SpeculativeDecoder | None]:
    from paceline.audit import audit as audit_pair
    from paceline.audit import audit_only_rule
    from paceline.audit.agreement import AuditPlan
    from paceline.audit.audit_run import PROMPTS, read_prompts
    from paceline.audit.report_page import check_path

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


def _page(report: Report, decoder: SpeculativeDecoder | None) -> Page:
    from paceline.audit.audit_run import page_of

    tokenizer = None if decoder is None else decoder.target.tokenizer
    return page_of(report, lambda token: "" if tokenizer is None else repr(token_text(token, tokenizer)))


def _show(page: Page, content: dict[str, Any], options: AuditOptions) -> None:
    if options.json:
        print_json(content)
    else:
        Terminal().write(page.as_text())
    if options.report is not None:
        page.write(options.report)
        info(f"the report is in {options.report}")
