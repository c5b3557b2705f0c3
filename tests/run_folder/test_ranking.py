"""Selections from a ranking, by hand."""

from __future__ import annotations

import numpy as np

from soseleto.run_folder.ranking import least_suspicious, most_suspicious_first, suspect_rows


def ranking(**columns: list) -> dict[str, np.ndarray]:
    """Best example first."""
    given = {"label": ["a", "b", "a", "b", "a"], "weight": [1.0, 0.9, 0.8, 0.05, 0.0], **columns}
    return {name: np.array(values) for name, values in given.items()}


WITH_PROBES = ranking(
    mislabelled_probability=[0.1, 0.7, 0.2, 0.9, 0.8],
    is_label_issue=[False, False, False, True, True],
    suggested_label=["a", "b", "a", "a", "a"],
)


def test_the_most_probable_suspects_come_first() -> None:
    assert most_suspicious_first(WITH_PROBES).tolist() == [3, 4, 1, 2, 0]
    assert suspect_rows(WITH_PROBES).tolist() == [3, 4]
    unknown = {**WITH_PROBES, "mislabelled_probability": np.array([0.1, 0.7, 0.2, np.nan, 0.8])}
    assert most_suspicious_first(unknown).tolist() == [4, 3, 1, 2, 0]


def test_the_least_suspicious_of_each_class() -> None:
    assert {name: rows.tolist() for name, rows in least_suspicious(WITH_PROBES).items()} == {"a": [0, 2], "b": [1]}
