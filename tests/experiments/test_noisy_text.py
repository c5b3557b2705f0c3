"""The experiment with texts: its sides, its lines, a run of each kind, what it measures, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import cleanlab, measures
from experiments.noisy_text import data as texts
from experiments.noisy_text import encoding, experiment, tables
from experiments.noisy_text.command import configs, main, parser
from experiments.noisy_text.configuration import TRUSTED, Config, configuration, lines_of
from experiments.noisy_text.experiment import heading, make_method, prepare_data, run_all, run_one
from experiments.results import Row, started
from soseleto.data import TokenViews
from soseleto.defaults import STRONG_TEXT_LR, resolve
from soseleto.errors import DataError, UsageError
from soseleto.methods import Strong
from soseleto.models.pretrained_images import last_blocks
from soseleto.models.pretrained_text import make_text_model
from soseleto.pieces import chain
from tiny_text_model import BAD, GOOD, make_folder

N, TESTED = 160, 40


def made_up(noise: str, root: Any = None) -> texts.News:
    """Reviews of two classes, a fifth labelled wrongly; of "hausa" the last 40 were never checked."""
    truth = torch.arange(N + TESTED) % 2
    words = [
        f"the {GOOD[i % 4] if truth[i] else BAD[i % 4]} film was very {' '.join(str(i))}" for i in range(N + TESTED)
    ]
    labels = torch.where(torch.arange(N) % 10 < 2, 1 - truth[:N], truth[:N])
    known = truth[:N].clone()
    if noise == "hausa":
        known[-40:] = texts.UNKNOWN
    return texts.News(tuple(words[:N]), labels, known, tuple(words[N:]), truth[N:], ("bad", "good"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(texts, "read", made_up)
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path_factory.getbasetemp() / "noisy text"))


@pytest.fixture
def tiny(folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "n_trusted": 40, "epochs": 2, "batch_size": 32, "target_batch_size": 8}


@pytest.mark.parametrize("encoder", ["trained", "frozen"])
@pytest.mark.parametrize("noise", list(TRUSTED))
def test_sides_do_not_overlap_and_have_their_labels(noise: str, encoder: str, tiny: dict[str, Any]) -> None:
    config = configuration("mixed", noise=noise, encoder=encoder, select=True, n_heldout=30, **tiny)
    data, news = prepare_data(config, device="cpu"), made_up(noise)
    source, trusted, heldout = (
        [int(one) for one in side.ids or ()] for side in (data.source, data.trusted, data.evaluated)
    )
    assert [len(source), len(trusted), len(heldout)] == [N - 70, 40, 30]
    assert len({*source, *trusted, *heldout}) == N
    assert torch.equal(data.source.labels, news.labels[source])
    assert torch.equal(data.truth, news.truth[source])
    assert torch.equal(data.before, news.labels[trusted])
    for side, at in ((data.trusted, trusted), (data.evaluated, heldout)):
        assert torch.equal(side.labels, news.truth[at])
        assert int(side.labels.min()) >= 0  # only checked ones
    tested = prepare_data(configuration("mixed", noise=noise, encoder=encoder, **tiny), device="cpu")
    assert (len(tested.source), len(tested.evaluated)) == (N - 40, TESTED)
    assert torch.equal(tested.evaluated.labels, news.test_labels)
    assert tested.source.truth is None  # nothing can train on it


def test_every_line_gets_the_same_data_and_is_a_method(tiny: dict[str, Any]) -> None:
    for encoder in ("trained", "frozen"):
        first = prepare_data(configuration("ordinary", encoder=encoder, **tiny), device="cpu")
        for line in lines_of(encoder):
            config = configuration(line, encoder=encoder, **tiny)
            data = prepare_data(config, device="cpu")
            for side in ("source", "trusted", "evaluated"):
                assert getattr(data, side).fingerprint() == getattr(first, side).fingerprint()
            if config.base != "logistic":
                assert make_method(config, nn.Linear(1, 1)).name == config.base
            steps = (config.epochs, config.batch_size, config.lr, config.optimizer, config.schedule)
            same = steps == tuple(getattr(configuration("ordinary", encoder=encoder, **tiny), n) for n in STEPS)
            faster = encoder == "trained" and line.startswith("strong")
            assert same != (line == "target_only_longer" or faster)


STEPS = ("epochs", "batch_size", "lr", "optimizer", "schedule")


def test_the_weight_step_follows_the_epochs() -> None:
    steps = [dict(configuration("soseleto_usual", encoder=e).settings)["weight_step"] for e in ("trained", "frozen")]
    assert steps == [2.0, 0.3]
    assert dict(configuration("soseleto_usual_frozen").settings)["weight_step"] is None


def test_the_default_is_what_fit_uses(tmp_path: Path) -> None:
    model = make_text_model(f"hf:{make_folder(tmp_path / 'three', layers=3)}", "noisy", classes=2)
    blocks = last_blocks(model, 2)
    assert blocks == (
        *(f"encoder.language_model.encoder.layer.{at}." for at in (1, 2)),
        "classifier.weight",
        "classifier.bias",
    )
    for encoder, network in (("trained", model), ("frozen", nn.Linear(3, 2))):
        ours = make_method(configuration("soseleto_usual", encoder=encoder), network)
        default: Any = resolve(network, classes=True, ends_in_linear=True, wrong_share=0.3).method
        assert ours == replace(default, gradients=chain(default.gradients))


def test_more_trusted_texts_contain_the_fewer() -> None:
    truth = made_up("ag_news").truth
    few, many = (texts.split(truth, n_trusted=n, n_heldout=0, n_source=None, seed=3).trusted.tolist() for n in (10, 50))
    assert many[:10] == few
    other = texts.split(truth, n_trusted=10, n_heldout=0, n_source=None, seed=4).trusted.tolist()
    assert other != few


def test_embeddings_are_the_encoders_and_are_cached(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path))
    some = made_up("ag_news").texts[::-1]  # from the longest to the shortest
    found = encoding.embeddings(some, folder, 12, "cpu")
    encoder = encoding.make_text_model(f"hf:{folder}", "transfer", classes=0).eval()
    prepare = encoding.preparation(folder, 12)
    for at in (0, 7, N - 1):
        alone = prepare(prepare.tokens(some[at : at + 1]))
        with torch.no_grad():
            torch.testing.assert_close(found[at], encoder(**alone)[0])
    monkeypatch.setattr(encoding, "_embedded", None)
    assert torch.equal(encoding.embeddings(some, folder, 12, "cpu"), found)
    next(tmp_path.glob("embeddings-*")).write_bytes(b"damaged")
    with pytest.raises(TypeError):
        encoding.embeddings(some, folder, 12, "cpu")


def test_runs_on_frozen_embeddings_and_their_rows(tiny: dict[str, Any], tmp_path: Path) -> None:
    lines = (
        "ordinary",
        "cleanlab",
        "meta_weight_net",
        "soseleto_shared_shuffled",
        "soseleto_doubting",
        "soseleto_probes",
        "strong",
        "strong_frozen",
        "strong_shuffled",
        "strong_probes",
    )
    todo = [configuration(line, noise="hausa", encoder="frozen", **tiny) for line in lines]
    rows = {row["method"]: row for row in run_tiny(todo, tmp_path)}
    signals = {line: set(row["detection"]) for line, row in rows.items()}
    assert signals["ordinary"] == {"loss", "margin"}
    learned = ("soseleto_doubting", "meta_weight_net", "strong", "strong_frozen", "strong_shuffled")
    assert all(signals[line] == {"loss", "margin", "weight", "score"} for line in learned)
    assert signals["soseleto_probes"] == signals["strong_probes"] == {"weight", "score", "probability"}
    assert set(rows["cleanlab"]["issues"]) == {"count", "precision", "recall"}
    (suspects,) = rows["soseleto_probes"]["suspects"]
    assert suspects["asked"] == 90
    assert suspects["basis"] == "from earlier labels"
    assert set(suspects["precision"]) == set(suspects["recall"]) == {"claimed", "truth"}
    again: list[str] = []
    run_all(todo, tmp_path / "rows.json", device="cpu", report=again.append)
    assert again == [f"{len(todo)} of {len(todo)} runs are in {tmp_path / 'rows.json'} already"]


def test_the_strong_line_is_the_strong_recipe_for_texts() -> None:
    config = configuration("strong", encoder="trained")
    default = resolve(nn.Linear(3, 2), inputs="tokens", n_target=500, method=Strong())
    assert Strong(**dict(config.settings)) == default.method
    assert config.target_batch_size == default.target_batch_size
    assert (config.lr, configuration("strong", encoder="frozen").lr) == (STRONG_TEXT_LR, 0.1)


def test_a_line_with_one_view_has_one(tiny: dict[str, Any]) -> None:
    for line, count in (("strong", 2), ("strong_one_view", 1)):
        config = configuration(line, encoder="trained", **tiny)
        assert experiment._views(config, prepare_data(config, device="cpu")) == TokenViews(count=count)
        default = resolve(nn.Linear(1, 1), inputs="tokens", method=Strong()).method
        assert make_method(config, nn.Linear(1, 1)) == default


def test_runs_of_a_model_that_is_fine_tuned_and_their_rows(tiny: dict[str, Any], tmp_path: Path) -> None:
    lines = ("soseleto_probes_alone", "cleanlab", "strong")
    few = {**tiny, "epochs": 1, "n_source": 64}
    todo = [configuration(line, encoder="trained", **{**few, "folds": 2 * (line == "cleanlab")}) for line in lines]
    ours, theirs, strong = run_tiny(todo, tmp_path)
    assert ours["suspects"][0]["basis"] == "assumes estimated mistakes"
    assert {"weight", "score"} <= set(strong["detection"])
    assert "cleanlab_margin" in theirs["detection"]


def run_tiny(todo: list[Config], folder: Path) -> Sequence[Row]:
    """The rows, with the entries that all of them have checked; every table can be made of them."""
    rows = run_all(todo, folder / "rows.json", device="cpu", report=lambda line: None).rows
    for row, config in zip(rows, todo, strict=True):
        assert row["setting"] == {"noise": config.noise, "n_trusted": 40, "encoder": config.encoder}
        assert 0 <= row["accuracy"] <= 100
        assert row["seconds"] > 0
        assert row["config"]["model"] == "tiny"  # no folder of this machine
        for found in row["detection"].values():
            assert set(found) == {"auroc", "precision", "average_precision"}
    return rows


def test_the_model_is_trained_on_what_cleanlab_keeps(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def note(config: Config, data: experiment.Data, *where: Any) -> Any:
        sizes.append(len(data.source))
        return train(config, data, *where)

    def some_ones(probabilities: Any, given: Any) -> Any:
        return (given == 1) & (np.arange(len(given)) < 50)

    train = experiment.train
    monkeypatch.setattr(experiment, "train", note)
    monkeypatch.setattr(cleanlab, "confident_issues", some_ones)
    row = run_one(configuration("cleanlab", encoder="frozen", **tiny), device="cpu")
    assert sizes[:-1] == [96] * 5
    assert sizes[-1] == 120 - row["issues"]["count"] < 120


def test_a_gpu_fine_tunes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, frozen = (configuration("mixed", encoder=encoder) for encoder in ("trained", "frozen"))
    assert experiment._autocast(trained, "cpu") is None
    monkeypatch.setattr(experiment, "choose_device", torch.device)
    assert experiment._autocast(trained, "cuda") == torch.bfloat16
    assert experiment._autocast(frozen, "cuda") is None
    assert experiment._autocast(replace(trained, precision="float32"), "cuda") is None


def test_held_out_texts_are_evaluated_and_test_texts_are_not_read(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_test(noise: str, root: Any = None) -> texts.News:
        news = made_up(noise)
        return texts.News(news.texts, news.labels, news.truth, (), torch.zeros(0, dtype=torch.int64), news.classes)

    monkeypatch.setattr(texts, "read", without_test)
    for line in ("logistic_mixed", "mixed"):
        row = run_one(configuration(line, encoder="frozen", select=True, n_heldout=30, **tiny), device="cpu")
        assert "accuracy" not in row
        assert 0 <= row["heldout_accuracy"] <= 100


def test_logistic_regression_is_trained_on_what_its_title_says(tiny: dict[str, Any]) -> None:
    """The trusted texts have the only examples of a class."""
    config = configuration("logistic_noisy", encoder="frozen", **tiny)
    data = prepare_data(config, device="cpu")
    third = replace(data.trusted, inputs=data.trusted.inputs + 5.0, labels=torch.full((40,), 2), classes=None)
    data = replace(data, trusted=third, evaluated=third)
    mixed = configuration("logistic_mixed", encoder="frozen", **tiny)
    assert experiment._logistic(config, data)["accuracy"] == 0.0
    assert experiment._logistic(mixed, data)["accuracy"] == 100.0


def test_the_oracle_learns_the_right_labels_of_other_texts(tiny: dict[str, Any]) -> None:
    """Two classes that lie apart, nearly all labels wrong; texts that were never checked are left out."""
    config = configuration("logistic_right", encoder="frozen", **tiny)
    data = prepare_data(config, device="cpu")
    truth = torch.arange(len(data.source)) % 2
    labels = torch.where(torch.arange(len(truth)) < 10, truth, 1 - truth)
    inputs = torch.randn(len(truth), 3, generator=torch.Generator().manual_seed(0)) + 20.0 * truth[:, None]
    source = replace(data.source, inputs=inputs, labels=labels)
    trusted = source.subset(torch.arange(10))
    evaluated = replace(source, labels=truth)
    row = experiment._logistic(config, replace(data, source=source, truth=truth, trusted=trusted, evaluated=evaluated))
    assert row["accuracy"] == 100.0
    assert row["detection"]["right labels"]["auroc"] == 1.0
    unchecked = torch.where(torch.arange(len(truth)) < 50, truth, measures.UNKNOWN)
    row = experiment._logistic(
        config, replace(data, source=source, truth=unchecked, trusted=trusted, evaluated=evaluated)
    )
    assert row["accuracy"] == 100.0


class Found:
    """Suspects with given probabilities."""

    basis = "random mistakes"
    precision = type("Estimate", (), {"low": 0.5, "high": 1.0})

    def __init__(self, probability: list[float], threshold: float) -> None:
        self.probability = torch.tensor(probability)
        self.is_suspect = self.probability >= threshold

    def __len__(self) -> int:
        return int(self.is_suspect.sum())


def test_suspects_are_counted_where_the_truth_is_known() -> None:
    labels, truth = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1, 0, 0, 1, -1])
    found: Any = Found([0.9, 0.7, 0.2, 0.2, 1.0], 0.6)
    row = measures.suspects(found, labels, truth, 0.9)
    assert (row["asked"], row["count"], row["interval"]) == (90, 3, [50.0, 100.0])
    assert row["precision"] == {"claimed": 80.0, "truth": 50.0}
    assert row["recall"] == {"claimed": 80.0, "truth": 100.0}
    assert row["wrong_share"] == {"claimed": 50.0, "truth": 25.0}
    none = measures.suspects(Found([0.1] * 5, 0.6), labels, truth, 0.9)  # type: ignore[arg-type]
    assert none["precision"] == {"claimed": None, "truth": None}
    assert none["interval"] == [None, None]
    listed = torch.tensor([True, True, False, False, True])
    assert measures.issues(listed, labels, truth) == {"count": 3, "precision": 50.0, "recall": 100.0}


def test_unchecked_labels_do_not_count_as_wrong() -> None:
    labels, truth = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, -1])
    trust = torch.tensor([0.9, 0.1, 0.8, 1.0])
    assert measures.detection(labels, truth, {"weight": trust})["detection"]["weight"] == {
        "auroc": 1.0,
        "precision": 1.0,
        "average_precision": 1.0,
    }


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--methods mixed logistic_mixed soseleto --noise ag_news --trusted 100 300 --seeds 3 --held-out --epochs 7"
    found = configs(parser().parse_args([*words.split(), "--set", "weight_step=0.2", "--out", "rows.json"]))
    assert len(found) == 2 * (2 + 3)  # no logistic regression on a model that is trained
    assert {(config.n_trusted, config.n_heldout) for config in found} == {(100, 2000), (300, 2000)}
    assert all(config.seed == 3 and config.epochs == 7 and config.select for config in found)
    assert found[1].method == "soseleto[weight_step=0.2]"
    every = configs(parser().parse_args(["--seeds", "0", "--out", "rows.json"]))
    assert len(every) == 4 * (len(lines_of("trained")) + len(lines_of("frozen")))
    for words in ("--noise english", "--methods logistic_noisy --encoder trained", "--methods sosoleto"):
        with pytest.raises(SystemExit):
            main([*words.split(), "--out", str(tmp_path / "rows.json")])
    assert "choose from ag_news, hausa" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()


def test_what_cannot_be_is_one_sentence(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is held out: add --held-out"):
        configuration("mixed", n_heldout=30)
    with pytest.raises(UsageError, match="choose the encoder 'frozen'"):
        configuration("logistic_noisy", encoder="trained")
    with pytest.raises(UsageError, match="are too many for 120 checked ones"):
        prepare_data(configuration("mixed", noise="hausa", select=True, n_heldout=90, **tiny))
    with pytest.raises(UsageError, match="--model FOLDER"):
        prepare_data(configuration("mixed", n_trusted=40, model="none"), root=tmp_path)


def test_reproduce_runs_every_line_of_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(todo: list[Any], out: Path, *, report: Any) -> Any:
        asked.extend(todo)
        return started("noisy-text")

    monkeypatch.setattr(experiment, "run_all", note)
    experiment.reproduce(tmp_path, seeds=2, report=print)
    assert (
        len({str(heading(config)) for config in asked})
        == len(asked)
        == 2 * 4 * (len(lines_of("trained")) + len(lines_of("frozen")))
    )


def write_news(folder: Path) -> None:
    """The six files, with two texts each."""
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"noisy_ag_news_{split}.csv").write_text('label,gt,text,group\n2,3,"a, b",5\n1,1,c,6\n')
    (folder / "hausa_train_clean.tsv").write_text('news_title\tlabel\n"a ""b"""\tWorld\nc\tAfrica\n')
    (folder / "hausa_train_clean_noisy_labels.tsv").write_text(
        '\tnews_title\tlabel\n0\t"a ""b"""\tHealth\n1\tc\tAfrica\n'
    )
    (folder / "hausa_train_noisy.tsv").write_text("\tnews_title\tlabel\n0\td\tWorld\n")
    (folder / "hausa_test.tsv").write_text("news_title\tlabel\ne\tPolitics\n")


