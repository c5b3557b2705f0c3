"""The report, rendered from fabricated run folders (docs/reference/contracts.md) and checked in a browser."""

import html.parser
import io
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
from report.test_lists import text_of
from soseleto.comparison.accuracy import TITLES
from soseleto.data import Examples, Problem
from soseleto.report import render, write_report
from soseleto.report.sentences import share, verdict
from soseleto.run_folder.folder import COMPARISON, PROBLEMS, SOURCE, SUSPECTS, RunFolder
from soseleto.run_folder.source import load_thumbnails, save_thumbnails


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


def test_messages_are_shown_and_nothing_from_the_run_becomes_markup(run: RunFolder, page: str) -> None:
    assert "Trained on 500 source and 50 target examples for 30 epochs in 0:00:12." in text_of(page)
    assert "the target loss is &lt;small&gt;" in page
    run.write_json(PROBLEMS, [vars(Problem("source", "not read", "1 file <b>", stops=False))])
    assert "<li>source: 1 file &lt;b&gt;</li>" in render(run.path)
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
    assert not [tag for tag, _ in outline.tags if tag == "script"]
    assert not any(name.startswith("on") for _, attrs in outline.tags for name in attrs)


def _row(method: str, accuracy: float, *minus_soseleto: float) -> dict[str, Any]:
    row = {"method": method, "title": TITLES[method], "accuracy": accuracy, "low": 0.0, "high": 100.0, "examples": 120}
    names = ("value", "low", "high")
    return row | ({"minus_soseleto": dict(zip(names, minus_soseleto, strict=True))} if minus_soseleto else {})


ON_FEATURES = _row("scan_mixed", 91.7, 39.17, 28.77, 48.28)  # shown and not kept
OURS, MIXED, BETTER = _row("soseleto", 52.5), _row("mixed", 50.0, -2.5, -9.0, 4.0), _row("mixed", 60.0, 7.5, 2.0, 13.0)


@pytest.mark.parametrize(
    ("rows", "kept", "expected"),
    [
        (
            [OURS, MIXED, ON_FEATURES],
            "soseleto",
            "SOSELETO's model is kept; the best of the others is that of mixed training (-2.5 points against "
            "SOSELETO's, 95 % interval -9.0 to +4.0, on held-out target examples).",
        ),
        (
            [OURS, BETTER],
            "mixed",
            "Selection did not pay here: the model of mixed training is kept (+7.5 points against SOSELETO's, 95 % "
            "interval +2.0 to +13.0, on held-out target examples).",
        ),
        (
            [OURS, _row("scan", 52.0, -0.5, -3.0, 2.0)],
            "scan",
            "The first answer is kept: training the network did not clearly add to it (+0.5 points, 95 % interval -2.0 "
            "to +3.0, on held-out target examples).",
        ),
        ([OURS], "soseleto", ""),
    ],
)
def test_the_verdict_names_the_kept_model(rows: list[dict[str, Any]], kept: str, expected: str) -> None:
    assert verdict({"rows": rows, "kept": kept}) == expected
    on_test = {"judged_on": "test", "rows": [OURS, _row("mixed", 99.0, 46.5, 40.0, 50.0)], "kept": kept}
    assert verdict({**on_test, "held_out": rows}) == expected
    assert verdict({**on_test, "held_out": []}) == "SOSELETO's model is kept: without folds there is no choice."


def test_the_comparison_is_in_the_summary_and_drawn(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=60, epochs=3)
    rows = [
        {**_row(name, accuracy), "low": accuracy - 5, "high": accuracy + 4, "examples": 1200}
        for name, accuracy in (("soseleto", 91.5), ("ordinary", 80.0), ("target_only", 61.0))
    ]
    comparison = {"judged_on": "target", "folds": 5, "rows": rows}
    run.write_json(COMPARISON, comparison)
    text = text_of(render(run.path))
    assert "Held-out accuracy on 1,200 target examples (5-fold cross-validation)" in text
    assert "ordinary training 80.0 % 75.0 % to 84.0 %" in text
    run.write_json(COMPARISON, {**comparison, "judged_on": "test", "rows": rows[:1]})
    assert "on 1,200 test examples" in text_of(render(run.path))


def test_it_begins_with_accuracy_wrong_labels_and_the_next_commands_and_ends_with_weights(tmp_path: Path) -> None:
    run = add_probe_columns(fabricate(tmp_path / "run", n=60, epochs=2))
    run.write_json(COMPARISON, {"judged_on": "target", "folds": 3, "rows": [OURS, MIXED], "kept": "soseleto"})
    share = {"value": 0.2, "low": 0.1, "high": 0.3, "basis": "from earlier labels"}
    run.write_json(SUSPECTS, {"count": 12, "wrong_share": share})
    run.write_json(SOURCE, {"path": "source.csv", "features": ["width", "height"]})
    text = text_of(render(run.path).split("<main>")[1])
    order = [
        "SOSELETO, kept 52.5 %",
        "-2.5 points against SOSELETO's",
        "20 % (10 to 30; from earlier labels) of the 60 labels are wrong.",
        f"soseleto review {run.path} shows the suspects",
        f"soseleto audit {run.path} measures",
        f"soseleto review {run.path} --export clean.csv",
        "P(mislabelled) width height Weight",
        "Best examples",
        "Terms used in this report",
        "Training curves",
        "config.json",
    ]
    places = [text.find(part) for part in order]
    assert -1 not in places
    assert places == sorted(places)
    assert text.count("52.5 %") == 1


