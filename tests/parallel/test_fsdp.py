"""Models split over ranks by fully_shard train to the same result as a plain model in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from parallel.test_ranks import Reshaped, message, points, require_close, require_words, terminate, train
from ranks import together
from small_tasks import ask_at
from soseleto.methods import Ordinary
from soseleto.parallel.reducer import Reducer, Single
from soseleto.pieces import label_doubt, preconditioned, target_share
from soseleto.run_folder.folder import RunFolder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are started and killed as POSIX does")


class Mixing(nn.Module):
    """Its examples act on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0)


def net(*more: nn.Module) -> nn.Sequential:
    """With sizes that do not divide evenly over two ranks."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Tanh())
    return nn.Sequential(first, Reshaped(), nn.Linear(7, 5), *more, nn.Tanh(), nn.Linear(5, 3)).double()


def shard(model: nn.Sequential, ranks: int) -> nn.Sequential:
    """Three groups of parameters: the first block, the middle layer, and the others."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def train_sharded(reducer: Reducer | None, precise: bool = True, **changes: Any) -> dict[str, Any]:
    model = net() if precise else net().float()
    model = model if reducer is None else shard(model, reducer.ranks)
    fewer = {"epochs": 1, "source": points(25, 0)}  # the last of 4 batches has one example: a rank has none
    given = {"model": model, "method": soseleto.Soseleto()}
    found = train(reducer, **{**given, **fewer, **changes})
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


CASES: dict[str, dict[str, Any]] = {
    "layerwise": {"method": soseleto.Soseleto(engine="layerwise"), "epochs": 2},
    "auto, Adam": {"optimizer": adam, "method": soseleto.Soseleto(direction=preconditioned())},
    "micro-batches": {"compute": {"micro_batch_size": 2}},
    "target share": {"method": soseleto.Soseleto(gradients=target_share(0.3))},
    "float32": {"method": soseleto.Soseleto(engine="layerwise"), "precise": False},
    "labels doubted": {
        "method": soseleto.Soseleto(source_loss=label_doubt(), initial_weight=0.7, gradients=target_share(0.3))
    },
    "ordinary": {"method": Ordinary()},
    "transfer, target's share": {"mode": "transfer", "method": soseleto.Soseleto(gradients=target_share(0.5))},
}


def train_all(reducer: Reducer | None) -> dict[str, Any]:
    return {name: train_sharded(reducer, **case) for name, case in CASES.items()}


def test_a_sharded_model_trains_as_a_plain_one() -> None:
    """8 steps with the layerwise engine and 4 in the other cases; some parts of a batch are empty."""
    alone = train_all(None)
    for answer in together(2, train_all):
        assert isinstance(answer, dict), answer
        for name in CASES:
            require_close(alone[name], answer[name], 1e-3 if name == "float32" else 1e-6)


def in_shards(reducer: Reducer) -> set[tuple[int, ...]]:
    """(Whole length, length on this rank) of every tensor of a parameter's size that is kept between steps."""
    states: list[Any] = []

    class Seen(soseleto.Soseleto):
        def init(self, task: Any) -> Any:
            states.append(super().init(task))
            return states[0]

    model = shard(net(), reducer.ranks)
    train(reducer, model=model, method=Seen(), epochs=1, optimizer=adam)
    (state,) = states
    moments = [m for its in state.optimizer.state.values() for m in its.values() if m.ndim]
    assert len(moments) == 2 * len(list(model.parameters()))
    kept = [*model.parameters(), *state.pieces["direction"]["means"].values(), *moments]
    return {(len(tensor), len(tensor.to_local())) for tensor in kept}


def test_nothing_as_large_as_the_model_is_kept_whole() -> None:
    first, second = together(2, in_shards)
    assert first == {(7, 4), (5, 3), (3, 2)}
    assert second == {(7, 3), (5, 2), (3, 1)}


def stopped_after(reducer: Reducer | None, out: str, steps: int) -> Any:
    asked = reducer is None or reducer.rank == 1
    return train_sharded(reducer, epochs=2, out=out, optimizer=ask_at(steps if asked else 0, terminate))


