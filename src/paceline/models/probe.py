"""Test whether a model can be read in pieces, in branches and after a rollback. This runs when a model is loaded.

The given model reads short texts. A small copy of it with windows of a few tokens reads texts that are
longer than each window.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.common.errors import UnsupportedError, in_one_line
from paceline.models.architecture import study
from paceline.models.loading.hub import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.models.language_model import LanguageModel

# ---- A small random copy of a model, with windows of a few tokens, to test what happens past a window

VOCABULARY = 256
_SMALL = 16  # for a number of unknown meaning: the probe reads past it if it is a window; it is even if it is a width
_MOST_LAYERS = 8
_READ = 20  # tokens that a small model must be able to read

# The kind of a number by its name; the first pattern that fits counts.
_KINDS = {
    "token": r"token(_ids?|_index)?$|tokens$|_index$|(bos|eos|pad|sep|cls|mask)_id$",
    "vocabulary": r"vocab",
    "window": r"^(?!.*(pattern|layer|heads|expert|image|patch))"
    r".*(window|chunk|block|local|sliding|extent|distance|index_topk|kpool|compress|mem_len)",
    "as it is": r"position|length|_ctx$|seq_len|seed|label|kernel|patch|image|channels|rope|rotary|head_?(dim|size)"
    r"|dim_head|d_head$|d_kv$|pattern|mrope",
    "heads": r"heads?(_|$)",
    "groups": r"groups?$",
    "chosen": r"per_tok|top_?k|moe_k$",
    "experts": r"experts?(_num)?$",
    "layers": r"layers?(_|$)|first_k_dense|^depth$",
    "inner width": r"intermediate|inner|ff(n_|_dim|n?$)|mlp_dim",
}
_MOST = {"groups": 2, "chosen": 2, "experts": 8, "heads": 4, "inner width": 64}


def meaning_of(name: str) -> str:
    """Return the meaning of a number of a config, by its name."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "unknown")


def windows(config: Any) -> dict[str, int]:
    """Return the numbers of a config that can act as a window, by name."""
    text = config.get_text_config(decoder=True)
    return {
        name: value
        for part in _parts(text)
        for name, value in vars(part).items()
        if type(value) is int and value > 0 and meaning_of(name) == "window" and name != "chunk_size_feed_forward"
    }


def small_config(config: Any, window: int, heads: int = 2, every_layer: bool = False) -> Any:
    """A copy of a config with small numbers: windows of `window` tokens, few layers (one of each kind, or as many as
    there are), heads, experts and tokens, and narrow hidden states. The width of a head stays, and so does RoPE."""
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    sizes = _Sizes.of(text, window, heads, every_layer)
    for part in list(_parts(small)):
        own = sizes if part is text else _Sizes.of(part, window, heads, False)
        for name, value in list(vars(part).items()):
            if part is not text and value == sizes.width and (name != "hidden_size" or not own.heads):
                part.__dict__[name] = sizes.new_width  # a width that the part shares with the text model
            else:
                part.__dict__[name] = own.smaller(name, value)
    return small


