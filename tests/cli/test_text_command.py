"""``soseleto fit`` on texts with a pretrained model and without, and everything that follows on the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import soseleto
from soseleto.comparison import trainings as comparison
from soseleto.errors import DataError
from soseleto.review.queue import Queue
from soseleto.run_folder.folder import PRETRAINED, RunFolder
from tiny_text_model import make_folder, write_reviews
from typing_in import run as command
from typing_in import typed

SHORT = ("--epochs", "2", "--device", "cpu", "--no-baselines", "--folds", "0")


def refusal(*words: object) -> str:
    said = typed(*words)
    assert said.code == 2, said.err
    return said.err


def fit_words(desk: Path, out: str, *more: object, model: bool = True) -> list[object]:
    sets = [part for name in ("source", "target") for part in (f"--{name}", desk / f"{name}.csv")]
    given = ["--model", f"hf:{desk / 'tiny'}"] if model else []
    config = desk / f"{out}.toml"
    config.write_text("[reading]\ntruth_column = 'truth'\n" + "[pretrained]\nmax_tokens = 24\n" * model)
    words = ["--text-column", "review", "--drop-column", "stars", "--config", config, *given]
    chosen = ["--out", desk / out, "--lr", 0.1, "--suspect-precision", 0.2, *SHORT]
    return ["fit", *sets, *words, *chosen, *more]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables, a tiny BERT, and a finished run."""
    folder = tmp_path_factory.mktemp("texts")
    make_folder(folder / "tiny")
    write_reviews(folder / "source.csv", 80, seed=0, wrong=0.2)
    write_reviews(folder / "target.csv", 40, seed=1)
    (folder / "printed.txt").write_text(command(*fit_words(folder, "run")))
    return folder


def test_the_plan_says_what_is_read(desk: Path) -> None:
    printed = (desk / "printed.txt").read_text()
    assert "  stars   left out        0  the model reads the text alone" in printed
    assert "column 'review' is read up to 24 tokens a text; 24 of 80 source texts are cut" in printed
    assert f"model hf:{desk / 'tiny'} with " in printed


def test_the_run_keeps_all_that_predict_needs(desk: Path, tmp_path: Path) -> None:
    """Also where the model's folder is gone."""
    run = tmp_path / "moved"
    (desk / "run").rename(run)
    (desk / "tiny").rename(desk / "away")
    try:
        loaded = soseleto.load(run, device="cpu")
        texts = pd.read_csv(desk / "target.csv")["review"].tolist()
        expected = loaded.predict_proba(texts).max(1).values
        printed = command("predict", run, desk / "target.csv", "--device", "cpu").splitlines()[1:]
        assert [float(line.rsplit(",", 1)[1]) for line in printed] == pytest.approx(expected.tolist(), abs=1e-4)
        frame = pd.DataFrame({"review": texts[:3]})
        assert loaded.predict_proba(frame).allclose(loaded.predict_proba(texts[:3]))
        assert 0 <= loaded.evaluate(desk / "target.csv")["accuracy"] <= 100
    finally:
        run.rename(desk / "run")
        (desk / "away").rename(desk / "tiny")


def test_the_first_answer_reads_texts_before_the_training(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = comparison.fit

    def is_stopped(*arguments: Any, progress: Any, **more: Any) -> Any:
        def stop(event: str, record: dict[str, Any]) -> None:
            if event == "epoch":
                raise KeyboardInterrupt

        return fit(*arguments, progress=[*progress, stop], **more)

    monkeypatch.setattr(comparison, "fit", is_stopped)
    assert typed(*fit_words(desk, "stopped")).code == 130
    run = desk / "stopped"
    assert not RunFolder(run).has_ended()
    assert command("predict", run, desk / "target.csv", "--device", "cpu").count("\n") == 1 + 40
    (row,) = json.loads(command("rank", run, "--worst", 1, "--format", "json"))
    assert row["review"] in set(pd.read_csv(desk / "source.csv")["review"])


def test_a_changed_tokenizer_is_refused(desk: Path) -> None:
    path = desk / "run" / PRETRAINED
    before = path.read_bytes()
    path.write_bytes(before.replace(b'\\"film\\"', b'\\"fims\\"'))
    try:
        with pytest.raises(DataError, match=r"pretrained\.json is damaged"):
            soseleto.load(desk / "run")
    finally:
        path.write_bytes(before)


def test_ranking_review_and_report_have_the_texts(desk: Path) -> None:
    texts = set(pd.read_csv(desk / "source.csv")["review"])
    lines = command("rank", desk / "run", "--worst", "5", "--format", "json")
    rows = json.loads(lines)
    assert {row["review"] for row in rows} <= texts
    items = Queue(RunFolder(desk / "run")).to_json()
    assert items["features"] == ["review", "stars"]
    assert {item["values"][0] for item in items["items"]} <= texts
    page = (desk / "run" / "report.html").read_text()
    assert rows[0]["review"] in page


def test_an_exported_folder_is_read_by_transformers(desk: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    folder = tmp_path / "model"
    command("export", desk / "run", "--pretrained", folder)
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = ["the film was good", "awful and dull and very poor"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    head = load_file(folder / "classifier.safetensors")
    outputs = (states * mask).sum(1) / mask.sum(1) @ head["weight"].T + head["bias"]
    assert torch.allclose(outputs.softmax(1), soseleto.load(desk / "run").predict_proba(texts), atol=1e-5)
    assert model.config.id2label == {0: "neg", 1: "pos"}
    assert "exists already: give a new folder" in refusal("export", desk / "run", "--pretrained", folder)
    assert "add --onnx FILE, or --pretrained FOLDER" in refusal("export", desk / "run")


def test_without_a_model_texts_are_a_bag_of_words_and_the_plan_says_so(desk: Path) -> None:
    printed = command(*fit_words(desk, "words", "--epochs", "1", model=False))
    assert "texts are read as hashed words, which is fast" in printed
    assert "--model hf:FOLDER_OR_ID" in printed
    assert "model linear" in printed


@pytest.mark.parametrize(
    ("tokens", "model", "sentence"),
    [
        (65, True, "max_tokens must be from 8 to 64 with this model, got 65"),
        (20, False, "max_tokens has no effect without a pretrained text model"),
    ],
)
def test_mistakes_are_one_sentence(desk: Path, tokens: int, model: bool, sentence: str) -> None:
    words = fit_words(desk, "never", model=model)
    (desk / "never.toml").write_text(f"[pretrained]\nmax_tokens = {tokens}\n")
    assert sentence in refusal(*words)
    assert "there is no folder './nowhere'" in refusal(*words, "--model", "hf:./nowhere")


def test_weights_that_are_a_pickle_and_code_of_a_model_are_refused_before_training(desk: Path, tmp_path: Path) -> None:
    pickled, coded = tmp_path / "pickled", tmp_path / "coded"
    for folder in (pickled, coded):
        shutil.copytree(desk / "tiny", folder)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    config = json.loads((coded / "config.json").read_text())
    own = {"model_type": "of-its-own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (coded / "config.json").write_text(json.dumps({**config, **own}))
    (coded / "own.py").write_text("raise SystemExit('was run')\n")
    said = [refusal(*fit_words(desk, "never", model=False), "--model", f"hf:{each}") for each in (pickled, coded)]
    assert "are a pickle (.bin), which can run code and is not loaded: save the model again" in said[0]
    assert "needs code of its own, which is not run: choose a model of transformers." in said[1]
