"""What is trained of a pretrained network: all of it, its last blocks, its head, or LoRA adapters."""

from __future__ import annotations

from typing import Any

from torch import nn

from soseleto.errors import UsageError, counted, need

LAST = "last:"


def check_train(train: str) -> None:
    blocks = train.removeprefix(LAST)
    if train not in ("all", "head") and not (train.startswith(LAST) and blocks.isdecimal() and int(blocks) > 0):
        raise UsageError(f"train must be all, head or last:N with N at least 1, got {train!r}: write --train last:2.")


def freeze(network: nn.Module, train: str) -> None:
    """Parameters outside of what is trained get no gradient; the head comes later."""
    if train == "all":
        return
    kept = _last(network, int(train.removeprefix(LAST))) if train.startswith(LAST) else set()
    for name, p in network.named_parameters():
        p.requires_grad_(name in kept)


def last_blocks(network: nn.Module, wanted: int) -> tuple[str, ...]:
    """What the names of their parameters begin with, and of those that follow; empty if no more blocks are trained.

    Example:
        >>> blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        >>> last_blocks(nn.Sequential(blocks, nn.Linear(3, 2)), 2)
        ('0.2.', '0.3.', '1.weight', '1.bias')
    """
    found = _longest_list(network)
    if found is None:
        return ()
    name, blocks = found
    trained = [at for at, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters())]
    if len(trained) <= wanted:
        return ()
    return (*(f"{name}.{at}." for at in trained[-wanted:]), *_by_longest_list(network)[-1])


def _last(network: nn.Module, wanted: int) -> set[str]:
    """The parameters of the last blocks, and of all that comes after them."""
    groups = _by_matcher(network) if hasattr(network, "group_matcher") else _by_longest_list(network)
    blocks = len(groups) - 2  # beside the stem and the end
    if wanted > blocks:
        raise UsageError(f"the network has {counted(blocks, 'block')}, not {wanted}: write --train all, or fewer.")
    return {name for group in groups[-1 - wanted :] for name in group}


def _by_matcher(network: Any) -> list[list[str]]:
    """Stem, blocks and end of a network of timm, which says so itself."""
    helpers = need("timm.models", to="training the last blocks")
    found: dict[int, list[str]] = helpers.group_parameters(network, network.group_matcher(coarse=False))
    return [found[key] for key in sorted(found)]


def _by_longest_list(network: nn.Module) -> list[list[str]]:
    """Stem, blocks and end by the ModuleList with the most parameters; the names are in the order of the layers."""
    found = _longest_list(network)
    if found is None:
        raise UsageError(f"{type(network).__name__} has no list of blocks: write --train all or --train head.")
    name, blocks = found
    names = [key for key, _ in network.named_parameters()]
    inside = [[key for key in names if key.startswith(f"{name}.{at}.")] for at in range(len(blocks))]
    begin, end = names.index(inside[0][0]), names.index(inside[-1][-1])
    return [names[:begin], *inside, names[end + 1 :]]


def _longest_list(network: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The ModuleList with the most parameters, by name."""
    lists = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    return max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()), default=None)


def add_lora(network: nn.Module, rank: int, head: str) -> nn.Module:
    """Adapters on every linear layer but the head, or on convolutions where there is none; only these are trained."""
    peft = need("peft", to="LoRA")
    layers = {name: module for name, module in network.named_modules() if name != head}
    names = [name for name, module in layers.items() if isinstance(module, nn.Linear)]
    names = names or [name for name, m in layers.items() if isinstance(m, nn.Conv2d) and m.groups == 1]
    for p in network.parameters():
        p.requires_grad_(False)
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
    adapted: nn.Module = peft.inject_adapter_in_model(config, network)
    return adapted
