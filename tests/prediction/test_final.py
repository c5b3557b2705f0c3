"""Final models: sample weights, and the codes of categories."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from soseleto.data import Examples, TablePreparation
from soseleto.errors import UsageError
from soseleto.prediction.final import FinalData, boosting, fit_final, gradient_boosting, weighted

pytest.importorskip("sklearn")


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
