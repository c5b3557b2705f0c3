"""``fit`` over tensors, arrays and Datasets, in both modes, with custom losses, and what bad input gets."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import soseleto
from experiments.table1 import corrected
from soseleto import Heads, Inputs
from soseleto.data import Examples, read_pair
from soseleto.defaults import DefaultMethod
from soseleto.models.architectures import mlp
from soseleto.pieces import running_mean
from soseleto.report import write_report
from soseleto.task.optimizers import sgd

N = 120


def points(n: int, seed: int, wrong: int = 0) -> Examples:
    """Points in the plane, two classes; ``wrong`` of the labels are flipped."""
    seeded = torch.Generator().manual_seed(seed)
    inputs = torch.rand(n, 2, generator=seeded) * 2 - 1
    truth = (inputs[:, 0] + inputs[:, 1] > 0).long()
    labels = truth.clone()
    labels[:wrong] = 1 - labels[:wrong]
    return Examples(inputs, labels, truth=truth)


def net(inputs: int = 2, outputs: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(inputs, outputs, hidden=8, layers=1)


def fit(**changes: Any) -> soseleto.Result:
    given: dict[str, Any] = {
        "model": net(), "source": points(N, 0, wrong=30), "target": points(20, 1), "epochs": 4, "batch_size": 16,
        "target_batch_size": 10, "lr": 0.1, "device": "cpu",
    }  # fmt: skip
    return soseleto.fit(**{**given, **changes})


@pytest.fixture(scope="module")
def trained() -> soseleto.Result:
    return fit()


class Pairs(Dataset[tuple[Tensor, int]]):
    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i >= len(self):
            raise IndexError
        return self.examples.inputs[i], int(self.examples.labels[i])


def test_result_has_a_weight_and_a_score_per_source_example() -> None:
    result = fit(epochs=40)
    assert result.weights.dtype == result.scores.dtype == torch.float32
    assert result.weights.shape == result.scores.shape == (N,)
    assert float(result.weights.min()) >= 0
    assert float(result.weights.max()) <= 1
    wrong = torch.arange(N) < 30
    assert float(result.weights[wrong].mean()) < float(result.weights[~wrong].mean()) - 0.3
    assert result.evaluate(points(500, 2))["accuracy"] > 90
    assert len(result.history) == 40
    assert result.predict(points(9, 3).inputs).shape == (9,)


@pytest.mark.parametrize(
    "form",
    [
        lambda e: (e.inputs, e.labels),
        lambda e: (e.inputs.numpy(), e.labels.numpy()),
        lambda e: TensorDataset(e.inputs, e.labels),
        Pairs,
    ],
    ids=["tensors", "arrays", "TensorDataset", "Dataset"],
)
def test_every_form_of_data_gives_the_same_run(form: Any, trained: soseleto.Result) -> None:
    source, target = points(N, 0, wrong=30), points(20, 1)
    found = fit(source=form(source), target=form(target))
    assert torch.equal(found.weights, trained.weights)


def test_repeatable_to_the_last_bit_and_the_global_random_state_is_untouched(trained: soseleto.Result) -> None:
    dropout = lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))  # noqa: E731
    torch.manual_seed(7)
    start = dropout().state_dict()
    results = []
    for noise in (1, 2):
        model = dropout()
        model.load_state_dict(start)
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        results.append(fit(model=model))
        assert torch.equal(torch.get_rng_state(), state)
    one, two = results
    assert torch.equal(one.weights, two.weights)
    assert torch.equal(one.scores, two.scores)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    for a, b in zip(one.history, two.history, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
    assert not torch.equal(fit(seed=1).weights, trained.weights)


def test_transfer_with_disjoint_classes() -> None:
    source = points(N, 0)
    target = points(30, 1)
    target = Examples(target.inputs, target.labels + 2 * (target.inputs[:, 0] > 0).long())  # four classes of its own
    trunk = nn.Sequential(nn.Linear(2, 16), nn.Tanh())
    result = fit(model=trunk, source=source, target=target, mode="transfer", epochs=60, lr=0.3)
    assert result.model(target.inputs).shape == (30, 4)
    assert result.model.trunk is trunk
    assert result.evaluate(target)["accuracy"] > 80


def test_regression_finds_the_outliers() -> None:
    def line(n: int, seed: int, off: int) -> Examples:
        seeded = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 3, generator=seeded)
        y = x @ torch.tensor([1.0, -2.0, 0.5])
        y[:off] += 6 * torch.sign(torch.randn(off, generator=seeded))
        return Examples(x, y)

    model = nn.Linear(3, 1)
    result = fit(
        model=model, source=line(N, 0, 30), target=line(20, 1, 0), loss=soseleto.squared_error, epochs=30, lr=0.05
    )
    off = torch.arange(N) < 30
    assert float(result.weights[off].mean()) < float(result.weights[~off].mean()) - 0.2
    assert result.evaluate(line(200, 5, 0))["loss"] < 0.5
    assert "accuracy" not in result.evaluate(line(200, 5, 0))
    assert result.predict(torch.randn(4, 3)).shape == (4, 1)


def test_progress_hears_events_in_order() -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    fit(progress=lambda event, record: heard.append((event, record)))
    names = [name for name, _ in heard if name != "step"]
    assert names == ["start", "epoch", "epoch", "epoch", "epoch", "close", "end"]
    step = next(record for name, record in heard if name == "step")
    assert {"epoch", "step", "steps", "source_loss", "target_loss"} <= set(step)


def test_history_holds_the_means_of_the_steps_and_the_learning_rate() -> None:
    """Without any learning the loss of an epoch is the source's mean loss, whatever the number of batches."""
    model, source = net(), points(N, 0, wrong=30)
    with torch.no_grad():
        expected = float(F.cross_entropy(model(source.inputs), source.labels))
    records = fit(model=model, lr=1e-9, batch_size=30, epochs=2, method=soseleto.Soseleto()).history
    assert [record["source_loss"] for record in records] == pytest.approx([expected] * 2, rel=1e-4)
    assert [record["lr"] for record in records] == pytest.approx([5e-10, 0.0])  # half-way down, and at the end
    short = fit(epochs=2, batch_size=50).history  # the third batch is short, and a step like the others
    assert (short[0]["step"], short[0]["lr"]) == (3, pytest.approx(0.05))


