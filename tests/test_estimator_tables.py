"""scikit-learn habits of the estimator: pipelines that carry the target, sparse matrices, frames."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

pytest.importorskip("sklearn")

import sklearn
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import DataConversionWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from soseleto import SoseletoClassifier
from soseleto.data import TablePreparation


def quick(**options: Any) -> SoseletoClassifier:
    return SoseletoClassifier(
        **{"epochs": 2, "batch_size": 32, "lr": 0.1, "random_state": 0, "device": "cpu", **options}
    )


def people(n: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": 5 + 3 * draw.normal(size=n), "town": draw.choice(["Ulm", "Aix", "Bo"], n)})
    labels = np.where(frame["size"] + 4 * (frame["town"] == "Ulm") > 6, "ripe", "raw")
    frame.loc[::7, "size"] = np.nan
    return frame, labels


def test_in_a_pipeline_the_target_goes_through_the_same_steps() -> None:
    X, y = people(90, 0)
    X_target, y_target = people(30, 1)
    X, X_target = X.fillna(0.0), X_target.fillna(0.0)
    step = ColumnTransformer([("n", StandardScaler(), ["size"]), ("w", OneHotEncoder(sparse_output=False), ["town"])])
    with sklearn.config_context(enable_metadata_routing=True):
        last = quick().set_fit_request(X_target=True, y_target=True)
        pipe = Pipeline([("step", step), ("last", last)], transform_input=["X_target"])
        pipe.fit(X, y, X_target=X_target, y_target=y_target)
    by_hand = quick().fit(step.transform(X), y, X_target=step.transform(X_target), y_target=y_target)
    assert (pipe[-1].source_weights_ == by_hand.source_weights_).all()
    raw = quick().fit(step.transform(X), y)
    assert (raw.source_weights_ != by_hand.source_weights_).any()


def test_sparse_texts_get_a_linear_model_and_are_not_standardised() -> None:
    texts = [f"{'red fox runs' if i % 2 else 'blue whale swims'} again {i}" for i in range(60)]
    y = np.arange(60) % 2
    vectors = TfidfVectorizer().fit(texts)
    X = vectors.transform(texts)
    made = quick(epochs=8, lr=0.03).fit(X, y, X_target=X[:20], y_target=y[:20])
    assert [type(layer).__name__ for layer in made.model_] == ["Flatten", "Linear"]
    assert set(made._prepare.standardize.mean) == {0.0}
    assert made.score(X, y) == 1
    dense = quick(epochs=8, lr=0.03, model="linear", standardize=False)  # TF-IDF rows have length 1
    dense.fit(6 * X.toarray(), y, X_target=6 * X[:20].toarray(), y_target=y[:20])
    assert np.allclose(dense.source_weights_, made.source_weights_, atol=1e-4)


def test_frames_keep_names_and_kinds() -> None:
    X, y = people(90, 0)
    X_target, y_target = people(30, 1)
    made = quick().fit(X, y, X_target=X_target, y_target=y_target)
    assert made.feature_names_in_.tolist() == ["size", "town"]
    assert [one.kind for one in made.preparation_.seen] == ["number", "category"]
    again = TablePreparation.from_dict(json.loads(json.dumps(made.preparation_.to_dict())))
    assert torch.equal(
        again.read(pa.Table.from_pandas(X_target)), made.preparation_.read(pa.Table.from_pandas(X_target))
    )
    new = pd.DataFrame({"size": [None, 4.0], "town": ["Rome", None]})
    assert np.isfinite(made.predict_proba(new)).all()


def test_labels_of_a_frame_with_words_are_checked_as_those_of_numbers() -> None:
    X = pd.DataFrame({"age": np.arange(40), "name": ["u", "v"] * 20})
    y = np.where(X.age > 20, "p", "q")
    with pytest.warns(DataConversionWarning):
        column = quick().fit(X, y[:, None], X_target=X[:9], y_target=y[:9, None])
    assert np.array_equal(column.source_weights_, quick().fit(X, y, X_target=X[:9], y_target=y[:9]).source_weights_)
    for labels in (y[:-1], None, [None, *y[1:]], pd.Series(y).where(y == "p")):
        with pytest.raises(ValueError, match=r"y should be|label type|contains NaN|numbers of samples"):
            quick().fit(X, labels)
        with pytest.raises(ValueError, match=r"y should be|label type|contains NaN|rows but 39 labels|belong together"):
            quick().fit(X, y, X_target=X, y_target=labels)