def randomize(model: PreTrainedModel, seed: int = 0) -> None:
    """Give a model random weights with which every earlier token matters: large linear weights and small embeddings.
    With usual random weights a model hardly attends, or repeats its last token."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2 and weight.is_floating_point():
                scale = (0.2 if id(weight) in embeddings else 2) * weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float32) * scale)


def small_models(
    kind: type[PreTrainedModel], config: Any, window: int, dtype: torch.dtype = torch.float32
) -> Iterator[PreTrainedModel]:
    """Yield small random models of a class on the CPU, the smallest first. A model that cannot be built, or cannot read
    a text by itself, is left out, because the numbers of some configs depend on each other. The random state of the
    process does not change."""
    for heads, every_layer in ((2, False), (4, False), (4, True)):
        try:
            small = small_config(config, window, heads, every_layer)
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), quiet():
                model = kind._from_config(small, dtype=dtype).eval()
                randomize(model)
                with torch.inference_mode():
                    logits = model(input_ids=torch.arange(5, 5 + _READ)[None], use_cache=False).logits
        except Exception:
            continue
        if logits.isfinite().all():
            yield model


@dataclass(frozen=True)
class _Sizes:
    """Old and new sizes of one config."""

    window: int
    heads: int
    new_heads: int
    groups: int
    new_groups: int
    width: int
    new_width: int
    layers: int
    new_layers: int

    @classmethod
    def of(cls, config: Any, window: int, most_heads: int, every_layer: bool) -> _Sizes:
        heads = _whole(config, "num_attention_heads")
        groups = _whole(config, "num_key_value_heads") or heads
        width = _whole(config, "hidden_size")
        layers = _whole(config, "num_hidden_layers")
        per_head = width // heads if heads and width % heads == 0 else _SMALL
        new_heads = min(heads, most_heads) or most_heads
        new_groups = new_heads if groups == heads else min(groups, new_heads // 2)
        return cls(
            window=window, heads=heads, new_heads=new_heads, groups=groups, new_groups=new_groups,
            width=width, new_width=min(width, new_heads * per_head),
            layers=layers, new_layers=layers if every_layer else _depth(config, layers),
        )  # fmt: skip

    def smaller(self, name: str, value: Any) -> Any:
        """Return the value for the copy. Lists and dicts are copied with all values in them."""
        if type(value) is int:
            return self._number(name, value)
        if isinstance(value, (list, tuple)):
            return self._list(name, value)
        if isinstance(value, dict) and not re.search("rope|label", name):
            return {key: self.smaller(name, each) for key, each in value.items() if not self._past_the_end(name, key)}
        return value

    def _number(self, name: str, value: int) -> int:
        kind = meaning_of(name)
        if kind == "token":
            return value if value < VOCABULARY // 2 else VOCABULARY // 2 + value % (VOCABULARY // 2)
        if kind == "vocabulary":
            return min(value, VOCABULARY)
        if kind == "window":
            return min(value, self.window)
        if kind == "layers":
            return self.new_layers if value == self.layers else min(value, max(1, self.new_layers // 2))
        if kind == "heads" and value in (self.heads, self.groups):
            return self.new_heads if value == self.heads else self.new_groups
        if kind in _MOST:
            return min(value, _MOST[kind])
        if kind == "as it is":
            return value
        if self.width and value % self.width == 0:
            return value // self.width * self.new_width
        return min(value, _SMALL)

    def _list(self, name: str, value: Any) -> Any:
        if self.layers and len(value) == self.layers:
            value = value[: self.new_layers]
        elif _names_layers(name, value):
            return type(value)(each for each in value if each < self.new_layers)
        return type(value)(self.smaller(name, each) for each in value)

    def _past_the_end(self, name: str, key: Any) -> bool:
        return "layer" in name and str(key).isdigit() and int(key) >= self.new_layers


def _parts(config: Any) -> Iterator[Any]:
    """Yield a config and all configs in it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _parts(value)


def _whole(config: Any, name: str) -> int:
    value = getattr(config, name, 0)
    return value if type(value) is int else 0


