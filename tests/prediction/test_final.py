"""Final scikit-learn models: sample weights, codes of categories, and how probably each label is right."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from soseleto.data import Examples, TablePreparation
from soseleto.errors import UsageError
from soseleto.prediction import final
from soseleto.prediction.final import FinalData, boosting, fit_final, gradient_boosting, right_labels, weighted

pytest.importorskip("sklearn")
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression


def test_more_categories_than_boosting_takes_codes():
    words = np.repeat([f"w{i}" for i in range(300)], 3)
    labels = torch.from_numpy(np.repeat(np.arange(300) % 2, 3))
    table = TablePreparation.fit(pa.table({"word": words}), given={"word": "category"})
    assert len(table.columns[0].values) == 250
    rows = Examples(table.read(pa.table({"word": words})), labels)
    made = fit_final(gradient_boosting(table.codes), FinalData.of(rows, rows, None))
    assert made.outputs(rows.inputs).isfinite().all()


def test_sample_weights_are_the_mean_or_each_rows_own():
    learned = torch.tensor([0.0, 0.5, 1.0])
    assert weighted(learned, "mean").tolist() == [0.5, 0.5, 0.5]
    assert weighted(learned, "each").tolist() == [0.0, 0.5, 1.0]
    with pytest.raises(UsageError, match="choose 'mean' or 'each'"):
        weighted(learned, "class")


def test_a_class_without_a_row_has_no_probability():
    rows = Examples(torch.randn(40, 2), torch.arange(40) % 2 * 2)
    target = Examples(torch.randn(4, 2), torch.tensor([0, 2, 0, 2]))
    probabilities = fit_final(gradient_boosting(), FinalData.of(rows, target, None)).outputs(rows.inputs).exp()
    assert probabilities.shape == (40, 3)
    assert probabilities[:, 1].max() < 1e-6


@pytest.mark.parametrize("labels", [[0, 1] * 30 + [2], list(range(8)) * 2], ids=["one row of a class", "many classes"])
def test_a_class_with_too_few_rows_for_early_stopping_is_kept(labels):
    y = torch.tensor(labels)
    rows = Examples(torch.randn(len(y), 2) + 5 * y[:, None], y)
    data = FinalData(rows.inputs, y, torch.ones(len(y)))
    model = boosting(members=1).set_params(**{"0__max_iter": 2})
    assert fit_final(model, data).outputs(rows.inputs).shape == (len(y), int(y.max()) + 1)


def test_boosting_stops_early_where_it_can():
    y = torch.arange(60) % 2
    model = boosting(members=1).set_params(**{"0__max_iter": 2})
    made = fit_final(model, FinalData(torch.randn(60, 2), y, torch.ones(60)))
    assert len(made.estimator.estimators_[0].validation_score_) == 3  # with held-out rows, before and after 2 trees


# How probably labels are right


def clouds(classes: int, wrong: float, n: int = 900, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Separated classes, the last 100 rows trusted: inputs, given labels, and which are wrong."""
    draw = np.random.default_rng(seed)
    truth = draw.integers(classes, size=n)
    x = draw.normal(size=(n, classes)) + 6.0 * np.eye(classes)[truth]
    flipped = (draw.random(n) < wrong) & (np.arange(n) < n - 100)
    return x, np.where(flipped, (truth + draw.integers(1, classes, size=n)) % classes, truth), flipped


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_wrong_labels_are_improbable(classes: int, wrong: float) -> None:
    x, y, flipped = clouds(classes, wrong)
    trusted = np.arange(len(y)) >= 800
    right = right_labels(LogisticRegression(), x, y, trusted, seed=0)
    assert (right[trusted] == 1.0).all()
    assert right[~flipped].mean() > 0.97
    if wrong:
        assert right[flipped].mean() < 0.1