def test_files_are_read(tmp_path: Path) -> None:
    write_news(tmp_path / "text")
    news = texts.READERS["ag_news"](tmp_path / "text")
    assert news.texts == ("a, b", "c")
    assert (news.labels.tolist(), news.truth.tolist(), news.test_labels.tolist()) == ([2, 1], [3, 1], [3, 1])
    news = texts.READERS["hausa"](tmp_path / "text")
    assert (news.texts, news.test_texts) == (('a "b"', "c", "d"), ("e",))
    assert [news.classes[label] for label in news.labels] == ["Health", "Africa", "World"]
    assert news.truth.tolist() == [news.classes.index("World"), news.classes.index("Africa"), texts.UNKNOWN]
    (tmp_path / "text" / "hausa_train_clean.tsv").write_text("news_title\tlabel\nz\tWorld\nc\tAfrica\n")
    with pytest.raises(DataError, match="differ: fetch them again"):
        texts.READERS["hausa"](tmp_path / "text")
    (tmp_path / "text" / "noisy_ag_news_test.csv").unlink()
    with pytest.raises(DataError, match="--data-root"):
        texts.READERS["ag_news"](tmp_path / "text")


def test_the_page_says_when_it_was_not_run(tmp_path: Path) -> None:
    marks = "\n".join(f"<!-- {mark} -->\nold\n<!-- /{mark} -->" for mark in tables.TABLES)
    page = tables.page(marks, tmp_path / "none.json")
    assert page.count("Not run yet.") == len(tables.TABLES)
    assert "old" not in page


