"""What heads remember of every place of the text, and the layers they are made of."""

from __future__ import annotations

import torch

from paceline.drafters.heads.base import PlaceStore
from paceline.models.heads.head_layers import BySlot, DecoderLayer, LayerConfig, Scratch, alone
from paceline.models.slot_cache import SlotCache, chain_mask


def test_places_move_with_their_rows() -> None:
    store = PlaceStore(1, torch.float64, torch.device("cpu"))
    states = torch.arange(1.0, 7.0).view(2, 3, 1)
    position = torch.tensor([[0, 1, 2], [4, 5, 6]])
    store.write(slice(1, 3), position, states, 7)
    assert store.at(slice(1, 3), position).flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert store.at(slice(0, 1), torch.tensor([[-1, 0, 99]])).flatten().tolist() == [0, 0, 0]
    store.reorder([2, 1, 1])
    assert store.at(slice(0, 3), torch.tensor([[4], [1], [2]])).flatten().tolist() == [4, 2, 3]
    store.release(0, 2)
    assert store.at(slice(0, 3), torch.tensor([[2], [1], [2]])).flatten().tolist() == [3, 2, 0]


def test_what_was_never_read_does_not_stay_nan() -> None:
    """A memory made of one NaN would be NaN for good."""
    store = PlaceStore(2, torch.float32, torch.device("cpu"))
    store.write(slice(0, 1), torch.tensor([[0]]), torch.full((1, 1, 2), float("nan")), 1)
    assert store.at(slice(0, 1), torch.tensor([[0]])).flatten().tolist() == [0, 0]


def test_a_layer_says_the_same_by_slot_and_in_one_pass() -> None:
    """A tree read node by node, below texts of different length, against each of its paths read as a text."""
    torch.manual_seed(0)
    layer = DecoderLayer(LayerConfig(16, 4, 2, 24), 10).double()
    lengths, parents = [5, 2], torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 2]])
    seen, stream = torch.randn(2, 9, 10, dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64)
    cache = SlotCache()
    cache.reserve(2, 9)
    remember = BySlot(cache, 0)
    position = torch.arange(5).expand(2, 5)
    cache.set_next_write(slice(0, 2), 0, 5, 0)
    layer(seen[:, :5], stream[:, :5], position, chain_mask(position, 5), remember)  # the second text is shorter
    scratch = Scratch(torch.tensor(lengths).view(2, 1), 5)
    message = []
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        slots, position, mask, visible = scratch.add(stop - start, parents[:, start:stop])
        cache.set_next_write(slice(0, 2), slots, visible, 0)
        nodes = slice(5 + start, 5 + stop)
        message.append(layer(seen[:, nodes], stream[:, nodes], position, mask, remember))
    found = torch.cat(message, 1)
    for row, length in enumerate(lengths):
        for node in range(4):
            path, at = [], node
            while at >= 0:
                path.insert(0, 5 + at)
                at = int(parents[row, at])
            places = [*range(length), *path]
            position = torch.arange(len(places)).unsqueeze(0)
            mask = chain_mask(position, len(places))
            whole = layer(seen[row : row + 1, places], stream[row : row + 1, places], position, mask, alone)
            torch.testing.assert_close(found[row, node], whole[0, -1])