@pytest.mark.long
def test_a_sharded_run_resumes(tmp_path: Path) -> None:
    whole, out = train_sharded(None, epochs=2, optimizer=ask_at(0, terminate)), str(tmp_path / "run")
    for answer in together(2, stopped_after, out, 5):
        assert answer[0] == "Interrupted", answer
    for answer in together(3, stopped_after, out, 0):
        require_close(whole, answer)
    model = net()
    model.load_state_dict(RunFolder(out).model_state())
    torch.testing.assert_close(model[2].weight.detach(), whole["model 2.weight"], rtol=1e-6, atol=1e-6)


def refused(reducer: Reducer) -> list[str]:
    cases: list[dict[str, Any]] = [
        *({"method": soseleto.Soseleto(engine=engine)} for engine in ("forward", "double_backward", "loop")),
        {"model": shard(net(Mixing()), 2)},
        {"reducer": None},
        {"mode": "transfer", "heads": soseleto.Heads(source=nn.Linear(3, 3).double())},
    ]
    return [message(**{"reducer": reducer, "model": shard(net(), 2), "epochs": 1, **changes}) for changes in cases]


def test_unsupported_settings_of_a_sharded_model_are_refused() -> None:
    for answer in together(2, refused):
        require_words(
            answer,
            "EngineError: the model is sharded (fully_shard), where the forward engine cannot work",
            "EngineError: the model is sharded (fully_shard), where the double_backward engine cannot work",
            "EngineError: the model is sharded (fully_shard), where the loop engine cannot work",
            "is not exact for this sharded model: examples of a batch act on each other",
            "UsageError: this is one of 2 processes (WORLD_SIZE is set, as by torchrun), and without a reducer",
            "UsageError: the parameter 'source_head.weight' is not sharded over all 2 ranks",
        )


class Reader(nn.Module):
    """Texts, as language models read them: a table of positions, and a norm whose scale starts from zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(20, 6, padding_idx=0), nn.Embedding(12, 6)
        self.scale, self.first, self.last = nn.Parameter(torch.zeros(6)), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = self.first(x / x.norm(dim=-1, keepdim=True)).tanh() * (1.0 + self.scale.float())
        here = (ids > 0).unsqueeze(-1)
        return self.last((x * here).sum(1) / here.sum(1))


def reading_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def texts(length: int, seed: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    return torch.randint(1, 20, (4, length), generator=seeded), torch.randint(3, (4,), generator=seeded)


def read(reducer: Reducer) -> dict[str, Any]:
    """A loop that accumulates over two calls; the texts of rank 1 are twice as long as those of rank 0."""
    from torch.distributed.fsdp import fully_shard

    model, is_sharded = Reader(), reducer.ranks > 1
    for part in (model.words, model.first, model) if is_sharded else ():
        fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (reducer.ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    selection = soseleto.Selection(model, n_source=16, loss=reading_loss, optimizer=optimizer, reducer=reducer)
    for call in range(4):
        index = torch.arange(8) + 8 * (call % 2)
        batches = []
        for seed in (call % 2, 10 + call):
            parts = [texts(length, 2 * seed + at) for at, length in enumerate((5, 10))]
            if not is_sharded:
                padded = torch.cat([nn.functional.pad(ids, (0, 10 - ids.shape[1])) for ids, _ in parts])
                parts = [(padded, torch.cat([labels for _, labels in parts]))]
            batches.append(parts[reducer.rank])
        if is_sharded:  # as a loop that accumulates would write
            model.set_requires_gradient_sync(call % 2 == 1)  # type: ignore[operator]
            model.set_reshard_after_backward(call % 2 == 1)  # type: ignore[operator]
        with torch.no_grad():
            model(batches[1][0])  # leaves the root's parameters whole
        mine = slice(None) if not is_sharded else slice(4 * reducer.rank, 4 * reducer.rank + 4)
        selection.backward(*batches, index=index[mine], scale=0.5)
        if call % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    found = {"weights": selection.weights, "scores": selection.scores, "norm": norm, **model.state_dict()}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def test_a_loop_of_texts_accumulates_and_clips_as_in_one_process() -> None:
    alone = read(Single())
    assert float(alone["norm"]) > 0.1
    for answer in together(2, read):
        assert isinstance(answer, dict), answer
        require_close(alone, answer, 1e-4)
