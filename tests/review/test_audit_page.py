"""The audit: a random sample checked on the review page and kept between sessions, and figures in the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accessibility
from browser import Browser, needs_browser
from fabricated import fabricate_images
from reviewing import open_review, press, serving
from soseleto.errors import DataError
from soseleto.review.queue import Audit, Decision, Decisions, prepare, read_decisions
from soseleto.review.server import Review
from soseleto.run_folder.folder import AUDIT, SUSPECTS, RunFolder
from typing_in import typed

SMALL = {"audit": True, "checks": 8}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """60 images of which 12 are suspects: every fifth, whose labels are the wrong ones."""
    return fabricate_images(tmp_path / "run", files=tmp_path / "images")


def is_wrong(name: str) -> bool:
    return int(name.rpartition("/")[2].removesuffix(".png")) % 5 == 0


def answer(review: Review, name: str) -> dict[str, Any]:
    return review.decide({"row": review.queue.ids.index(name), "action": "drop" if is_wrong(name) else "keep"})


def check(run: RunFolder, count: int, options: dict[str, Any] = SMALL) -> list[str]:
    """Answer the next ``count`` examples in a session of its own."""
    review = Review(run.path, **options)
    queue = [review.queue.ids[row] for row in review.queue.rows]
    todo = [name for name in queue if name not in review.decisions.latest()][:count]
    for name in todo:
        answer(review, name)
    review.decisions.close()
    return todo


def test_an_interrupted_audit_continues_with_the_same_sample(run: RunFolder) -> None:
    whole = prepare(run, checks=8).ids()
    assert len(whole) == 16
    assert check(run, 5) == whole[:5]
    assert check(run, 3, {"audit": True}) == whole[5:8]
    assert check(run, 99) == whole[8:]


def test_the_figures_are_in_audit_and_suspects_json(run: RunFolder) -> None:
    estimate = {"value": 0.99, "low": 0.95, "high": 1.0, "basis": "assumes random mistakes"}
    run.write_json(SUSPECTS, {"count": 12, "precision": estimate, "recall": estimate, "wrong_share": estimate})
    options = {"audit": True, "checks": 16}
    check(run, 1, options)
    kept = run.suspects() or {}
    assert kept["precision"] == estimate  # one check says too little
    check(run, 31, options)
    audit, kept = run.read_json(AUDIT) or {}, run.suspects() or {}
    assert audit["checked"] == {"suspects": 12, "others": 16}  # all suspects
    for name in ("precision", "recall", "wrong_share"):
        assert kept[name] == audit["figures"][name]
        assert kept[name]["basis"] == "audited"
    assert kept["precision"]["value"] == kept["precision"]["high"] == 1.0
    assert kept["wrong_share"]["low"] <= 0.2 <= kept["wrong_share"]["high"]


def test_a_hard_example_cannot_be_left_out(run: RunFolder) -> None:
    """Answers after the first that is missing are not counted: leaving out hard ones would bias the sample."""
    review = Review(run.path, **SMALL)
    audit = review.audit
    part = audit.strata[0]
    for name in part.order[1:5]:
        answer(review, name)
    assert audit.progress(review.decisions.latest()).suspects == 0
    answer(review, part.order[0])
    assert audit.progress(review.decisions.latest()).suspects == 5
    review.undo()
    assert (run.read_json(AUDIT) or {})["checked"]["suspects"] == 0
    review.decisions.close()


def test_what_was_reviewed_before_is_not_asked_again(run: RunFolder) -> None:
    ranking = run.ranking()
    suspects = [str(name) for name in ranking["id"][ranking["is_label_issue"]]]
    log = Decisions(run)
    for name in suspects[:9]:
        log.decide(Decision(name, "relabel", "class 1") if name != suspects[0] else Decision(name, "keep"))
    log.close()
    asked = check(run, 99, {"audit": True, "checks": 16})
    assert {name for name in asked if name in suspects} == set(suspects[9:])
    precision = (run.read_json(AUDIT) or {})["figures"]["precision"]
    assert precision["value"] == precision["low"] == precision["high"] == pytest.approx((8 + 3) / 12)


def test_a_later_review_updates_the_figures(run: RunFolder) -> None:
    check(run, 16)
    before = (run.read_json(AUDIT) or {})["figures"]["precision"]
    review = Review(run.path)
    for row in review.queue.rows:
        name = review.queue.ids[row]
        review.decide({"row": row, "action": "drop" if is_wrong(name) else "keep"})
    review.decisions.close()
    after = (run.read_json(AUDIT) or {})["figures"]["precision"]
    assert before["low"] < after["low"] == after["high"] == 1.0


def test_the_page_does_not_show_what_the_model_says(run: RunFolder) -> None:
    review = Review(run.path, **SMALL)
    state = review.state()
    review.decisions.close()
    assert all(item[name] is None for item in state["items"] for name in ("wrong", "weight", "suggested"))
    assert b"Suspect " not in review.page
    assert b'id="relabel"' not in review.page
    review = Review(run.path)
    assert review.state()["audit"] is None
    assert review.state()["items"][0]["wrong"] > 0.5
    review.decisions.close()


def test_bad_options_are_one_sentence(run: RunFolder) -> None:
    said = typed("audit", run.path, "--checks", 0)
    assert said.code == 2
    assert "--checks must be between 1 and 1000, got 0" in said.err
    check(run, 1)
    assert len(prepare(run, checks=10).ids()) == 20  # more checks are possible
    (run.path / "audit.json").write_text("{}")
    with pytest.raises(DataError, match=r"audit.json cannot be read"):
        Audit.load(run)


@needs_browser
def test_the_keyboard_answers_and_the_interval_narrows(run: RunFolder, browser: Browser) -> None:
    with serving(run, **SMALL) as server:
        browser.plain()
        open_review(browser, server)
        assert browser.text("#which") == "Example 1 of 16"
        assert accessibility.problems(browser) == []
        width = "Number(/and ([0-9.]+)/.exec(document.querySelector('#figures span').innerText)[1]) - " \
                "Number(/between ([0-9.]+)/.exec(document.querySelector('#figures span').innerText)[1])"  # fmt: skip
        widths = [browser.js(width)]
        for _ in range(16):
            press(browser, "w" if is_wrong(browser.text("#id")) else "k")
            widths.append(browser.js(width))
        assert widths == sorted(widths, reverse=True)
        assert widths[-1] < 0.5 * widths[0]
        assert browser.text("#sentence").startswith("All checks are done.")
        assert "soseleto report" in browser.text("#done")
        press(browser, "u")
        assert browser.text("#which") == "Example 16 of 16"
        assert browser.errors() == []
    wrong = {name for name, one in read_decisions(run).items() if one.action == "drop"}
    assert wrong
    assert all(is_wrong(name) for name in wrong)
    assert json.loads((run.path / "audit.json").read_text())["checked"] == {"suspects": 8, "others": 7}
    assert np.isfinite(widths).all()