def test_a_table_has_a_column_for_every_setting_and_leaves_out_held_out_runs() -> None:
    def row(line: str, n: int, encoder: str, **entries: Any) -> Row:
        config = configuration(line, n_trusted=n, encoder=encoder)
        return {**heading(config), "seconds": 1.0, **entries}

    detection = {"weight": {"auroc": 0.75, "average_precision": 0.5}}
    suspects = [{"precision": {"claimed": 91.0, "truth": 80.0}, "recall": {"claimed": 50.0, "truth": 40.0}}]
    none = [{"precision": {"claimed": None, "truth": None}, "recall": {"claimed": 0.0, "truth": 0.0}}]
    rows = [
        row("soseleto", 100, "frozen", accuracy=81.0, detection=detection),
        row("soseleto", 200, "frozen", heldout_accuracy=99.0, detection=detection),
        row("soseleto_probes", 500, "trained", accuracy=85.0, suspects=suspects),
        row("soseleto_probes", 200, "trained", accuracy=85.0, suspects=none),
    ]
    made = {mark: make(rows) for mark, make in tables.TABLES.items()}
    assert made["frozen"].splitlines()[0] == "|  | NoisyAG-News, 100 trusted |"
    assert made["frozen"].splitlines()[2:] == ["| **SOSELETO** | 81.0 (1) |"]
    assert made["auroc"].splitlines()[2:] == ["| SOSELETO, weight | 75.0 (1) |"]
    assert made["average precision"].splitlines()[2:] == ["| SOSELETO, weight | 50.0 (1) |"]
    assert made["suspects"].splitlines()[2:] == [
        "| SOSELETO: precision, claimed |  | 91.0 (1) |",
        "| SOSELETO: precision, true |  | 80.0 (1) |",
        "| SOSELETO: recall, true | 0.0 (1) | 40.0 (1) |",
    ]
    assert "fine-tuned" in made["suspects"].splitlines()[0]
