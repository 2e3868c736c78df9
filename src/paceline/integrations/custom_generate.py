"""Use Paceline in transformers: `model.generate(..., custom_generate=CustomGenerate("prompt-lookup"))`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.common.errors import UnsupportedError
from paceline.core.noise import fresh_seed
from paceline.core.sampling import Processor
from paceline.engine.decoder import SpeculativeDecoder
from paceline.engine.request import Criterion, Generation, refuse_memory
from paceline.models import LanguageModel, generate_output

# inputs that transformers prepares for its own loops; Paceline does not need them
_IGNORED = frozenset(
    ["attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"]
)
_REFUSED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "penalty_alpha",
            "dola_layers", "constraints", "force_words_ids", "diversity_penalty")  # fmt: skip


class CustomGenerate:
    """Speculative decoding inside transformers' `generate`, with all its processors and criteria.

    transformers does not forward `streamer`, `tokenizer` and `assistant_model`, and it refuses `stop_strings`, so they
    are arguments of this class. Without `seed`, the seeds are drawn from torch's generator (`torch.manual_seed`).
    """

    def __init__(
        self,
        draft: Any = None,
        *,
        gamma: int | str | None = None,
        rule: str = "match",
        options: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        streamer: Any = None,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        rule_options: Mapping[str, Any] | None = None,
        allow_lossy: bool = False,
        nodes: int | None = None,
        prediction: Any = None,
    ) -> None:
        self.draft, self.gamma, self.rule, self.options = draft, gamma, rule, options
        self.rule_options, self.allow_lossy = rule_options, allow_lossy
        self.nodes, self.prediction = nodes, prediction
        self.tokenizer, self.streamer, self.stop_strings, self.seed = tokenizer, streamer, stop_strings, seed
        self.generations: list[Generation] = []  # the results of the last call, with their traces
        self._decoder: SpeculativeDecoder | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        _refuse(generation_config, model_kwargs)
        decoder = self._decoder_for(model)
        padding = _padding(input_ids, model_kwargs.get("attention_mask"))
        beams = generation_config.num_beams or 1
        input_ids, padding = input_ids[::beams], padding[::beams]  # transformers repeats a prompt for every beam
        ids = input_ids.tolist()
        pads = [row[:skip] for row, skip in zip(ids, padding, strict=True)]
        settings: dict[str, Any] = {
            "max_new_tokens": generation_config.max_length - input_ids.shape[1],
            "temperature": 1.0 if generation_config.do_sample else 0.0,
            "processors": [[_processor(p, pad) for p in logits_processor] for pad in pads],
            "criteria": [[_criterion(c, pad) for c in stopping_criteria] for pad in pads],
            "ignore_eos": True,  # transformers' own criterion ends the text
            "seed": self._seeds(len(ids)),
            "stop": self.stop_strings,
            "num_beams": beams,
            "prediction": self.prediction,
        }
        if beams > 1:
            settings.update(_search(generation_config, stopping_criteria, pads))
        prompts = [row[skip:] for row, skip in zip(ids, padding, strict=True)]
        for process in logits_processor:
            refuse_memory(process)
            if type(process).__name__ == "PrefixConstrainedLogitsProcessor" and len(ids) > 1:
                raise UnsupportedError("prefix_allowed_tokens_fn works with one text at a time; give one prompt.")
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        self.generations = self._write(decoder, prompts, settings)
        written = [[g.tokens] if g.beams is None else [b.tokens for b in g.beams] for g in self.generations]
        wanted = generation_config.num_return_sequences if beams > 1 else 1
        for texts in written:
            texts += [[]] * (wanted - len(texts))  # a search can find fewer texts: the others are padding
        prompted = input_ids.repeat_interleave(wanted, 0)
        sequences = _rectangle(prompted, [tokens for texts in written for tokens in texts], _pad_id(generation_config))
        return generate_output(sequences) if generation_config.return_dict_in_generate else sequences

    def _write(
        self, decoder: SpeculativeDecoder, prompts: list[list[int]], settings: dict[str, Any]
    ) -> list[Generation]:
        if self.streamer is None:
            return list(decoder.generate(prompts, **settings))
        if len(prompts) > 1:
            raise UnsupportedError(f"A streamer shows one text, but there are {len(prompts)} prompts; give one prompt.")
        stream = decoder.stream(prompts, **settings)
        for piece in stream:
            self.streamer.put(torch.tensor([piece.token]))
        self.streamer.end()
        return stream.results

    def _decoder_for(self, model: Any) -> SpeculativeDecoder:
        if self._decoder is None or self._decoder.target.model is not model:
            names = ("gamma", "rule", "options", "rule_options", "nodes", "allow_lossy")
            how: dict[str, Any] = {name: getattr(self, name) for name in names}
            target = LanguageModel(model, self.tokenizer)
            self._decoder = SpeculativeDecoder(target, self.draft, rows=1 << 16, **how)
        return self._decoder

    def _seeds(self, count: int) -> list[int]:
        """Return one seed per row. Without a given seed they are drawn from torch's generator, as users expect."""
        if self.seed is not None:
            return [self.seed + row for row in range(count)]
        return torch.randint(0, 1 << 62, (count,)).tolist() if count else [fresh_seed()]


