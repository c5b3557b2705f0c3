"""SoseletoClassifier: scikit-learn's own checks, every form of data, pipelines, and a table with flipped labels."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import DataConversionWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import soseleto
from soseleto import SoseletoClassifier
from soseleto.data import TablePreparation

Arrays = tuple[np.ndarray, np.ndarray]

# Checks that do not apply, each with its reason; an entry whose check passes after all fails the test.
EXPECTED_FAILURES: dict[str, str] = {}


@dataclass(frozen=True)
class Linear:
    """A function that prints the same in every process, as the names of tests must."""

    def __call__(self, classes: int, shape: tuple[int, ...]) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), classes))


def quick(**settings: Any) -> SoseletoClassifier:
    """Ten steps on the whole data: what scikit-learn checks does not depend on more, but for the strong recipe."""
    chosen = {"model": Linear(), "epochs": 10, "batch_size": 1000, "lr": 0.3, "random_state": 0, "device": "cpu"}
    return SoseletoClassifier(**{**chosen, **settings})


@parametrize_with_checks([quick()], expected_failed_checks=lambda estimator: EXPECTED_FAILURES)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def flipped() -> tuple[Arrays, Arrays, Arrays, np.ndarray]:
    """Breast cancer: 369 rows with 30 % of the labels flipped, 60 clean ones, 140 to test on; and what was flipped."""
    X, y = load_breast_cancer(return_X_y=True)
    order = np.random.RandomState(7).permutation(len(X))
    source, target, test = order[:369], order[369:429], order[429:]
    wrong = np.random.RandomState(8).rand(len(source)) < 0.3
    return (X[source], np.where(wrong, 1 - y[source], y[source])), (X[target], y[target]), (X[test], y[test]), wrong


def test_a_table_with_flipped_labels(flipped: tuple[Arrays, Arrays, Arrays, np.ndarray]) -> None:
    (X, y), target, test, wrong = flipped
    made = SoseletoClassifier(epochs=10, batch_size=64, lr=0.1, random_state=0, device="cpu").fit(
        X, y, X_target=target[0], y_target=target[1]
    )
    assert made.score(*test) > 0.9
    assert made.source_weights_[wrong].mean() + 0.2 < made.source_weights_[~wrong].mean()
    assert made.source_scores_[wrong].mean() < made.source_scores_[~wrong].mean()
    assert made.source_weights_.shape == made.source_scores_.shape == (369,)
    assert made.predict_proba(test[0]).sum(1) == pytest.approx(1, abs=1e-6)


def test_it_is_searched_cloned_and_pickled(flipped: tuple[Arrays, Arrays, Arrays, np.ndarray]) -> None:
    (X, y), target, test, _ = flipped
    search = GridSearchCV(quick(), {"lr": [0.01, 0.3]}, cv=2).fit(X, y, X_target=target[0], y_target=target[1])
    assert search.best_params_["lr"] == 0.3  # 0.01 has not learned much in ten steps
    best = search.best_estimator_
    assert clone(best).get_params() == best.get_params()
    back = pickle.loads(pickle.dumps(best))
    assert (back.predict_proba(test[0]) == best.predict_proba(test[0])).all()
    assert (back.source_weights_ == best.source_weights_).all()


def test_arrays_frames_and_tensors_give_the_same(flipped: tuple[Arrays, Arrays, Arrays, np.ndarray]) -> None:
    (X, y), (X_target, y_target), (X_test, _), _ = flipped
    names = np.array(["benign", "malignant"])
    columns = [f"c{i}" for i in range(X.shape[1])]
    frame, target_frame = (pandas.DataFrame(part, columns=columns) for part in (X, X_target))
    by_array = quick().fit(X, y, X_target=X_target, y_target=y_target)
    by_frame = quick().fit(
        frame, pandas.Series(names[y]), X_target=target_frame, y_target=pandas.Series(names[y_target])
    )
    tensors = [torch.from_numpy(part) for part in (X, y, X_target, y_target, X_test)]
    by_tensor = quick().fit(tensors[0], tensors[1], X_target=tensors[2], y_target=tensors[3])
    expected = by_array.predict(X_test)
    assert (by_tensor.predict(tensors[4]) == expected).all()
    assert (by_frame.predict(pandas.DataFrame(X_test, columns=columns)) == names[expected]).all()
    assert list(by_frame.classes_) == ["benign", "malignant"]
    assert list(by_frame.feature_names_in_) == columns


def test_images_a_module_a_function_and_transfer() -> None:
    draw = np.random.RandomState(0)
    images, labels = draw.randint(0, 256, (24, 1, 16, 16), dtype=np.uint8), np.arange(24) % 3
    named = quick(model="lenet", epochs=1).fit(images, labels, X_target=images[:6], y_target=labels[:6])
    assert named.predict_proba(images).shape == (24, 3)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 3))
    before = module[1].weight.clone()
    given = quick(model=module).fit(images, labels)
    assert torch.equal(module[1].weight, before)  # a copy was trained
    assert not torch.equal(given.model_[1].weight, before)

    def trunk(classes: int, shape: tuple[int, ...]) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 4))

    other = np.array(["x", "y"])[np.arange(6) % 2]
    moved = quick(model=trunk, mode="transfer").fit(images, labels, X_target=images[:6], y_target=other)
    assert set(moved.predict(images)) <= {"x", "y"}


def test_a_target_that_is_off_is_one_sentence() -> None:
    X, y = np.random.RandomState(0).rand(20, 3), np.arange(20) % 2
    with pytest.raises(soseleto.UsageError, match="X_target and y_target belong together"):
        quick().fit(X, y, X_target=X)
    with pytest.raises(soseleto.UsageError, match="5 rows but 4 labels"):
        quick().fit(X, y, X_target=X[:5], y_target=y[:4])
    with pytest.raises(ValueError, match="2 features, but SoseletoClassifier is expecting 3"):
        quick().fit(X, y, X_target=X[:5, :2], y_target=y[:5])
    for apart in (X[:5] + 8, X[:5] / 100):
        with pytest.warns(UserWarning, match="X_target are on another scale than those of X"):
            quick().fit(X, y, X_target=apart, y_target=y[:5])


def test_suspects_of_an_estimator(flipped: tuple[Arrays, Arrays, Arrays, np.ndarray]) -> None:
    (X, y), target, _, wrong = flipped
    made = SoseletoClassifier(epochs=8, batch_size=64, lr=0.1, random_state=0, device="cpu", probes=0.5)
    found = made.fit(X, y, X_target=target[0], y_target=target[1]).suspects(0.8)
    chosen = found.is_suspect.numpy()
    assert len(chosen) == len(X)
    assert wrong[chosen].mean() > 0.6 > 0.4 > wrong.mean()
    assert (made.classes_[found.suggested.numpy()] != y).all()
    assert len(made.suspects()) <= len(found)
    assert pickle.loads(pickle.dumps(made)).suspects(0.8).threshold == found.threshold
    with pytest.raises(soseleto.UsageError, match=r"write SoseletoClassifier\(probes='auto'\)"):
        quick().fit(X, y, X_target=target[0], y_target=target[1]).suspects()
    with pytest.raises(soseleto.UsageError, match="give fit X_target and y_target"):
        quick(probes="auto").fit(X, y)


def short(**settings: Any) -> SoseletoClassifier:
    """By the network that a table gets by itself."""
    return quick(**{"model": None, "epochs": 2, "batch_size": 32, "lr": 0.1, **settings})


def people(n: int, seed: int) -> tuple[pandas.DataFrame, np.ndarray]:
    draw = np.random.default_rng(seed)
    frame = pandas.DataFrame({"size": 5 + 3 * draw.normal(size=n), "town": draw.choice(["Ulm", "Aix", "Bo"], n)})
    labels = np.where(frame["size"] + 4 * (frame["town"] == "Ulm") > 6, "ripe", "raw")
    frame.loc[::7, "size"] = np.nan
    return frame, labels


def test_in_a_pipeline_the_target_goes_through_the_same_steps() -> None:
    X, y = people(90, 0)
    X_target, y_target = people(30, 1)
    X, X_target = X.fillna(0.0), X_target.fillna(0.0)
    step = ColumnTransformer([("n", StandardScaler(), ["size"]), ("w", OneHotEncoder(sparse_output=False), ["town"])])
    with sklearn.config_context(enable_metadata_routing=True):
        last = short().set_fit_request(X_target=True, y_target=True)
        pipe = Pipeline([("step", step), ("last", last)], transform_input=["X_target"])
        pipe.fit(X, y, X_target=X_target, y_target=y_target)
    by_hand = short().fit(step.transform(X), y, X_target=step.transform(X_target), y_target=y_target)
    assert (pipe[-1].source_weights_ == by_hand.source_weights_).all()
    raw = short().fit(step.transform(X), y)
    assert (raw.source_weights_ != by_hand.source_weights_).any()


def test_sparse_texts_get_a_linear_model_and_are_not_standardised() -> None:
    texts = [f"{'red fox runs' if i % 2 else 'blue whale swims'} again {i}" for i in range(60)]
    y = np.arange(60) % 2
    vectors = TfidfVectorizer().fit(texts)
    X = vectors.transform(texts)
    made = short(epochs=8, lr=0.03).fit(X, y, X_target=X[:20], y_target=y[:20])
    assert [type(layer).__name__ for layer in made.model_] == ["Flatten", "Linear"]
    assert set(made._prepare.standardize.mean) == {0.0}
    assert made.score(X, y) == 1
    dense = short(epochs=8, lr=0.03, model="linear", standardize=False)  # TF-IDF rows have length 1
    dense.fit(6 * X.toarray(), y, X_target=6 * X[:20].toarray(), y_target=y[:20])
    assert np.allclose(dense.source_weights_, made.source_weights_, atol=1e-4)


def test_frames_keep_names_and_kinds() -> None:
    X, y = people(90, 0)
    X_target, y_target = people(30, 1)
    made = short().fit(X, y, X_target=X_target, y_target=y_target)
    assert made.feature_names_in_.tolist() == ["size", "town"]
    assert [one.kind for one in made.preparation_.seen] == ["number", "category"]
    again = TablePreparation.from_dict(json.loads(json.dumps(made.preparation_.to_dict())))
    assert torch.equal(
        again.read(pa.Table.from_pandas(X_target)), made.preparation_.read(pa.Table.from_pandas(X_target))
    )
    new = pandas.DataFrame({"size": [None, 4.0], "town": ["Rome", None]})
    assert np.isfinite(made.predict_proba(new)).all()


def test_labels_of_a_frame_with_words_are_checked_as_those_of_numbers() -> None:
    X = pandas.DataFrame({"age": np.arange(40), "name": ["u", "v"] * 20})
    y = np.where(X.age > 20, "p", "q")
    with pytest.warns(DataConversionWarning):
        column = short().fit(X, y[:, None], X_target=X[:9], y_target=y[:9, None])
    assert np.array_equal(column.source_weights_, short().fit(X, y, X_target=X[:9], y_target=y[:9]).source_weights_)
    for labels in (y[:-1], None, [None, *y[1:]], pandas.Series(y).where(y == "p")):
        with pytest.raises(ValueError, match=r"y should be|label type|contains NaN|numbers of samples"):
            short().fit(X, labels)
        with pytest.raises(ValueError, match=r"y should be|label type|contains NaN|rows but 39 labels|belong together"):
            short().fit(X, y, X_target=X, y_target=labels)
