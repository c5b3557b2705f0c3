"""Which parameters belong to the last blocks of a network."""

import torch
from torch import nn

from soseleto.models.trained_parts import last_blocks


def stacked(blocks: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(blocks)), nn.LayerNorm(3))


def test_the_last_blocks_and_what_follows() -> None:
    assert last_blocks(stacked(12), 2) == ("1.10.", "1.11.", "2.weight", "2.bias")
    assert last_blocks(stacked(2), 2) == ()  # they are all
    assert last_blocks(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), 1) == ()


def test_a_parameter_beside_the_list_does_not_stand_for_all() -> None:
    network = stacked(3)
    network.register_parameter("scale", nn.Parameter(torch.ones(3)))
    outer = nn.ModuleDict({"encoder": network})
    names = [name for name, _ in outer.named_parameters() if name.startswith(last_blocks(outer, 1))]
    assert names == ["encoder.1.2.weight", "encoder.1.2.bias", "encoder.2.weight", "encoder.2.bias"]


def test_the_longest_list_counts() -> None:
    network = nn.ModuleDict({"layers": stacked(4), "heads": nn.ModuleList(nn.Linear(3, 1) for _ in range(5))})
    found = last_blocks(network, 1)
    assert found[:3] == ("layers.1.3.", "layers.2.weight", "layers.2.bias")
    assert len(found) == 3 + 10  # and the heads


def test_blocks_that_are_not_trained_do_not_count() -> None:
    network = stacked(5)
    blocks = network[1]
    assert isinstance(blocks, nn.ModuleList)
    blocks[4].requires_grad_(False)
    assert last_blocks(network, 2) == ("1.2.", "1.3.", "2.weight", "2.bias")
    blocks[:3].requires_grad_(False)
    assert last_blocks(network, 2) == ()  # one is left
