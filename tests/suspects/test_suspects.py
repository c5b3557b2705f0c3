"""Probes among the source, calibrated probabilities, and suspects with estimated precision and recall."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto.data import Examples, LazyDataset, symmetric
from soseleto.data.feeding import make_prepare
from soseleto.errors import UsageError
from soseleto.models.architectures import mlp
from soseleto.report import write_report
from soseleto.report.export import describe_list
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import about_unknown, is_suspect
from soseleto.suspects.audit import draw
from soseleto.suspects.cross_fit import Judgement
from soseleto.suspects.probes import plant
from soseleto.suspects.rates import Estimate, judge
from soseleto.suspects.suspects import Evidence, Suspects
from soseleto.training.data import Data, wrong_share
from zoo import Lambda

CLASSES = 4


def quadrants(n: int, seed: int, wrong: float = 0.0) -> Examples:
    """Points in the plane, their class the quadrant; a share of the labels is flipped to any other."""
    inputs = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    truth = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    return Examples(inputs, symmetric(truth, wrong, classes=CLASSES, seed=seed).labels, truth=truth)


def fit(**changes: Any) -> soseleto.Result:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(2, CLASSES)
    given: dict[str, Any] = {
        "model": model, "source": quadrants(1500, 0, 0.3), "target": quadrants(200, 1), "epochs": 8, "lr": 0.1,
        "batch_size": 64, "probes": "auto", "device": "cpu",
    }  # fmt: skip
    return soseleto.fit(**{**given, **changes})


def truth_of(found: Suspects, wrong: Tensor) -> tuple[float, float]:
    """True precision and recall."""
    hits = float((found.is_suspect & wrong).sum())
    return hits / len(found), hits / float(wrong.sum())


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> soseleto.Result:
    return fit(out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def wrong() -> Tensor:
    source = quadrants(1500, 0, 0.3)
    return source.labels != source.truth


def test_probes_move_from_the_target_to_the_end_of_the_source() -> None:
    source, target = quadrants(500, 0, 0.3), quadrants(200, 1)
    planted, left, probes = plant(source, target, 0.3, seed=0)
    assert (len(planted), len(left), len(probes)) == (560, 140, 60)
    assert torch.equal(planted.inputs[:500], source.inputs)
    assert torch.equal(planted.labels, torch.cat([source.labels, probes.labels]))
    assert torch.equal(probes.labels, probes.truth)
    assert bool((probes.truth.bincount() - 0.3 * target.labels.bincount()).abs().max() < 1)
    whole = torch.cat([planted.inputs[500:], left.inputs])
    assert torch.equal(whole.sort(0).values, target.inputs.sort(0).values)  # no example twice, none lost
    again, other = (plant(source, target, 0.3, seed=seed)[0].inputs for seed in (0, 1))
    assert torch.equal(again, planted.inputs)
    assert not torch.equal(other, planted.inputs)


def test_copies_are_no_probes() -> None:
    source, target = quadrants(500, 0, 0.3), quadrants(100, 1)
    twice = Examples(torch.cat([target.inputs, target.inputs[:50]]), torch.cat([target.labels, target.labels[:50]]))
    planted = Data(source, twice).with_probes(soseleto.Probes(share=0.3), seed=0)
    copied = target.inputs[:50].unsqueeze(0)
    assert len(planted.probes) == 45
    assert not (planted.source.inputs[500:, None] == copied).all(2).any()  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [0.3, 0.97])
def test_no_class_leaves_the_target(share: float) -> None:
    labels = torch.tensor([0] * 90 + [1] * 5 + [2] * 4 + [3])
    target = Examples(torch.rand(100, 2), labels)
    _, of_target, probes = plant(quadrants(500, 0, 0.3), target, share, seed=0)
    assert len(probes) == round(100 * share)
    left = of_target.labels.bincount(minlength=4)
    assert left.tolist() == ([63, 3, 3, 1] if share == 0.3 else [1, 1, 1, 0])  # as long as that is possible


def test_probes_can_carry_the_labels_from_before_a_check() -> None:
    target = quadrants(200, 1)
    before = symmetric(target.labels, 0.1, classes=CLASSES, seed=5).labels
    _, _, probes = plant(quadrants(500, 0), target, 0.3, seed=0, labels_before=before)
    assert len(probes) == 60
    assert 0 < int((probes.labels != probes.truth).sum()) <= 20
    often = symmetric(target.labels, 0.5, classes=CLASSES, seed=5).labels
    some = torch.where(torch.arange(200) < 40, often, -1)
    assert len(plant(quadrants(500, 0), target, 0.3, seed=0, labels_before=some)[2]) == 40
    with pytest.raises(UsageError, match="0 of the 200 labels_before differ"):
        plant(quadrants(500, 0), target, 0.3, seed=0, labels_before=target.labels)
    with pytest.raises(UsageError, match=r"one class index from 0 to 3 for each of the 200"):
        plant(quadrants(500, 0), target, 0.3, seed=0, labels_before=before[:5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probes": "some"}, "between 0 and 1, or 'auto', got 'some'"),
        ({"probes": 0.01}, "are 2 probes: at least 10"),
        ({"target": quadrants(12, 1)}, "of 12 target and 1500 source examples are 4 probes"),
        ({"mode": "transfer"}, "write mode='noisy', or probes=None"),
        ({"loss": soseleto.squared_error, "source": (torch.rand(99, 2), torch.rand(99)),
          "target": (torch.rand(99, 2), torch.rand(99))}, "probes need class labels"),
    ],
)  # fmt: skip
def test_bad_arguments_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(**changes)


def test_probes_never_count_as_source(result: soseleto.Result) -> None:
    assert result.weights.shape == result.scores.shape == (1500,)
    assert len(result.ranking()["id"]) == len(result.source) == 1500
    assert (result.config["n_source"], result.config["n_target"], result.config["probes"]) == (1500, 200, 60)
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in result.model.modules())


def test_the_estimates_are_near_the_truth(result: soseleto.Result, wrong: Tensor) -> None:
    for asked in (0.8, 0.9, 0.95):
        found = result.suspects(asked)
        precision, recall = truth_of(found, wrong)
        assert found.precision.value >= asked - 0.01  # no more than labels are expected to be wrong
        assert found.precision.value == pytest.approx(precision, abs=0.06)
        assert found.recall.low <= recall <= found.recall.high
        assert found.precision.low <= found.precision.value <= found.precision.high
    assert found.wrong_share.value == pytest.approx(0.3, abs=0.04)
    assert recall > 0.8
    probability, mean = found.probability, []
    for low, high in ((0.0, 0.1), (0.1, 0.9), (0.9, 1.01)):
        inside = (probability >= low) & (probability < high)
        mean.append(float((probability[inside] - wrong[inside].float()).sum()) / len(wrong))
    assert sum(map(abs, mean)) < 0.08  # the expected calibration error


def test_suggestions_are_right_where_the_label_is_not(result: soseleto.Result, wrong: Tensor) -> None:
    found = result.suspects()
    hit = found.is_suspect & wrong
    assert float((found.suggested == result.source.truth)[hit].float().mean()) > 0.85
    assert bool((found.suggested != result.source.labels).all())


def test_any_threshold_has_its_estimates(result: soseleto.Result) -> None:
    found = result.suspects()
    strict, loose, all_of_them = found.at(0.99), found.at(0.1), found.at(0.0)
    assert len(strict) < len(found) < len(loose) < len(all_of_them) == 1500
    assert strict.precision.value > found.precision.value > loose.precision.value
    assert strict.recall.value < found.recall.value < loose.recall.value
    assert all_of_them.precision.value == pytest.approx(found.wrong_share.value)
    assert all_of_them.recall.value == pytest.approx(1.0)
    none = found.at(1.0)
    assert len(none) == 0
    assert (none.precision.low, none.precision.high) == (0.0, 1.0)
    assert none.recall == Estimate(0.0, 0.0, 0.0)
    assert str(none).startswith("0 suspects of 1,500 (probability ")
    with pytest.raises(UsageError, match="between 0 and 1"):
        found.at(1.5)
    with pytest.raises(UsageError, match=r"for 95 % say 0\.95"):
        result.suspects(95)


def test_ranking_and_run_folder_hold_them(result: soseleto.Result) -> None:
    folder, found = RunFolder.open(result.out), result.suspects()
    ranking = folder.ranking()
    assert list(ranking)[5:9] == ["predicted_label", "mislabelled_probability", "is_label_issue", "suggested_label"]
    at = np.array([int(name) for name in ranking["id"]])
    assert np.array_equal(ranking["mislabelled_probability"], found.probability.numpy()[at])
    assert np.array_equal(ranking["is_label_issue"], found.is_suspect.numpy()[at])
    assert np.array_equal(ranking["predicted_label"], result.predict(result.source.inputs).numpy()[at])
    kept = folder.suspects()
    assert kept == json.loads(json.dumps(found.to_dict()))
    assert kept["count"] == len(found)
    assert "precision" in str(found)


def judgement(
    n: int, share: float, apart: float, draw: np.random.Generator, *, m: int = 400, earlier: bool = False
) -> tuple[Judgement, np.ndarray]:
    """Trust whose means for right and wrong labels are ``apart`` standard deviations apart, and which are wrong.

    earlier: the trusted examples have the source's labels from before a check
    """
    wrong = draw.random(n + m) < np.repeat([share, share if earlier else 0.0], [n, m])
    trust, labels = draw.normal(np.where(wrong, -apart, 0.0)), wrong.astype(int)
    even = np.full((n + m, 2), 0.5)
    return Judgement(
        right=trust[:n], of_trusted=trust[n:], probabilities=even[:n], trusted_probabilities=even[n:],
        labels=np.zeros(n, dtype=int), trusted_labels=np.zeros(m, dtype=int), before=labels[n:] if earlier else None,
    ), wrong[:n]  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.6])
@pytest.mark.parametrize("apart", [2.0, 5.0])
def test_the_share_of_wrong_labels_is_found_without_seeing_one(share: float, apart: float) -> None:
    found = [judge(judgement(2000, share, apart, np.random.default_rng(seed))[0]).wrong_share for seed in range(20)]
    assert np.mean([estimate.value for estimate in found]) == pytest.approx(share, abs=0.05)
    assert np.mean([estimate.low <= share + 0.01 for estimate in found]) >= 0.9
    assert np.mean([estimate.high >= share - 0.01 for estimate in found]) >= 0.9


@pytest.mark.parametrize("earlier", [False, True])
def test_stated_precisions_hold(earlier: bool) -> None:
    """The interval of the precision holds the truth in nearly all draws, and the lists are as good as was asked."""
    holds, true = [], []
    for seed in range(20):
        known, wrong = judgement(2000, 0.3, 3.0, np.random.default_rng(seed), earlier=earlier)
        suspects = Evidence.of(known, ()).for_precision(0.9)
        precision = float(wrong[suspects.is_suspect.numpy()].mean())
        holds.append(suspects.precision.low <= precision <= suspects.precision.high)
        true.append(precision)
        assert suspects.basis == ("from earlier labels" if earlier else "from trusted examples")
        assert str(suspects).endswith(f"({suspects.basis})")
        kept = suspects.to_dict()
        assert {kept[name]["basis"] for name in ("precision", "recall", "wrong_share")} == {suspects.basis}
    assert np.mean(holds) >= 0.9
    assert np.mean(true) > 0.87


def test_an_interval_that_says_nothing_is_unknown() -> None:
    useless, wide = Estimate(0.95, 0.0, 1.0), Estimate(0.6, 0.4, 0.9)
    assert str(useless) == "unknown"
    assert useless.to_dict("audited")["value"] is None
    assert str(wide) == "60.0 % (40.0 to 90.0)"
    assert wide.to_dict("audited")["value"] == 0.6


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> soseleto.Result:
    """Trained for a target without examples of the class 3."""
    target = quadrants(300, 1)
    return fit(target=target.subset(target.labels != 3), out=tmp_path_factory.mktemp("runs") / "lacking")


def test_a_class_without_target_examples_has_no_suspects(lacking: soseleto.Result, wrong: Tensor) -> None:
    """About a class of which nothing is trusted nothing is claimed, and the claims about the others hold."""
    found, labels = lacking.suspects(), lacking.source.labels
    assert bool(found.probability[labels == 3].isnan().all())
    assert not bool(found.is_suspect[found.probability.isnan()].any())
    assert found.unknown == int(found.probability.isnan().sum()) < 800
    assert 3 not in found.suggested[labels != 3].tolist()
    assert not bool((found.suggested == labels).any())
    judged = ~found.probability.isnan()
    assert len(found) > 50
    assert found.precision.low <= truth_of(found, wrong)[0] <= found.precision.high
    share = float(wrong[judged].double().mean())
    assert found.wrong_share.low <= share <= found.wrong_share.high


def test_the_run_folder_says_what_is_unknown(lacking: soseleto.Result) -> None:
    folder, count = RunFolder.open(lacking.out), lacking.suspects().unknown
    ranking, kept = folder.ranking(), folder.suspects()
    assert kept["unknown"] == int(ranking["is_unknown"].sum()) == count
    assert f"unknown for {count:,} examples of or like a class without target examples" in describe_list(folder.path)
    assert about_unknown(ranking) in write_report(folder.path).read_text()
    drawn = draw(ranking["mislabelled_probability"], is_suspect(ranking), seed=0)
    assert all(0 <= stratum.expected <= 1 for stratum in drawn)  # an audit checks unknown ones too


@pytest.mark.parametrize("without", [3, 0])  # the source has the target's only class, or not
def test_a_target_of_one_class_gives_no_suspects(without: int) -> None:
    y = torch.arange(300) % 3
    x = 2 * torch.eye(3)[y] + 0.5 * torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    first = torch.arange(300) < 200
    source, target = first & (y != without), ~first & (y == 0)
    result = soseleto.fit(nn.Linear(3, 3), (x[source], y[source]), (x[target], y[target]), epochs=1, probes="auto")
    assert any("too few of the source's classes" in message for message in result.messages)
    with pytest.raises(UsageError, match="the target has too few of the source's classes"):
        result.suspects()


# The share of wrong labels, estimated before the training


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_share_counts_no_label_of_a_class_without_target_examples(share: float) -> None:
    seeded = torch.Generator().manual_seed(0)

    def draw(n: int, classes: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(classes, (n,), generator=seeded)
        return 2 * torch.eye(3)[y] + 0.5 * torch.randn(n, 3, generator=seeded), y

    x, y = draw(900, 3)
    wrong = (torch.rand(900, generator=seeded) < share) & (y < 2)
    data = Data(Examples(x, torch.where(wrong, 1 - y, y)), Examples(*draw(200, 2)))
    model = nn.Linear(3, 3)
    found = wrong_share(model, make_prepare(data.source, model, standardize=None), data, seed=0)
    assert found == pytest.approx(share, abs=0.08)
    assert found <= share + 0.01


def sequences(n: int) -> Any:
    """Positive numbers, each repeated, in sequences of 3; from the 1000th example on of 9."""
    numbers = torch.randint(1, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    return [([number] * (3 if at < 1000 else 9), int(number > 25)) for at, number in enumerate(numbers)]


def padded(items: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(row) for row, _ in items]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([label for _, label in items])


def test_batches_padded_to_different_lengths_have_features_of_one_width() -> None:
    source, target = (LazyDataset(sequences(n), collate_fn=padded, workers=0) for n in (1100, 60))
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2), Lambda(lambda outputs: outputs.mean(1)))
    found = wrong_share(model, make_prepare(source, model, standardize=None), Data(source, target), seed=0)
    assert 0 <= found < 1
