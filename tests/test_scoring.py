"""score against one gradient per example, interrupted, on two processes, and at the checkpoints of a real Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import soseleto
from ranks import together
from small_tasks import CLASSES, WIDTH, net
from soseleto import scoring
from soseleto.errors import DataError, UsageError
from soseleto.parallel.reducer import Reducer

N = 10
Examples = list[tuple[Tensor, Tensor]]


def examples(n: int = N, seed: int = 1) -> Examples:
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTH, generator=seeded, dtype=torch.float64)
    return list(zip(x, torch.randint(CLASSES, (n,), generator=seeded), strict=True))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def gradient_of(model: nn.Module, some: Examples) -> dict[str, Tensor]:
    total = torch.stack([loss(model, (x[None], y[None]))[0] for x, y in some]).mean()
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(total, list(model.parameters())), strict=True))


def oracle(model: nn.Module, pool: Examples, target: Examples, scaled: Callable[[str, Tensor], Tensor]) -> Tensor:
    """One backward pass per example."""
    along = {name: scaled(name, g) for name, g in gradient_of(model, target).items()}
    return torch.stack([sum((g * along[k]).sum() for k, g in gradient_of(model, [one]).items()) for one in pool])  # type: ignore[misc]


def plain(name: str, g: Tensor) -> Tensor:
    return g


TARGETS = {"first": examples(3, seed=2), "second": examples(5, seed=3)}
scored = partial(soseleto.score, targets=TARGETS, loss=loss, batch_size=3)


def test_alignments_are_exact_and_the_model_is_left_as_it_was() -> None:
    model, pool = net(), examples()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = scored(model, pool)
    expected = torch.stack([oracle(model, pool, target, plain) for target in TARGETS.values()])
    torch.testing.assert_close(scores.alignments, expected[None].float())
    values = expected / expected.square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(scores.values, values.float())
    assert torch.equal(scores.top(2, "second"), values[1].topk(2).indices)
    assert torch.equal(scores.top(4), values.amax(0).topk(4).indices)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def trained(model: nn.Module, steps: int = 3) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        losses = [loss(model, (x[None], y[None])) for x, y in examples(seed=10 + step)]
        torch.cat(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def scaled(name: str, g: Tensor, of: Any) -> Tensor:
    """As Adam steps, by its states."""
    corrected = of[name]["exp_avg_sq"] / (1.0 - 0.999 ** float(of[name]["step"]))
    return 0.05 * g / (corrected.sqrt() + 1e-8)


def test_adams_own_scaling_at_checkpoints(tmp_path: Path) -> None:
    model, pool, expected, folders = net(), examples(), [], []
    for steps in (2, 4):
        at = net()
        optimizer = trained(at, steps)
        folders.append(tmp_path / str(steps))
        folders[-1].mkdir()
        save_file(at.state_dict(), folders[-1] / "model.safetensors")
        torch.save(optimizer.state_dict(), folders[-1] / "optimizer.pt")
        of = {name: optimizer.state[p] for name, p in at.named_parameters()}

        expected.append(torch.stack([oracle(at, pool, target, partial(scaled, of=of)) for target in TARGETS.values()]))
    empty = torch.optim.Adam(model.parameters(), lr=1.0)
    scores = scored(model, pool, checkpoints=folders, optimizer=empty)
    torch.testing.assert_close(scores.alignments, torch.stack(expected).float())
    assert not empty.state
    assert empty.param_groups[0]["lr"] == 1.0
    torch.testing.assert_close(dict(model.state_dict()), dict(net().state_dict()), rtol=0, atol=0)
    now = trained(model)
    of = {name: now.state[p] for name, p in model.named_parameters()}
    torch.testing.assert_close(
        scored(model, pool, optimizer=now).alignments[0, 0].double(),
        oracle(model, pool, TARGETS["first"], partial(scaled, of=of)),
    )


class Killed(Exception):
    pass


def test_an_interrupted_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "PER_PART", 1)
    model, pool, calls = net(), examples(), []

    def counting(model: nn.Module, batch: tuple[Tensor, Tensor], most: int) -> Tensor:
        calls.append(len(batch[0]))
        if len(calls) > most:
            raise Killed
        return loss(model, batch)

    whole = scored(model, pool).alignments
    with pytest.raises(Killed):
        scored(model, pool, loss=partial(counting, most=9), out=tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.npy"))
    assert 0 < len(files) < 4
    assert not list(tmp_path.glob("*.part"))
    calls.clear()
    again = scored(model, pool, loss=partial(counting, most=1000), out=tmp_path)
    torch.testing.assert_close(again.alignments, whole)
    calls.clear()
    torch.testing.assert_close(scored(model, pool, loss=partial(counting, most=0), out=tmp_path).alignments, whole)


def test_a_folder_of_other_scores_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = net(), examples()
    whole = scored(model, pool, out=tmp_path).alignments
    more = {"first": TARGETS["first"][:2], "second": TARGETS["second"]}
    for other in ({"batch_size": 4}, {"optimizer": trained(net())}, {"targets": more}):
        with pytest.raises(UsageError, match="has other scores"):
            scored(model, pool, out=tmp_path, **other)
    trained(model)
    with pytest.raises(UsageError, match="has other scores"):
        scored(model, pool, out=tmp_path)
    frozen = net()
    frozen[0].requires_grad_(False)
    with pytest.raises(UsageError, match="has other scores"):
        scored(frozen, pool, out=tmp_path)
    monkeypatch.chdir(tmp_path)  # whose files are not those of a call without a folder
    torch.testing.assert_close(scored(net(), pool).alignments, whole, rtol=0, atol=0)


def test_the_gradient_of_a_long_target_is_summed_in_float32() -> None:
    """Of equal examples, whose mean gradient is that of one, however often it is added."""
    (example,) = examples(1)
    example, model = (example[0].bfloat16(), example[1]), net().bfloat16()
    one, many = (soseleto.score(model, [example], {"": [example] * n}, loss=loss, batch_size=1) for n in (1, 1024))
    torch.testing.assert_close(many.alignments, one.alignments, rtol=0.02, atol=0)


def part(reducer: Reducer, out: Path) -> list[Tensor]:
    """Kept in files, and in memory."""
    scoring.PER_PART = 1
    return [scored(net(), examples(), out=kept).alignments for kept in (out, None)]


@pytest.mark.skipif(os.name != "posix", reason="processes are started as POSIX does")
def test_two_processes_score_a_part_each(tmp_path: Path) -> None:
    right = scored(net(), examples()).alignments
    for answer in together(2, part, tmp_path):
        for found in answer:
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize("adapter", [False, True])
def test_checkpoints_of_the_trainer(tmp_path: Path, adapter: bool) -> None:
    """Tied embeddings, and adapters: the scores at a checkpoint are those of the model that was trained."""
    transformers = pytest.importorskip("transformers")
    from soseleto.integrations.huggingface import default_loss

    def made() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=50, tie_word_embeddings=True, **sizes)
        model = transformers.LlamaForCausalLM(config)
        if not adapter:
            return model
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))

    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (6, 5))]
    model = made()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, save_steps=2, report_to=[], use_cpu=True,
        learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=texts).train()
    of_texts = partial(soseleto.score, pool=texts, targets={"one": texts[:2]}, loss=default_loss(model), batch_size=4)
    found = of_texts(made(), checkpoints=[tmp_path / "checkpoint-2"])
    torch.testing.assert_close(found.alignments, of_texts(model).alignments)
    assert not torch.allclose(found.alignments, of_texts(made()).alignments)


def test_an_adapter_with_fewer_layers_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(*layers: str) -> Any:
        return peft.get_peft_model(net(), peft.LoraConfig(target_modules=list(layers), init_lora_weights=False))

    adapted("0").save_pretrained(tmp_path)
    assert scored(adapted("0"), examples(), checkpoints=[tmp_path]).alignments.isfinite().all()
    with pytest.raises(DataError, match=r"does not fit the model, as .*2\.lora"):
        scored(adapted("0", "2"), examples(), checkpoints=[tmp_path])


def test_what_is_refused(tmp_path: Path) -> None:
    model, pool = net(), examples()
    with pytest.raises(UsageError, match="needs examples in the pool and in every target"):
        soseleto.score(model, pool, {"none": []}, loss=loss)
    with pytest.raises(UsageError, match="there is no target 'third': choose from first, second"):
        scored(model, pool).top(1, "third")
    with pytest.raises(UsageError, match="k must be from 1 to 10, the size of the pool, got 11"):
        scored(model, pool).top(11)
    with pytest.raises(DataError, match="neither a file nor a folder with model"):
        scored(model, pool, checkpoints=[tmp_path])
    save_file({"0.weight": torch.zeros(6, WIDTH)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"does not fit the model, as '0.bias'"):
        scored(model, pool, checkpoints=[tmp_path])
    save_file({**net().state_dict(), "0.bias": torch.zeros(5)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"does not fit the model \(.*size mismatch for 0.bias"):
        scored(model, pool, checkpoints=[tmp_path])
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"optimizer.pt is missing: leave optimizer out"):
        scored(model, pool, checkpoints=[tmp_path], optimizer=trained(net()))
    torch.testing.assert_close(dict(model.state_dict()), dict(net().state_dict()), rtol=0, atol=0)