def test_examples_without_an_image_are_marked(tmp_path: Path) -> None:
    run = fabricate_images(tmp_path / "run")
    columns = run.ranking()
    run.write_ranking(columns | {"id": np.array([f"other {i}" for i in range(59)] + [columns["id"][59]])})
    page = render(run.path)
    assert "<td>no image</td>" in page
    assert "data:image/jpeg" in page


PICTURES = [
    (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), (8, 8)),
    (torch.zeros(2, 3, 300, 200, dtype=torch.uint8), (64, 96)),
    (torch.linspace(-3, 5, 27).reshape(1, 3, 3, 3).repeat(2, 1, 1, 1), (3, 3)),
]


@pytest.mark.parametrize(("inputs", "size"), PICTURES, ids=lambda value: str(getattr(value, "shape", value)))
def test_thumbnails_are_stored_at_the_size_they_are_shown(
    tmp_path: Path, inputs: torch.Tensor, size: tuple[int, int]
) -> None:
    run = fabricate(tmp_path / "run", n=2, features=0, truth=False, epochs=1)
    save_thumbnails(run, Examples(inputs, torch.zeros(2, dtype=torch.int64), ids=("00000", "00001")))
    kept = load_thumbnails(run)
    assert set(kept) == {"00000", "00001"}
    for picture in kept.values():
        with Image.open(io.BytesIO(picture)) as image:
            assert image.size == size
            if inputs.is_floating_point():
                ends = np.array([[0, 78], [88, 167], [177, 255]])  # scaled over the whole image
                assert np.abs(np.array(image.getextrema()) - ends).max() < 12


def test_without_true_labels_no_mislabelled_counts_are_shown(tmp_path: Path) -> None:
    page = render(fabricate(tmp_path / "run", n=60, truth=False, epochs=3).path)
    assert "mislabelled peak" not in page
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


def test_one_epoch_and_equal_scores_are_rendered(tmp_path: Path) -> None:
    run = fabricate(tmp_path / "run", n=7, epochs=1)
    run.write_ranking(run.ranking() | {"score": np.zeros(7, dtype=np.float32)})
    assert text_of(render(run.path)).count("Most suspicious examples") == 1  # none is listed twice


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    for _, attrs in Outline(page).tags:
        for name in ("src", "href", "srcset", "action"):
            assert (attrs.get(name) or "#").startswith(("#", "data:"))
    assert not re.search(r"url\(|@import|https?://", page)
    policy = next(attrs["content"] for _, attrs in Outline(page).tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.parametrize(("value", "text"), [(0, "0 %"), (1, "100 %"), (0.99999, "99.9 %"), (0.00001, "0.1 %")])
def test_a_share_does_not_round_to_a_bound_it_has_not_reached(value: float, text: str) -> None:
    assert share(value) == text


@needs_browser
def test_in_a_browser_it_opens_without_errors_or_requests(run: RunFolder, browser: Browser) -> None:
    browser.open(write_report(run.path))
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert any(url.startswith("file:") for url in browser.requests())


@needs_browser
def test_in_a_browser_a_table_of_long_texts_wraps_at_1100_pixels(tmp_path: Path, browser: Browser) -> None:
    run = add_probe_columns(fabricate(tmp_path / "run", n=60, epochs=2))
    ranking = run.ranking()
    texts = np.array([f"a comment of many words, the {row}th of sixty, " * 4 for row in range(60)], dtype=object)
    run.write_ranking(ranking | {"x0": texts, "label": np.array(["a_label_of_one_long_word_" * 2] * 60)})
    browser.call("Emulation.setDeviceMetricsOverride", width=1100, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(write_report(run.path))
    over = "[...document.querySelectorAll('.scroll')].map((one) => one.scrollWidth - one.clientWidth)"
    assert set(browser.js(over)) == {0}
    assert len(browser.js(over)) >= 2
    browser.plain()


@needs_browser
@pytest.mark.parametrize(("kind", "theme"), [("tables", "light"), ("tables", "phone"), ("pictures", "dark")])
def test_in_a_browser_it_is_accessible(
    run: RunFolder, images: RunFolder, browser: Browser, kind: str, theme: str
) -> None:
    browser.phone() if theme == "phone" else browser.dark() if theme == "dark" else browser.plain()
    browser.open(write_report(images.path if kind == "pictures" else run.path))
    browser.js("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert accessibility.problems(browser) == []
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    browser.plain()
