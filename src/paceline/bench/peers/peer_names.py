"""Peers by name: "hf", "hf-assisted:gamma=7", "hf-lookup", "llama-cpp-ngram". Missing libraries are noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.candidate import Candidate, whole_number
from paceline.bench.peers.gguf_export import FORMATS, gguf_of, in_floats, numbered, written
from paceline.bench.peers.gguf_peers import BEST, KINDS, LlamaCpp, OpenVino, Speculation, xllamacpp
from paceline.bench.peers.transformers_peer import HuggingFace, early_exit
from paceline.common.errors import InputError, PacelineError, UnknownNameError, UnsupportedError
from paceline.common.names import split_spec
from paceline.models import load
from paceline.models.language_model import LanguageModel
from paceline.models.translation import check_same_vocabulary

_LOOKUP = 10  # tokens that prompt lookup drafts, by default, as in transformers


@dataclass(frozen=True)
class PeerSetup:
    """The values that a peer is opened with. sampled: tokens are drawn."""

    lm: LanguageModel
    draft: LanguageModel | None = None
    gamma: int = 5
    sampled: bool = False


PeerOptions = dict[str, str]


def open_peers(names: Sequence[str], about: PeerSetup) -> tuple[list[Candidate], list[str]]:
    """Return the peers, and a line for each that cannot take part here. An unknown name or option is an error."""
    check_peers(names)
    peers: list[Candidate] = []
    notes: list[str] = []
    for text in names:
        name, options = split_spec(text)
        try:
            peers.append(_PEERS[name].open(text, options, about))
        except InputError:
            raise
        except PacelineError as reason:
            notes.append(f"{text} is left out: {str(reason).rstrip('.')}.")
    return peers, notes


def check_peers(names: Sequence[str]) -> None:
    """Refuse unknown names and options of peers before a model is loaded."""
    for text in names:
        name, options = split_spec(text)
        if name not in _PEERS:
            raise UnknownNameError("peer", name, _PEERS)
        if names.count(text) > 1:
            raise InputError(f"The peer '{text}' is named twice; leave one out.")
        known = _PEERS[name].options
        for option in options:
            if option not in known:
                unknown = option or options[option]
                raise UnknownNameError(f"option of peer '{name}'", unknown, [each for each in known if each])


def draft_model_of(candidates: Sequence[Any]) -> LanguageModel | None:
    """Return the draft model that a Paceline run has loaded."""
    found = (getattr(candidate, "draft_model", None) for candidate in candidates)
    return next((model for model in found if model is not None), None)


# ---- one function per kind


def _assisted(text: str, options: PeerOptions, about: PeerSetup) -> Candidate:
    lm = about.lm
    draft = load(options["draft"], dtype=lm.dtype, device=lm.device) if "draft" in options else about.draft
    if draft is None:
        raise UnsupportedError("no run has a draft model; name one, as in hf-assisted:draft=MODEL")
    check_same_vocabulary(lm, draft)
    sizes = [each.model.config.get_text_config(decoder=True).vocab_size for each in (lm, draft)]
    if sizes[0] != sizes[1]:
        raise UnsupportedError(
            f"transformers wants equal vocabularies, and these have {sizes[0]} and {sizes[1]} tokens"
        )
    gamma = _number(text, options, "gamma", about.gamma)
    return HuggingFace(text, lm, gamma=gamma, draft=draft, sampled=about.sampled)


def _lookup(text: str, options: PeerOptions, about: PeerSetup) -> Candidate:
    gamma = _number(text, options, "gamma", _LOOKUP)
    settings = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": _number(text, options, "match", 2)}
    return HuggingFace(text, about.lm, gamma=gamma, settings=settings, sampled=about.sampled)


def _early_exit(text: str, options: PeerOptions, about: PeerSetup) -> Candidate:
    layers = _number(text, options, "layers", max(1, round(about.lm.layers / 3)))  # as our own early exit
    return early_exit(text, about.lm, layers, _number(text, options, "gamma", about.gamma), about.sampled)


def _llama_cpp(drafts: bool = False, kind: str | None = None) -> Callable[[str, PeerOptions, PeerSetup], Candidate]:
    """Return a function that opens llama.cpp on the target's own weights, or on their GGUF file. kind: the default
    format of the weights; None: that of the target."""

    def make(text: str, options: PeerOptions, about: PeerSetup) -> Candidate:
        _only_on_cpu(about)
        lm, given, weights = about.lm, options.get("", options.get("file")), options.get("weights", kind)
        if weights is not None and weights not in FORMATS:
            raise UnknownNameError(f"format of weights of peer '{text}'", weights, FORMATS)
        if given is not None and "weights" in options:
            raise InputError(f"'{text}' names a file and a format, and a file has its own; leave one out.")
        speculation = _speculation(text, options) if drafts else None
        xllamacpp()  # refuse before gigabytes are written
        file = written(in_floats(lm), weights) if given is None else numbered(gguf_of(lm, given))
        return LlamaCpp(text, file, lm.context, speculation)

    return make


def _speculation(text: str, options: PeerOptions) -> Speculation:
    kind = options.get("type", BEST)
    if kind not in KINDS:
        raise UnknownNameError(f"type of peer '{text}'", kind, KINDS)
    sizes = {key: whole_number(text, key, options[key]) for key in ("gamma", "match") if key in options}
    return Speculation(kind, **sizes)


def _openvino(lookup: bool) -> Callable[[str, PeerOptions, PeerSetup], Candidate]:
    """Return a function that opens OpenVINO on the target's GGUF file. It cannot read files with float32 weights."""

    def make(text: str, options: PeerOptions, about: PeerSetup) -> Candidate:
        _only_on_cpu(about)
        file = gguf_of(about.lm, options.get("", options.get("file")))
        if not lookup:
            return OpenVino(text, file, about.lm.context)
        gamma, match = _number(text, options, "gamma", _LOOKUP), _number(text, options, "match", 2)
        return OpenVino(text, file, about.lm.context, gamma=gamma, match=match)

    return make


def _only_on_cpu(about: PeerSetup) -> None:
    if about.lm.device.type != "cpu":
        raise UnsupportedError(f"it is measured on the CPU, and the target is on {about.lm.device}")


def _number(text: str, options: PeerOptions, key: str, otherwise: int) -> int:
    return whole_number(text, key, options[key]) if key in options else otherwise


@dataclass(frozen=True)
class _Opening:
    open: Callable[[str, PeerOptions, PeerSetup], Candidate]
    options: tuple[str, ...] = ()  # "": the text after the colon without a key


_PEERS = {
    "hf": _Opening(lambda text, options, about: HuggingFace(text, about.lm, sampled=about.sampled)),
    "hf-assisted": _Opening(_assisted, ("gamma", "draft")),
    "hf-lookup": _Opening(_lookup, ("gamma", "match")),
    "hf-early-exit": _Opening(_early_exit, ("gamma", "layers")),
    "llama-cpp": _Opening(_llama_cpp(), ("", "file", "weights")),
    "llama-cpp-ngram": _Opening(_llama_cpp(drafts=True), ("", "file", "weights", "type", "gamma", "match")),
    "llama-cpp-q8": _Opening(_llama_cpp(kind="q8_0")),
    "openvino": _Opening(_openvino(lookup=False), ("", "file")),
    "openvino-lookup": _Opening(_openvino(lookup=True), ("", "file", "gamma", "match")),
}
