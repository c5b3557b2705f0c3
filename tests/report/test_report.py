"""The report, rendered from fabricated run folders (docs/reference/contracts.md) and checked in a browser."""

import html.parser
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import accessibility
from browser import Browser, needs_browser
from fabricated import add_probe_columns, fabricate, fabricate_images
from soseleto import fit
from soseleto.data import Examples
from soseleto.errors import UsageError
from soseleto.report import gallery, render, tables, write_report
from soseleto.report.sentences import share, verdict
from soseleto.report.svg import Chart, nice_ticks
from soseleto.run_folder import thumbnails
from soseleto.run_folder.folder import COMPARISON, SUSPECTS, RunFolder
from soseleto.run_folder.ranking import MOST_CLASSES, PER_CLASS, suggested_labels


class Outline(html.parser.HTMLParser):
    """Tags with their attributes, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return fabricate(tmp_path_factory.mktemp("report") / "two <b>features")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return fabricate_images(tmp_path_factory.mktemp("report") / "images")


@pytest.fixture(scope="module")
def page(run: RunFolder) -> str:
    return render(run.path)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_write_report_writes_into_the_run_or_to_the_given_path(run: RunFolder, tmp_path: Path) -> None:
    assert write_report(run.path) == run.path / "report.html"
    elsewhere = write_report(run.path, tmp_path / "new" / "page.html")
    assert elsewhere.read_text("utf-8") == (run.path / "report.html").read_text("utf-8")


def test_the_summary_states_the_main_numbers(page: str, run: RunFolder) -> None:
    ranking = run.ranking()
    low = ranking["weight"] < 0.1
    caught, spared = (low & ranking["wrong"]).sum(), (~low & ~ranking["wrong"]).sum()
    text = text_of(page)
    assert "Trained on 500 source and 50 target examples for 30 epochs in 12 s." in text
    assert f"{caught} of 100 mislabelled examples have a weight below 0.1, and {spared} of 400 correctly" in text
    assert "The final source loss is 0.223, the final target loss 0.0233." in text
    assert "The test accuracy is 99.1 %." in text
    assert "computed by the layerwise engine" in text


def test_messages_are_shown_and_nothing_from_the_run_becomes_markup(page: str) -> None:
    assert "the target loss is &lt;small&gt;" in page
    assert "two &lt;b&gt;features" in page
    assert "right &amp; proper" in page
    assert "<b>" not in page
    assert "<small>" not in page


def test_a_hostile_label_is_escaped(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=40, epochs=2)
    columns = run.ranking()
    columns["label"] = np.array(["</script><script>alert(1)</script>", '" onload="x'] * 20)
    run.write_ranking(columns)
    outline = Outline(render(run.path))
    assert [attrs.get("type") for tag, attrs in outline.tags if tag == "script"] == ["application/json", None]
    assert not any(name.startswith("on") for _, attrs in outline.tags for name in attrs)


def test_a_hostile_name_is_escaped_beside_images(tmp_path: Path) -> None:
    run = fabricate_images(tmp_path / "run")
    columns = run.ranking()
    hostile = "\"><img src=x onerror='alert(1)'>"
    columns |= {"label": np.array([hostile] * 60), "suggested_label": np.array([f"{hostile}b"] * 60)}
    run.write_ranking(columns)
    tags = Outline(render(run.path)).tags
    assert all((attrs["src"] or "").startswith("data:image/png;base64,") for tag, attrs in tags if tag == "img")
    assert not any(name.startswith("on") for _, attrs in tags for name in attrs)


def test_suspects_are_counted_estimated_and_shown(images: RunFolder, tmp_path: Path) -> None:
    text = text_of(render(images.path))
    assert "Suspects 12 20.0 % of the source" in text
    assert "12 labels are suspected to be wrong." in text
    run = add_probe_columns(fabricate(tmp_path / "run", n=60, features=0, truth=False, epochs=3))
    estimate = {"value": 0.953, "low": 0.9, "high": 1.0}
    curve = {"threshold": [0.1, 0.5, 0.9], "precision": [0.5, 0.8, 0.95], "recall": [1.0, 0.8, 0.3]}
    numbers = dict.fromkeys(("precision", "recall", "wrong_share"), estimate)
    run.write_json(SUSPECTS, {"threshold": 0.5, "n_probes": 30, "curve": curve, **numbers})
    text = text_of(render(run.path))
    assert "12 labels are suspected to be wrong, with a precision of 95 % (90 to 100)." in text
    assert "Estimated recall 95.3 % of the mislabelled examples are suspects (95 % interval 90.0 % to 100 %)" in text
    assert "Estimated from 30 probes" in text
    assert "Probability of being mislabelled" in text
    unknown = {"value": None, "low": 0.0, "high": 1.0}
    run.write_json(SUSPECTS, {"threshold": 0.5, "n_probes": 30, "curve": curve, **numbers, "precision": unknown})
    assert "12 labels are suspected to be wrong; their precision is unknown." in text_of(render(run.path))


def test_without_suspects_no_precision_is_shown(tmp_path: Path) -> None:
    run = add_probe_columns(fabricate(tmp_path / "run", n=60, features=0, truth=False, epochs=3))
    columns = run.ranking()
    unsure = {
        "mislabelled_probability": np.linspace(0.72, 0.1, 60, dtype=np.float32),
        "is_label_issue": np.zeros(60, dtype=bool),
    }
    run.write_ranking({**columns, **unsure})
    of_none, noise = {"value": 1.0, "low": 0.0, "high": 1.0}, {"value": 0.3, "low": 0.2, "high": 0.4}
    curve = {"threshold": [0.1, 0.5, 0.9], "count": [9, 2, 0], "precision": [0.5, 0.7, 1.0], "recall": [0.9, 0.3, 0.0]}
    numbers = {"precision": of_none, "recall": of_none, "wrong_share": noise}
    run.write_json(SUSPECTS, {"threshold": 1.0, "n_probes": 30, "curve": curve, **numbers})
    text = text_of(render(run.path))
    assert "Suspects 0 0 % of the source: the highest probability of being mislabelled is 0.72" in text
    assert "No label is suspected to be wrong: the highest probability of being mislabelled is 0.72." in text
    assert "Estimated precision 100" not in text
    assert "Estimated noise rate 30.0 %" in text
    assert "at the highest precision 0.7, recall 0.3" in render(run.path)  # of the thresholds that have suspects


def _row(method: str, accuracy: float, *minus_soseleto: float) -> dict[str, Any]:
    row = {"method": method, "accuracy": accuracy, "low": 0.0, "high": 100.0, "examples": 120}
    names = ("value", "low", "high")
    return row | ({"minus_soseleto": dict(zip(names, minus_soseleto, strict=True))} if minus_soseleto else {})


BOOSTED = _row("gradient_boosting", 91.7, 39.17, 28.77, 48.28)
OURS, MIXED, BETTER = _row("soseleto", 52.5), _row("mixed", 50.0, -2.5, -9.0, 4.0), _row("mixed", 60.0, 7.5, 2.0, 13.0)


@pytest.mark.parametrize(
    ("rows", "kept", "expected"),
    [
        (
            [OURS, MIXED, BOOSTED],
            "soseleto",
            "SOSELETO's model is kept, 2.5 points better than mixed training (95 % interval -4.0 to +9.0). Gradient "
            "boosting is 39.2 points better than SOSELETO's (95 % interval +28.8 to +48.3) and is not kept: --final "
            "boosting keeps a boosted model.",
        ),
        (
            [OURS, _row("final", 92.0, 39.5, 29.0, 49.0), BOOSTED],
            "soseleto",
            "Gradient boosting is 39.2 points better than SOSELETO's (95 % interval +28.8 to +48.3).",
        ),
        (
            [OURS, BETTER],
            "mixed",
            "Selection did not pay here: the model of mixed training is kept, which is 7.5 points better than "
            "SOSELETO's (95 % interval +2.0 to +13.0).",
        ),
        (
            [OURS, BETTER],
            "soseleto",
            "SOSELETO's model is kept, although mixed training is 7.5 points better than SOSELETO's (95 % interval "
            "+2.0 to +13.0).",
        ),
        (
            [OURS, _row("mixed", 53.0, 0.5, -6.0, 7.0), _row("gradient_boosting", 53.5, 1.0, -5.0, 8.0)],
            "soseleto",
            "SOSELETO's model is kept: no other network is better beyond chance (mixed training minus SOSELETO: 95 % "
            "interval -6.0 to +7.0).",
        ),
        ([OURS], "soseleto", ""),
    ],
)
def test_the_verdict_names_the_kept_model_and_boosting_that_is_better(
    rows: list[dict[str, Any]], kept: str, expected: str
) -> None:
    assert verdict({"rows": rows, "kept": kept}) == expected


def test_the_comparison_is_in_the_summary_and_drawn(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=60, epochs=3)
    rows = [
        {"method": name, "accuracy": accuracy, "low": accuracy - 5, "high": accuracy + 4, "examples": 1200}
        for name, accuracy in (("soseleto", 91.5), ("ordinary", 80.0), ("target_only", 61.0))
    ]
    comparison = {"judged_on": "target", "folds": 5, "rows": rows}
    run.write_json(COMPARISON, comparison)
    text = text_of(render(run.path))
    assert (
        "Held-out accuracy on 1,200 target examples (5-fold cross-validation): SOSELETO 91.5 %, "
        "ordinary training 80.0 %, target only 61.0 %." in text
    )
    assert "ordinary training 80.0 % 75.0 % to 84.0 %" in text
    assert "Comparison with other methods on the same data and for as many epochs" in text
    run.write_json(COMPARISON, {**comparison, "epochs_of_others": 30})
    said = "on the same data: SOSELETO by the strong recipe for 3 epochs, the others plainly for 30"
    assert said in text_of(render(run.path))
    run.write_json(COMPARISON, {**comparison, "judged_on": "test", "rows": rows[:1]})
    page = render(run.path)
    assert "Held-out accuracy on 1,200 test examples: SOSELETO 91.5 %." in text_of(page)
    assert "Comparison with other methods" not in page


def test_without_probes_the_prediction_is_suggested_for_low_weights(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=40, epochs=2)
    columns = run.ranking()
    run.write_ranking(columns | {"predicted_label": np.array(["right & proper"] * 40)})
    low, left = columns["weight"] < 0.1, columns["label"] == "left"
    found = suggested_labels(run.ranking())
    assert found is not None
    assert (found[low & left] == "right & proper").all()
    assert not any(found[~(low & left)])


def test_a_training_with_probes_shows_their_weights(tmp_path: Path) -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    given: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 160,
        "lr": 0.01,
        "probes": 0.5,
        "device": "cpu",
    }
    torch.manual_seed(0)
    fit(torch.nn.Linear(3, 2), (x[:160], y[:160]), (x[160:], y[160:]), out=tmp_path / "run", **given)
    last = [record for record in RunFolder(tmp_path / "run").metrics() if record["event"] == "epoch"][-1]
    assert {name: group["count"] for name, group in last["probe_groups"].items()} == {"right": 10, "wrong": 10}
    page = render(tmp_path / "run")
    assert "<h3>Mean weight of the probes</h3>" in page
    assert "Estimated from 20 probes" in page


def test_a_report_is_the_same_every_time(images: RunFolder) -> None:
    assert render(images.path) == render(images.path)


def test_examples_without_an_image_are_marked(tmp_path: Path) -> None:
    run = fabricate_images(tmp_path / "run")
    columns = run.ranking()
    run.write_ranking(columns | {"id": np.array([f"other {i}" for i in range(59)] + [columns["id"][59]])})
    page = render(run.path)
    assert '<span class="blank">no image</span>' in page
    assert "data:image/png" in page


PICTURES = [
    (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "image/png", (8, 8)),
    (torch.zeros(2, 3, 40, 64, dtype=torch.uint8), "image/png", (64, 40)),
    (torch.zeros(2, 3, 300, 200, dtype=torch.uint8), "image/jpeg", (64, 96)),
    (torch.zeros(2, 4, 100, 100, dtype=torch.uint8), "image/jpeg", (96, 96)),
    (torch.linspace(-3, 5, 27).reshape(1, 3, 3, 3).repeat(2, 1, 1, 1), "image/png", (3, 3)),
]


@pytest.mark.parametrize(("inputs", "kind", "size"), PICTURES, ids=lambda value: str(getattr(value, "shape", value)))
def test_thumbnails_are_stored_at_the_size_they_are_shown(
    tmp_path: Path, inputs: torch.Tensor, kind: str, size: tuple[int, int]
) -> None:
    run = fabricate(tmp_path / "run", n=2, features=0, truth=False, epochs=1)
    thumbnails.save(run, Examples(inputs, torch.zeros(2, dtype=torch.int64), ids=("00000", "00001")))
    kept = thumbnails.load(run)
    assert set(kept) == {"00000", "00001"}
    for picture in kept.values():
        assert thumbnails.media_type(picture) == kind
        with Image.open(io.BytesIO(picture)) as image:
            assert image.size == size
            if inputs.is_floating_point():
                assert image.getextrema() == ((0, 78), (88, 167), (177, 255))  # scaled over the whole image


def test_inputs_that_are_not_images_have_no_thumbnails(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=2, features=0, truth=False, epochs=1)
    thumbnails.save(run, Examples(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), ids=("00000", "00001")))
    assert thumbnails.load(run) == {}


def test_the_largest_gallery_of_incompressible_images_stays_below_twenty_megabytes() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    shown = gallery.STRONGEST + MOST_CLASSES * 2 * PER_CLASS
    assert len(thumbnails.shrink(Image.fromarray(noise))) * shown * 4 / 3 < 19e6


def test_figure_one_has_its_five_panels(page: str) -> None:
    titles = re.findall(r"<h3>(\([a-e]\)[^<]*)</h3>", page)
    assert [title[:3] for title in titles] == ["(a)", "(b)", "(c)", "(d)", "(e)"]
    assert page.count("Precision and recall: at 0.1") == 1  # drawn once


def test_without_two_features_the_true_labels_have_their_own_section(tmp_path: Path) -> None:
    page = render(fabricate(tmp_path / "run", n=60, features=0, epochs=3).path)
    assert "Figure 1 of the paper" not in page
    assert "Evaluation against the true labels" in page
    assert "Mislabelled examples kept" in page


def test_without_true_labels_no_mislabelled_counts_are_shown(tmp_path: Path) -> None:
    page = render(fabricate(tmp_path / "run", n=60, truth=False, epochs=3).path)
    assert "Evaluation against the true labels" not in page
    assert "Mislabelled examples kept" not in page
    assert "true labels are known" not in page
    assert "Effective sample size" in page


def test_an_unfinished_run_is_reported_as_far_as_it_got(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=60, epochs=4)
    (run.path / "ranking.parquet").unlink()
    kept = [record for record in run.metrics() if record["event"] in ("start", "epoch")][:3]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    text = text_of(render(run.path))
    assert "has not finished: this report covers the first 2 epochs" in text
    assert "Most suspicious examples" not in text
    (run.path / "metrics.jsonl").unlink()
    assert "Training has not finished its first epoch" in text_of(render(run.path))


@pytest.mark.parametrize(("folder", "shown"), [("images", False), ("elsewhere", True)])
def test_paths_are_shown_where_they_differ_from_the_ids(tmp_path: Path, folder: str, shown: bool) -> None:
    run = fabricate(tmp_path / "run", n=6, epochs=1)
    columns = run.ranking()
    names = columns["id"] if folder == "images" else columns["id"][::-1]
    run.write_ranking(columns | {"path": np.array([f"{folder}/{name}" for name in names])})
    assert (f"{folder}/{names[0]}" in render(run.path)) is shown


def test_one_epoch_and_equal_scores_are_rendered(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=7, epochs=1)
    run.write_ranking(run.ranking() | {"score": np.zeros(7, dtype=np.float32)})
    assert text_of(render(run.path)).count("Most suspicious examples") == 3  # of all, and of both classes


def test_scores_that_were_never_measured_are_left_out(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=8, epochs=1)
    run.write_ranking(run.ranking() | {"score": np.full(8, np.nan, dtype=np.float32)})
    assert "<h3>Scores</h3>" not in render(run.path)


def test_a_folder_that_is_not_a_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a soseleto run"):
        render(tmp_path)


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    for _, attrs in Outline(page).tags:
        for name in ("src", "href", "srcset", "action"):
            assert (attrs.get(name) or "#").startswith(("#", "data:"))
    assert not re.search(r"url\(|@import|https?://", page)
    policy = next(attrs["content"] for _, attrs in Outline(page).tags if "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_headings_tables_and_charts_are_accessible(page: str) -> None:
    tags = Outline(page).tags
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"][1:] for tag, attrs in tags if tag == "a" and attrs["href"]]
    assert set(links) <= set(ids)
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for tag, attrs in tags if tag == "svg")
    assert all("scope" in attrs for tag, attrs in tags if tag == "th")
    assert "threshold" in [attrs.get("for") for tag, attrs in tags if tag == "label"]


def test_without_script_a_table_replaces_the_slider(page: str) -> None:
    assert '<div class="slider" hidden>' in page
    assert '<tr><th scope="row" class="num">0.25</th>' in page


def test_text_has_contrast_in_both_themes() -> None:
    css = (Path(tables.__file__).parent / "page" / "style.css").read_text("utf-8")
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in css.split("@media", 2)[:2]]
    for theme in themes:
        for name in ("ink", "muted", "accent", "wrong"):
            assert _contrast(theme[name], theme["paper"]) >= 4.5, name
        for name in ("right", "first", "second", "third", "fourth"):  # chart marks
            assert _contrast(theme[name], theme["paper"]) >= 3, name


def _contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_kept_counts_against_a_direct_count() -> None:
    rng = np.random.default_rng(1)
    weight = np.clip(rng.normal(0.5, 0.4, 300), 0, 1).astype(np.float32)
    weight[:5] = np.float32(0.1)  # on a threshold: kept
    wrong = rng.random(300) < 0.3
    table = tables.kept(weight, wrong)
    precision, recall = tables.precision_recall(table)
    for index, threshold in enumerate(tables.THRESHOLDS.astype(np.float32)):
        keep = weight >= threshold
        assert table.count[index] == keep.sum()
        assert table.wrong is not None
        assert table.wrong[index] == (keep & wrong).sum()
        total = weight[keep].astype(float).sum()
        expected = total**2 / (weight[keep].astype(float) ** 2).sum() if keep.any() else 0
        assert table.effective[index] == pytest.approx(expected)
        assert recall[index] == pytest.approx((~keep & wrong).sum() / wrong.sum())
        if (~keep).any():
            assert precision[index] == pytest.approx((~keep & wrong).sum() / (~keep).sum())
    assert np.isnan(precision[0])


def test_the_noise_rate_of_the_top_of_a_ranking() -> None:
    part, left = tables.noise_curve(np.array([False, False, True, True]))
    assert part.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert left.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2])


def test_labels_are_sorted_by_mean_weight_and_capped() -> None:
    labels = np.array(["a", "a", "b", "b", "b", "c"])
    rows, left_out = tables.by_label(labels, np.array([1, 0.5, 0.1, 0.2, 0.3, 0], dtype=np.float32), most=2)
    assert [(row.label, row.count) for row in rows] == [("b", 3), ("a", 2)]
    assert rows[0].kept[20] == 2
    assert left_out == 1


def test_a_label_is_not_a_class_when_it_is_a_real_number() -> None:
    assert tables.by_label(np.array([0.1, 0.2]), np.ones(2, dtype=np.float32)) == ([], 0)


def test_score_histogram_counts_every_example_once() -> None:
    score = np.append(np.random.default_rng(0).normal(size=999), 1e6)
    table = tables.score_histogram(score, None)
    assert table is not None
    assert table.counts["all"].sum() == 1000
    assert table.edges[-1] < 10  # one outlier does not stretch the axis
    assert table.beyond == 10


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 30, [0, 10, 20, 30]), (-1.06, 1.06, [-1, -0.5, 0, 0.5, 1]), (2, 2, [2])],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_long_tick_labels_widen_the_margin() -> None:
    def left(high: float) -> float:
        return Chart(x=(0, 1), y=(0, high), x_label="x", y_label="y").left

    assert left(0.0001) > left(1)


def test_a_line_breaks_where_a_value_is_missing() -> None:
    chart = Chart(x=(0, 4), y=(0, 1), x_label="x", y_label="y")
    chart.line(np.arange(5.0), np.array([0, 1, np.nan, 1, np.nan]), "first")
    assert [mark.count("L") for mark in chart.marks] == [1, 0]
    assert all("nan" not in mark for mark in chart.marks)


@pytest.mark.parametrize(("value", "text"), [(0, "0 %"), (1, "100 %"), (0.99999, "99.9 %"), (0.00001, "0.1 %")])
def test_a_share_does_not_round_to_a_bound_it_has_not_reached(value: float, text: str) -> None:
    assert share(value) == text


def test_fifty_thousand_examples_stay_small(tmp_path: Path) -> None:
    page = render(fabricate(tmp_path / "run", n=50_000, epochs=3).path)
    assert len(page) < 1_000_000
    assert "1 in 17 points is drawn." in page


@needs_browser
def test_in_a_browser_it_opens_without_errors_or_requests(run: RunFolder, browser: Browser) -> None:
    browser.open(write_report(run.path))
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert any(url.startswith("file:") for url in browser.requests())


@needs_browser
def test_in_a_browser_the_slider_is_moved_by_keys(run: RunFolder, browser: Browser) -> None:
    browser.open(write_report(run.path))
    assert browser.js("document.querySelector('.slider').hidden") is False
    rule_before = browser.js("document.querySelector('.rule.threshold').getAttribute('x1')")
    browser.js("document.getElementById('threshold').focus()")
    browser.press("ArrowRight")
    assert browser.js("document.getElementById('at').textContent") == "0.11"
    browser.press("End")
    weight, wrong = run.ranking()["weight"], run.ranking()["wrong"]
    kept = weight >= 1
    assert browser.js("document.getElementById('kept').textContent") == str(kept.sum())
    assert browser.js("document.getElementById('wrong').textContent") == str((kept & wrong).sum())
    assert browser.js("document.getElementById('lost').textContent") == str((~kept & ~wrong).sum())
    expected = f"{100 * kept[run.ranking()['label'] == 'left'].mean():.1f} %"
    rows = browser.js("[...document.querySelectorAll('#labels tbody tr')].map(row => row.innerText)")
    assert any(row.startswith("left") and expected in row for row in rows)
    assert browser.js("document.querySelector('.rule.threshold').getAttribute('x1')") != rule_before


@needs_browser
def test_in_a_browser_a_phone_is_not_scrolled_sideways_and_dark_is_dark(run: RunFolder, browser: Browser) -> None:
    browser.phone()
    browser.open(write_report(run.path))
    assert browser.js("document.documentElement.scrollWidth") <= 360
    light = browser.js("getComputedStyle(document.body).backgroundColor")
    browser.dark()
    assert browser.js("getComputedStyle(document.body).backgroundColor") != light
    browser.plain()


@needs_browser
def test_in_a_browser_the_gallery_shows_one_class_at_a_time(images: RunFolder, browser: Browser) -> None:
    browser.open(write_report(images.path))
    shown = "[...document.querySelectorAll('.class')].filter((one) => !one.hidden).map((one) => one.textContent)"
    assert [text.split("\n")[1] for text in browser.js(shown)] == ["class 0"]
    browser.js("document.getElementById('class').focus()")
    browser.press("ArrowDown")
    (text,) = browser.js(shown)
    assert text.startswith("\nclass 1\n20 examples, 4 suspects")
    assert re.search(r"class 1\W+suggested\W+class 2", text)
    first = "document.querySelectorAll('.class')[1].querySelector('img')"
    browser.js(f"{first}.scrollIntoView()")
    browser.wait(f"{first}.naturalWidth === 12")
    browser.press("End")
    assert len(browser.js(shown)) == 3
    assert browser.errors() == []


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark", "phone"])
@pytest.mark.parametrize("kind", ["pictures", "tables"])
def test_in_a_browser_it_is_accessible(
    run: RunFolder, images: RunFolder, browser: Browser, kind: str, theme: str
) -> None:
    browser.phone() if theme == "phone" else browser.dark() if theme == "dark" else browser.plain()
    browser.open(write_report(images.path if kind == "pictures" else run.path))
    assert accessibility.problems(browser) == []
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    browser.plain()


@needs_browser
def test_in_a_browser_fifty_thousand_examples_open_quickly(tmp_path: Path, browser: Browser) -> None:
    page = write_report(fabricate_images(tmp_path / "run", n=50_000, side=32, classes=60).path)
    times = []
    for _ in range(3):  # best of three, because the machine may be shared
        browser.open(page)
        times.append(browser.js("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert min(times) < 2000
    assert browser.js("document.images.length") == 24 + 60 * 24
    assert page.stat().st_size < 20e6


@needs_browser
def test_in_a_browser_the_first_tab_skips_to_the_summary(run: RunFolder, browser: Browser) -> None:
    browser.open(write_report(run.path))
    browser.press("Tab")
    assert browser.js("document.activeElement.getAttribute('href')") == "#summary"