class Known(ClassifierMixin, BaseEstimator):
    """Knows the probability of a label's being given as 1, of which 30 % are wrong."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> Known:
        self.classes_ = np.array([0, 1])
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        raise AssertionError("probabilities are asked for")

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        p = 0.7 * x[:, 0] + 0.3 * (1 - x[:, 0])
        return np.stack([1 - p, p], 1)


def test_the_posterior_is_bayes_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model that knows the probabilities of the given labels, and the true share of wrong ones."""
    draw = np.random.default_rng(0)
    q = draw.uniform(0.01, 0.99, 4000)
    truth = draw.random(4000) < q
    flipped = draw.random(4000) < 0.3
    trusted = np.arange(4000) >= 2000
    given = np.where(flipped & ~trusted, ~truth, truth).astype(int)

    monkeypatch.setattr(final, "_shares", lambda classes: np.array([0.3]))
    right = right_labels(Known(), q[:, None], given, trusted, seed=0)[~trusted]
    of_label = np.where(given == 1, q, 1 - q)[~trusted]
    assert right == pytest.approx(0.7 * of_label / (0.7 * of_label + 0.3 * (1 - of_label)))
    for low in np.arange(0.0, 1.0, 0.25):  # and as often right as it says
        some = (right >= low) & (right < low + 0.25)
        assert (~flipped[~trusted])[some].mean() == pytest.approx(right[some].mean(), abs=0.06)


def test_a_row_is_judged_by_models_that_have_not_seen_it() -> None:
    """A forest believes every label that it was trained on."""
    x, y, flipped = clouds(2, 0.3)
    right = right_labels(RandomForestClassifier(30, random_state=0), x, y, np.arange(len(y)) >= 800, seed=0)
    assert right[flipped].mean() < 0.5  # 0.8 and more where rows were seen


def test_without_trusted_rows_or_classes_nothing_is_doubted() -> None:
    x, y, _ = clouds(2, 0.3)
    assert (right_labels(LogisticRegression(), x, y, np.zeros(len(y), bool), seed=0) == 1.0).all()
    assert (right_labels(LogisticRegression(), x, np.zeros_like(y), np.ones(len(y), bool), seed=0) == 1.0).all()


def test_a_class_with_few_rows_is_not_doubted() -> None:
    """The boosted models of ``--final boosting`` cannot be trained on folds that have one row of it."""
    x, y, flipped = clouds(2, 0.3)
    y = np.where(np.arange(len(y)) < 4, 2, y)
    right = right_labels(boosting(members=1), x, y, np.arange(len(y)) >= 800, seed=0)
    assert (right[:4] == 1.0).all()
    assert right[4:][flipped[4:]].mean() < 0.5
    few = right_labels(boosting(members=1), x[:12], np.arange(12) % 6, np.arange(12) >= 6, seed=0)
    assert (few == 1.0).all()


@pytest.mark.parametrize("each", [10, 13])
def test_rows_of_many_small_classes_are_enough_for_the_models_own_validation(each: int) -> None:
    y = np.arange(10 * each) % 10
    x = np.random.default_rng(0).normal(size=(len(y), 2)) + y[:, None]
    model = HistGradientBoostingClassifier(early_stopping=True, max_iter=2)
    right = right_labels(model, x, y, np.arange(len(y)) >= 60, seed=0)
    assert (right < 1.0).any() == (each == 13)


def test_the_weights_of_a_final_model() -> None:
    x, y, flipped = clouds(2, 0.3)
    rows, labels = torch.from_numpy(x).float(), torch.from_numpy(y)
    source, target = Examples(rows[:800], labels[:800]), Examples(rows[800:], labels[800:])
    plain = FinalData.of(source, target, torch.full((800,), 0.5))
    doubted = plain.doubted(LogisticRegression(), 800, seed=0)
    assert (doubted.weights[800:] == 1.0).all()
    assert float(doubted.weights[:800].max()) <= 0.5
    assert float(doubted.weights[torch.from_numpy(flipped)].mean()) < 0.05
    assert torch.equal(doubted.labels, plain.labels)