def _refuse(generation_config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for a setting or an input that Paceline cannot follow."""
    if (generation_config.num_beams or 1) > 1 and generation_config.do_sample:
        raise UnsupportedError(
            f"num_beams={generation_config.num_beams} with do_sample=True is not supported; leave one of them out."
        )
    if (getattr(generation_config, "num_beam_groups", None) or 1) > 1:
        raise UnsupportedError(
            f"num_beam_groups={generation_config.num_beam_groups} is not supported under custom_generate; leave it out."
        )
    for name in _REFUSED:
        if getattr(generation_config, name, False):
            raise UnsupportedError(f"{name} is not supported under custom_generate; leave it out.")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise UnsupportedError("past_key_values that hold a text are not supported here; give the whole prompt.")
    for name in sorted(set(model_kwargs) - _IGNORED):
        if model_kwargs[name] is not None:
            raise UnsupportedError(f"The model input '{name}' is not supported here; give token ids only.")


def _search(generation_config: Any, stopping_criteria: Any, pads: list[list[int]]) -> dict[str, Any]:
    """Return the settings of a beam search. The end-of-text tokens are given as ids, and not as a criterion: the search
    needs one more candidate for each of them."""
    eos = generation_config.eos_token_id
    own = [c for c in stopping_criteria if type(c).__name__ not in ("EosTokenCriteria", "MaxLengthCriteria")]
    return {
        "num_return_sequences": generation_config.num_return_sequences,
        "length_penalty": generation_config.length_penalty,
        "early_stopping": generation_config.early_stopping,
        "ignore_eos": eos is None,
        "eos_token_ids": eos,
        "criteria": [[_criterion(c, pad) for c in own] for pad in pads],
    }


def _padding(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """Return the number of padding tokens on the left of each row."""
    if mask is None:
        return [0] * input_ids.shape[0]
    skips = (mask == 0).sum(1)
    if bool((mask.to(torch.int64).diff(dim=1) < 0).any()):
        raise UnsupportedError("The attention mask has gaps or padding on the right; pad on the left.")
    return [int(skip) for skip in skips.tolist()]


def _pad_id(generation_config: Any) -> int:
    pad = generation_config.pad_token_id
    if pad is None or (pad == 0 and (generation_config.num_beams or 1) > 1):  # as in transformers' beam search
        eos = generation_config.eos_token_id
        pad = eos[0] if isinstance(eos, (list, tuple)) else eos
    return 0 if pad is None else int(pad)


def _processor(process: Any, pad: list[int]) -> Processor:
    """Return a control that calls one of transformers' processors with padding, prompt and text, as it expects."""

    def call(prefix: Tensor, logits: Tensor) -> Tensor:
        ids = torch.cat([prefix.new_tensor(pad), prefix])[None]
        return process(ids, logits[None])[0]  # type: ignore[no-any-return]

    return call


def _criterion(criterion: Any, pad: list[int]) -> Criterion:
    def call(tokens: list[int]) -> bool:
        return bool(torch.as_tensor(criterion(torch.tensor([pad + tokens]), None)).all())

    return call


def _rectangle(input_ids: Tensor, written: list[list[int]], pad: int) -> Tensor:
    most = max(len(tokens) for tokens in written)
    padded = [tokens + [pad] * (most - len(tokens)) for tokens in written]
    return torch.cat([input_ids, torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)], 1)