def _depth(config: Any, layers: int) -> int:
    """Return how many of the first layers include every kind, by the lists with one entry per layer and by the lists of
    layers."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple)) and value}
    kinds = [repr(each) for each in zip(*(v for v in lists.values() if len(v) == layers), strict=True)]
    firsts = [kinds.index(kind) for kind in set(kinds)]
    firsts += [min(value) for name, value in lists.items() if _names_layers(name, value)]
    needed = 1 + max(firsts, default=1)
    return min(layers, max(2, needed if needed <= _MOST_LAYERS else 2))


def _names_layers(name: str, value: Any) -> bool:
    return re.search("layer|idx", name) is not None and all(type(each) is int for each in value)


# ---- Can this model be read in pieces, in branches and after a rollback? The probe tries it when the model is loaded

_TEXT = 30  # tokens of the longer text
_RAGGED = 5  # the other text is shorter by this number
_ROOM = 10  # tokens that are read after a text
_WINDOW = 4  # tokens in the windows of a small copy
_BRANCHES = (-1, -1, 0, 1, 2)  # two branches: 0-2-4 and 1-3
_LONGER, _SHORTER = [0, 2, 4], [1, 3]


class ProbeText:
    """Sequences as a reader sees them."""

    def __init__(self, tokens: Tensor, lengths: list[int]) -> None:
        self.text = tokens
        self.lengths = lengths
        self.length = torch.tensor(lengths, device=tokens.device).view(-1, 1)
        self.histories = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        self.count = self.capacity = len(lengths)
        self.bound: int | None = None


class _DifferenceError(Exception):
    """Two logits that must be equal differ. The message says which."""


@torch.inference_mode()
def probe(lm: LanguageModel) -> None:
    """Compare logits through a slot cache with those of the model by itself, for the given model and for a small copy
    with small windows. Raise `UnsupportedError` if they differ, or if a window of the model could not be tried."""
    title = lm.title
    plain = copy.copy(lm)
    plain.runner = "eager"
    try:
        _alone(plain, _tokens(plain, 1)[0])
    except Exception as error:
        raise UnsupportedError(f"{title} cannot read a text by itself ({_gist(error)}).") from error
    _try(plain, title)
    if lm.reader().kernels is not None:
        _try(lm, title)
    small = next(small_models(type(lm.model), lm.model.config, _WINDOW), None)
    if small is not None:
        _try(_as_language_model(small, plain), f"A small copy of {title} with windows of {_WINDOW} tokens")
    elif wide := {name: tokens for name, tokens in windows(lm.model.config).items() if tokens > _TEXT}:
        name, tokens = next(iter(wide.items()))
        raise UnsupportedError(
            f"{title} has a window of {tokens} tokens ({name}), and no small copy of the model could be built to try "
            "it; the model is refused because its text could come out wrong."
        )


def _as_language_model(model: PreTrainedModel, other: LanguageModel) -> LanguageModel:
    """Return `other` with another model, which is not probed."""
    small = copy.copy(other)
    small.model, small.architecture = model, study(model)
    small.vocabulary = model.config.get_text_config(decoder=True).vocab_size
    small.context, small.layers = small.architecture.context, len(small.architecture.kinds)
    return small


def _try(lm: LanguageModel, title: str) -> None:
    try:
        _compare_even(lm)
        _compare_branches(lm)
    except _DifferenceError as difference:
        raise UnsupportedError(f"{title} {difference}; it is refused because its text could come out wrong.") from None
    except Exception as error:
        raise UnsupportedError(
            f"{title} cannot be read through a slot cache and a 4-D mask ({_gist(error)})."
        ) from error


def _compare_even(lm: LanguageModel) -> None:
    """Compare two texts of one length: the prompt and a draft, then two tokens and a draft, then one token."""
    ids = _tokens(lm, 2)
    length = ids.shape[1] - _ROOM
    wanted = [_alone(lm, row) for row in ids]
    for row in (0, 1):
        if not nearly_equal(lm, _alone(lm, ids[row, :length])[-1], wanted[row][length - 1]):
            raise _DifferenceError("gives a token other logits once more text follows it")
    reader: Any = lm.reader()
    start = reader.begin(ProbeText(ids, [length] * 2), 0, ids.shape[1] + _ROOM)
    for width, end, drafted in ((start, length, 3), (2, length + 2, 3), (1, length + 3, 0)):
        rows = ProbeText(ids, [end] * 2)
        seen = reader.extend(rows, width, ids[:, end : end + drafted] if drafted else None).logits
        reader.keep(rows, None)
        for row in (0, 1):
            _compare(lm, seen[row], wanted[row][end - 1 : end + drafted], "texts of one length")


def _compare_branches(lm: LanguageModel) -> None:
    """Compare two texts of different lengths with a tree after each. Keep the longer branch, and compare one token."""
    ids = _tokens(lm, 4)
    ids, drafted = ids[:2], ids[2:, : len(_BRANCHES)]
    length = ids.shape[1] - _ROOM
    lengths = [length, max(1, length - _RAGGED)]
    rows = ProbeText(ids, lengths)
    parents = torch.tensor([_BRANCHES] * 2, device=lm.device)
    reader: Any = lm.reader()
    width = reader.begin(rows, 0, ids.shape[1] + _ROOM)
    seen = reader.extend(rows, width, drafted, parents).logits
    reader.keep(rows, torch.tensor([_LONGER] * 2, device=lm.device))
    kept = ids.clone()
    for row, n in enumerate(lengths):
        kept[row, n : n + 3] = drafted[row, _LONGER]
    later = reader.extend(ProbeText(kept, [n + 4 for n in lengths]), 1).logits
    for row, n in enumerate(lengths):
        whole = _alone(lm, kept[row, : n + 4])
        other = _alone(lm, torch.cat([ids[row, :n], drafted[row, _SHORTER]]))
        nodes = [0, *(1 + node for node in _LONGER)]
        _compare(lm, seen[row, nodes], whole[n - 1 : n + 3], "a draft that branches")
        nodes = [1 + node for node in _SHORTER]
        _compare(lm, seen[row, nodes], other[n:], "a draft that branches")
        _compare(lm, later[row, -1], whole[-1], "a text after a branch was rolled back")


def _tokens(lm: LanguageModel, rows: int) -> Tensor:
    """Return random tokens [rows, T], without tokens that have a meaning in the config (image, padding, end)."""
    special = {
        value
        for config in {id(c): c for c in (lm.model.config, lm.model.config.get_text_config(decoder=True))}.values()
        for name, value in vars(config).items()
        if type(value) is int and meaning_of(name) == "token"
    }
    length = max(2, min(_TEXT, lm.context - _ROOM)) + _ROOM
    generator = torch.Generator().manual_seed(0)
    plain = torch.tensor([token for token in range(min(lm.logits, 4096)) if token not in special] or [0])
    return plain[torch.randint(0, len(plain), (rows, length), generator=generator)].to(lm.device)


def _alone(lm: LanguageModel, text: Tensor) -> Tensor:
    """Return the logits of a sequence [T] by the model itself, without mask and KV cache."""
    return lm.model(input_ids=text[None], use_cache=False).logits[0, :, : lm.logits].float()


def _compare(lm: LanguageModel, got: Tensor, wanted: Tensor, what: str) -> None:
    if not nearly_equal(lm, got, wanted):
        raise _DifferenceError(f"reads {what} differently through a slot cache and a 4-D mask than by itself")


def nearly_equal(lm: LanguageModel, got: Tensor, wanted: Tensor) -> bool:
    """Return whether logits are equal up to rounding in the dtype of the model."""
    slack = 1e-3 if lm.dtype in (torch.float32, torch.float64) else 0.1
    return torch.allclose(got.float(), wanted, atol=slack * float(wanted.std() + 1e-6), rtol=slack)


def _gist(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"