def test_a_transfers_source_is_classified_by_its_own_head() -> None:
    source, target = points(N, 0), points(20, 1)
    both = Heads(source=nn.Linear(2, 3), target=nn.Linear(2, 2))
    for head, best in ((both.source, 2), (both.target, 0)):
        with torch.no_grad():
            head.weight.zero_()  # type: ignore[union-attr]
            head.bias.copy_(torch.eye(len(head.bias))[best] * 50)  # type: ignore[union-attr, arg-type]
    result = fit(model=nn.Identity(), source=source, target=target, mode="transfer", heads=both, epochs=1, lr=1e-6)
    assert set(result.ranking()["predicted_label"]) == {2}
    assert set(result.predict(target.inputs).tolist()) == {0}


def test_ranking_is_best_first_with_the_truth(trained: soseleto.Result) -> None:
    table = trained.ranking()
    assert list(table)[:5] == ["id", "label", "weight", "score", "visits"]
    assert np.all(np.diff(table["score"]) <= 0)
    assert len(table["id"]) == N
    assert set(table["visits"]) == {4}
    assert table["wrong"].sum() == 30
    assert table["wrong"][: N // 2].sum() < table["wrong"][N // 2 :].sum()
    assert "..." in repr(table)


def test_an_example_without_a_true_label_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    source = points(N, 0, wrong=30)
    source.truth[20:] = -1
    source = replace(source, classes=("ant", "bee"))
    result = fit(source=source, target=named(20, 1), epochs=1, out=tmp_path / "run")
    assert {name: group["count"] for name, group in result.history[-1]["groups"].items()} == {"wrong": 20}
    table = result.ranking()
    assert table["wrong"].sum() == 20
    assert (table["true_label"] == "").sum() == N - 20
    assert "true labels are known" not in write_report(tmp_path / "run").read_text()
    assert torch.equal(corrected(source).labels[20:], source.labels[20:])
    again = read_pair(source, named(20, 1), mode="noisy").source
    assert torch.equal(again.truth, source.truth)


def test_nan_stops_with_the_ids_and_keeps_the_run_folder(tmp_path: Path) -> None:
    source = points(N, 0)
    source.inputs[17] = float("nan")
    source = Examples(source.inputs, source.labels, ids=tuple(f"photo-{i}" for i in range(N)))
    model = net()
    with pytest.raises(soseleto.errors.TrainingError, match=r"photo-17.* is NaN or infinite in epoch 1"):
        fit(model=model, source=source, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["epochs"] == 4
    assert "photo-17" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert all(p.isfinite().all() for p in model.parameters())


def float_labels(n: int, seed: int) -> Examples:
    examples = points(n, seed)
    return Examples(examples.inputs, examples.labels.float())


def large_labels(n: int, seed: int) -> Examples:
    examples = points(n, seed)
    return Examples(examples.inputs, examples.labels + 5)


def named(n: int, seed: int) -> Examples:
    examples = points(n, seed)
    return Examples(examples.inputs, examples.labels, classes=("ant", "bee"))


BAD = [
    ({"source": float_labels(N, 0)}, "source labels are of float type"),
    ({"target": large_labels(20, 0)}, r"a target label is 6, but the model has 2 outputs \(labels 0 to 1\)"),
    ({"source": named(N, 0), "target": named(20, 1), "model": net(outputs=3)}, "3 outputs, but the source names 2"),
    ({"target": (torch.randn(20, 3), torch.zeros(20, dtype=torch.int64))}, "fails in evaluation mode on target"),
    ({"target": (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))}, "empty"),
    ({"batch_size": 500}, "batch_size is 500, but the source has only 120 examples"),
    ({"target_batch_size": 21}, "target_batch_size=20 or less"),
    ({"source": float_labels(N, 0), "target": float_labels(20, 1), "loss": soseleto.squared_error},
     r"outputs of shape \(2, 2\) and labels of shape \(2,\): give the model as many outputs"),
    ({"loss": "cross_entropy"}, r"loss must be a function, .* got 'cross_entropy': write loss=soseleto\.cross_entropy"),
    ({"method": "soseleto"}, r"method must be an object, got 'soseleto': write method=soseleto\.Soseleto\(\)"),
    ({"method": soseleto.Soseleto(direction=running_mean(layers=["0."]))}, r"layers must be a tuple .* got \['0\.'\]"),
    ({"epochs": 2.5}, r"epochs must be a whole number of at least 1, got 2\.5: write epochs=20"),
    ({"batch_size": 2.5}, r"batch_size must be a whole number of at least 1, got 2\.5"),
    ({"target_batch_size": "8"}, r"target_batch_size must be a whole number of at least 1, got '8'"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, r"no parameter of the model is trainable: write model"),
    ({"lr": None, "optimizer": torch.optim.LBFGS}, r"LBFGS evaluates the loss itself, .* optimizer=functools.partial"),
    ({"lr": 0.0}, "lr must be above 0"),
    ({"mode": "nosy"}, "did you mean 'noisy'"),
    ({"device": "gpu"}, "unknown device 'gpu'"),
    ({"loss": lambda o, y: F.cross_entropy(o, y)}, "reduction='none'"),
    ({"heads": soseleto.Heads(source=nn.Linear(2, 2))}, "no effect in noisy mode"),
    ({"loss": (soseleto.cross_entropy, soseleto.cross_entropy)}, "a pair of losses has no effect in noisy mode"),
    ({"inputs": Inputs(augment=(None,))}, r"one Augment for both sides, or a pair \(source, target\)"),
    ({"optimizer": partial(sgd, lr=0.1)}, r"lr has no effect beside optimizer=...: give it there"),
    ({"target_batch_size": soseleto.Balanced(0)}, "target_batch_size must be a whole number of at least 1, got 0"),
    ({"probes": 1.5}, "probes must be a share of the target between 0 and 1, or 'auto', got 1.5"),
    ({"progress": 3}, r"progress takes True, a function progress\(event, record\), .* got int"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_gets_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(soseleto.SoseletoError, match=words) as caught:
        fit(**changes)
    assert "\n" not in str(caught.value)


def test_the_core_imports_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = """
import sys, torch
extra = {"pyarrow", "safetensors", "typer", "rich", "jinja2", "matplotlib", "PIL", "scipy", "sklearn", "pandas"}
sys.modules |= dict.fromkeys(extra)  # importing one raises ImportError
import soseleto
x, y = torch.randn(40, 2), torch.randint(2, (40,))
result = soseleto.fit(torch.nn.Linear(2, 2), (x, y), (x[:8], y[:8]), epochs=2)
assert result.weights.shape == (40,)
try:
    soseleto.data.as_examples(sys.argv[1], name="source")
except soseleto.errors.DataError as error:
    print(error)
"""
    (tmp_path / "a.csv").write_text("a,label\n1,2\n")
    command = [sys.executable, "-c", script, str(tmp_path / "a.csv")]
    said = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    assert "needs pyarrow, which is not installed: type pip install" in said


def test_channels_last_is_a_matter_of_layout_alone() -> None:
    """A model laid out channels last gets its images so, and learns the same."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (48,), generator=generator)
    seen: list[bool] = []

    def train(layout: torch.memory_format) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)).double()
        model = model.to(memory_format=layout)
        model[0].register_forward_pre_hook(
            lambda _, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
        )
        result = soseleto.fit(model, (images, labels), (images[:16], labels[:16]), epochs=2, batch_size=16, lr=0.05)
        return result.scores

    plain = train(torch.contiguous_format)
    assert not any(seen)
    seen.clear()
    torch.testing.assert_close(train(torch.channels_last), plain, rtol=1e-5, atol=1e-6)
    assert seen
    assert all(seen)


def frozen_norm() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("whole", [True, False], ids=["in evaluation mode as a whole", "one module"])
def test_a_frozen_norm_stays_in_evaluation_mode(whole: bool) -> None:
    """``eval()`` of the user's is kept, also after an evaluation in the middle of the training."""
    model = frozen_norm()
    (model if whole else model[1]).eval()
    before = model[1].running_mean.clone()  # type: ignore[operator, union-attr]
    fit(model=model, epochs=2)
    assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]
    assert [module.training for module in model] == ([False] * 4 if whole else [True, False, True, True])


def test_a_trainable_norm_of_a_loaded_model_is_trained() -> None:
    model = frozen_norm().requires_grad_(True).eval()
    before = model[1].running_mean.clone()  # type: ignore[operator, union-attr]
    fit(model=model, epochs=1)
    assert not torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]


class Centred(nn.Module):
    begun = False

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.begun else x


def test_a_change_of_engine_is_among_the_messages_with_its_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), Centred(), nn.Tanh(), nn.Linear(8, 2))

    def begin(event: str, record: dict[str, Any]) -> None:
        model[1].begun = model[1].begun or event == "epoch"  # type: ignore[union-attr]

    given: dict[str, Any] = {"out": tmp_path / "run", "method": DefaultMethod(all_layers=True), "progress": begin}
    result = fit(model=model, epochs=2, **given)
    changes = [text for text in result.messages if "slower" in text]
    assert len(changes) == 1
    steps = int(result.history[0]["step"])
    expected = f"from step {steps + 1} on alignments by the slower forward engine, because the layerwise engine"
    assert changes[0].startswith(expected)
    assert changes[0] in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert result.engine == "forward"
