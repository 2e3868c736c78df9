"""`--trace FILE`: a text that is written is recorded with its rounds, for `paceline bench --replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.errors import InputError

from .drafting import Drafting
from .options import GenerateOptions
from .report import versions

if TYPE_CHECKING:
    from paceline.bench.replaying.trace_files import TraceWriter
    from paceline.engine.decoder import SpeculativeDecoder
    from paceline.engine.request import Generation


class Recording:
    """A file that a text is added to; tried before anything is written, so that what is wrong with it is said then."""

    def __init__(
        self, said: GenerateOptions, how: Drafting, decoder: SpeculativeDecoder, settings: dict[str, Any]
    ) -> None:
        from paceline.bench.contest import Entry
        from paceline.bench.replaying.trace_files import header_of
        from paceline.core.contracts import DRAFTERS, RULES
        from paceline.core.registry import convert_options

        assert said.trace is not None
        if settings.get("num_beams", decoder.rule.num_beams) > 1:
            raise InputError("--trace records one text, and a beam search writes several; leave one of the two out.")
        name = how.draft if how.draft in DRAFTERS else "draft-model"
        options = convert_options(how.options, DRAFTERS[name].Options, "drafter", name)
        rule_options = convert_options(how.rule_options, RULES[said.rule].Options, "rule", said.rule)
        gamma = "auto" if decoder.drafter.chooses_length else decoder.gamma
        entry = Entry(how.draft, how.draft, options, gamma, said.nodes, said.rule, rule_options)
        self._decoder, self._settings, self._path = decoder, settings, said.trace
        self._header = header_of(
            decoder.target, entry, settings, reach=decoder.drafter.reach(), provenance={"versions": versions()}
        )
        self._open().close()

    def _open(self) -> TraceWriter:
        from paceline.bench.replaying.trace_files import TraceWriter

        return TraceWriter(self._path, self._header, append=True)

    def add(self, result: Generation) -> None:
        from paceline.engine.prompts import encode_prediction

        lm = self._decoder.target
        limit = min(self._settings["max_new_tokens"], lm.context - len(result.prompt_tokens))
        expected = encode_prediction(self._settings.get("prediction"), lm)
        with self._open() as writer:
            writer.add_generation(str(writer.count + 1), "", result, limit, expected)
