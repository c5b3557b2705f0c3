"""The first answer: beliefs in labels on frozen features, the same run as ``fit`` leaves, and what it refuses."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_friedman1
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from typer.testing import CliRunner

import soseleto
from soseleto.cli.commands import app
from soseleto.errors import DataError, UsageError
from soseleto.models.trunk_and_heads import from_bytes, to_bytes
from soseleto.report import write_report
from soseleto.run_folder.folder import RunFolder
from soseleto.suspects.cross_fit import cross_fit
from soseleto.suspects.rates import judge
from soseleto.suspects.residuals import ridge
from typing_in import run, typed


@pytest.fixture(scope="module")
def digits():
    """Source with every fifth label wrong, target, test; and which labels are wrong."""
    x, y = load_digits(return_X_y=True)
    draw = np.random.default_rng(3)
    order = draw.permutation(len(x))
    target, source, test = order[:150], order[150:1150], order[1150:]
    labels, wrong = y[source].copy(), draw.random(1000) < 0.2
    labels[wrong] = (labels[wrong] + draw.integers(1, 10, wrong.sum())) % 10
    x = x.astype(np.float32)
    return (x[source], labels), (x[target], y[target]), (x[test], y[test]), wrong


@pytest.fixture(scope="module")
def scanned(digits, tmp_path_factory):
    source, target, _, _ = digits
    out = tmp_path_factory.mktemp("scan") / "run"
    return soseleto.scan(source, target, out=out)


def test_it_finds_wrong_labels_and_makes_a_model_better_than_training_on_all(scanned, digits):
    source, target, test, wrong = digits
    assert roc_auc_score(wrong, -scanned.scores.numpy()) > 0.97
    plain = LogisticRegression(max_iter=3000).fit(
        np.concatenate([source[0], target[0]]), np.concatenate([source[1], target[1]])
    )
    assert scanned.evaluate(test)["accuracy"] > 100 * plain.score(*test) + 2


def test_suspects_hold_the_precision_that_was_asked_for(scanned, digits):
    wrong = digits[3]
    suspects = scanned.suspects()
    found = suspects.is_suspect.numpy()
    assert 50 < found.sum() <= 300
    assert wrong[found].mean() > 0.85
    assert suspects.precision.low < wrong[found].mean() < suspects.precision.high
    assert suspects.wrong_share.low < wrong.mean() < suspects.wrong_share.high
    fewer = scanned.suspects(0.99)
    assert len(fewer) <= len(suspects)
    assert len(suspects.at(suspects.threshold)) == len(suspects)


def test_every_command_reads_its_run_folder(scanned, digits, tmp_path):
    test = digits[2]
    loaded = soseleto.load(scanned.out)
    assert torch.equal(loaded.predict(test[0]), scanned.predict(test[0]))
    np.savez(tmp_path / "new.npz", x=test[0][:5])
    for line in (
        ["rank", scanned.out, "--suspects"],
        ["report", scanned.out],
        ["predict", scanned.out, tmp_path / "new.npz"],
    ):
        run(*line)
    assert "SOSELETO" in (scanned.out / "report.html").read_text("utf-8")


def test_the_solution_of_two_classes_stands_in_the_last_layer():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    found = soseleto.scan((x[:200], y[:200]), (x[200:], y[200:]))
    beliefs = cross_fit(x[:200], y[:200], x[200:], y[200:], classes=2)
    assert np.allclose(found.predict_proba(x).numpy(), beliefs.model.predict_proba(x), atol=1e-5)


def test_a_network_of_the_users_gives_features_and_stays_as_it_is(digits):
    source, target, test, _ = digits
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = soseleto.scan(source, target, model=network)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert torch.equal(found.model[0].weight, before["0.weight"])
    assert not torch.equal(found.model[2].weight, before["2.weight"])
    assert found.evaluate(test)["accuracy"] > 85


def test_features_are_made_once_and_anew_where_anything_that_makes_them_has_changed(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    seen: list[int] = []
    network[1].register_forward_hook(lambda *about: seen.append(len(about[2])))

    def features_made() -> int:
        seen.clear()
        soseleto.scan(digits[0], digits[1], model=network)
        return sum(seen)

    of_all, of_check = len(digits[0][0]) + len(digits[1][0]), 2 * 8
    made = features_made()
    assert made >= of_all
    assert features_made() <= made - of_all + of_check
    with torch.no_grad():
        network[3].weight += 1  # the last layer makes no features
    assert features_made() <= made - of_all + of_check
    with torch.no_grad():
        network[1].weight[0, 0] += 1e-3
    assert features_made() == made
    network[2] = nn.ReLU()
    assert features_made() == made
    for path in tmp_path.glob("*.npy"):
        np.save(path, np.load(path)[:, ::-1])
    assert features_made() == made + of_check  # not those that the network makes
    for path in tmp_path.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:1000])
    assert features_made() == made


def test_any_classifier_of_scikit_learn_is_kept_without_a_pickle(digits, tmp_path):
    source, target, test, _ = digits
    found = soseleto.scan(source, target, RandomForestClassifier(30, random_state=0), out=tmp_path / "run")
    loaded = soseleto.load(tmp_path / "run")
    assert torch.equal(loaded.predict(test[0]), found.predict(test[0]))
    assert found.evaluate(test)["accuracy"] > 90


def test_a_file_that_names_other_code_is_not_read():
    class Own(LogisticRegression):
        pass

    with pytest.raises(DataError, match="not of scikit-learn"):
        from_bytes(to_bytes(Own()), "learner.skops")


def test_labels_of_a_class_without_target_examples_are_unknown(digits):
    (x, labels), (known, truth), _, _ = digits
    keep = truth != 7
    found = soseleto.scan((x, labels), (known[keep], truth[keep]))
    suspects = found.suspects()
    assert suspects.probability[torch.from_numpy(labels == 7)].isnan().all()
    assert suspects.probability[torch.from_numpy(labels != 7)].isnan().float().mean() < 0.2  # those that look like one
    assert not (suspects.is_suspect & torch.from_numpy(labels == 7)).any()


def test_the_commands_on_labels_that_are_numbers(tmp_path):
    x, y = make_friedman1(300, random_state=0)
    for name, at in (("s.csv", slice(60, None)), ("t.csv", slice(60))):
        rows = np.column_stack([x[at], y[at]])
        np.savetxt(tmp_path / name, rows, "%.6f", ",", header=",".join([*"abcdefghij", "price"]), comments="")
    words = ["--source", f"{tmp_path}/s.csv", "--target", f"{tmp_path}/t.csv", "--out", f"{tmp_path}/run"]
    done = CliRunner().invoke(app, ["scan", *words, "--label-column", "price", "--learner", "boosting"])
    assert done.exit_code == 0, done.output
    said = CliRunner().invoke(app, ["predict", f"{tmp_path}/run", f"{tmp_path}/t.csv"])
    predicted = [float(row["label"]) for row in csv.DictReader(said.stdout.splitlines())]
    assert np.corrcoef(predicted, y[:60])[0, 1] > 0.9


def test_fit_on_labels_that_are_numbers_in_any_unit(tmp_path):
    """Against plain arithmetic: what is explained of the test labels' variance, by predictions in their own unit."""
    x, y = make_friedman1(700, noise=0.5, random_state=0)
    y, draw = 1e5 + 1e4 * y, np.random.default_rng(0)
    labels = y.copy()
    wrong = np.flatnonzero(draw.random(500) < 0.2)
    labels[wrong] = draw.permutation(y)[: len(wrong)]
    for name, at in (("s.csv", slice(500)), ("t.csv", slice(500, 600)), ("e.csv", slice(600, None))):
        rows = np.column_stack([x[at], labels[at]])
        header = ",".join([*"abcdefghij", "price"])
        np.savetxt(tmp_path / name, rows, [*["%.3f"] * 10, "%.0f"], ",", header=header, comments="")
    (tmp_path / "whole.toml").write_text("[reading]\nnumeric_labels = true\n")
    run, more = tmp_path / "run", ("--label-column", "price", "--keep", "soseleto", "--epochs", "10")
    more += ("--config", str(tmp_path / "whole.toml"))
    words = [f"--{side}={tmp_path}/{side[0]}.csv" for side in ("source", "target")]
    done = CliRunner().invoke(app, ["fit", *words, f"--test={tmp_path}/e.csv", f"--out={run}", *more])
    assert done.exit_code == 0, done.output
    assert "explained variance on 100 test examples" in done.output
    rows = {row["method"]: row for row in RunFolder(run).comparison()["rows"]}
    assert set(rows) == {"soseleto", "scan"}
    said = CliRunner().invoke(app, ["predict", str(run), f"{tmp_path}/e.csv"])
    predicted = np.array([float(row["label"]) for row in csv.DictReader(said.stdout.splitlines())])
    explained = 100 * (1 - np.mean((predicted - y[600:]) ** 2) / np.var(y[600:]))
    assert rows["soseleto"]["explained_variance"] == pytest.approx(explained, abs=0.1)
    assert explained > 70
    assert rows["scan"]["minus_soseleto"]["value"] == pytest.approx(
        rows["scan"]["explained_variance"] - explained, abs=0.1
    )
    is_suspect = RunFolder(run).ranking()["is_label_issue"]
    found = RunFolder(run).ranking()["id"][is_suspect].astype(int)
    assert np.isin(found, wrong).mean() > 0.7
    assert "Explained variance" in (run / "report.html").read_text("utf-8")


def test_what_numbers_are_refused_and_copies_of_them_share_a_fold():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(240, 6)).astype(np.float32), draw.normal(size=240).astype(np.float32)
    source, target = (x[:200], y[:200]), (x[200:], y[200:])
    nothing = y[:200].copy()
    nothing[3] = np.nan
    for sides, changes, sentence in (
        ((source, (x[200:204], y[200:204])), {}, "and at least 10 are needed: give more of them"),
        (((x[:200], nothing), target), {}, "some labels are NaN or infinite"),
        ((source, target), {"labels_before": np.zeros(40)}, "labels_before has no effect on labels that are numbers"),
    ):
        with pytest.raises(UsageError, match=sentence):
            soseleto.scan(*sides, **changes)
    copied = [np.repeat(side, 4, axis=0) for side in target]
    forest = HistGradientBoostingRegressor(min_samples_leaf=1, random_state=0)  # which knows a copy's value
    judgement = soseleto.scan(source, tuple(copied), learner=forest).evidence.judgement
    assert np.median(-judgement.of_trusted) > 0.4
    assert judgement.trusted_count < 80


@pytest.mark.parametrize("learner", [None, HistGradientBoostingRegressor(max_bins=32, random_state=0)])
def test_numbers_are_judged_by_their_residuals(learner, tmp_path):
    x, y = make_friedman1(2000, noise=1.0, random_state=0)
    x, y = x.astype(np.float32), y.astype(np.float32)
    draw = np.random.default_rng(0)
    given = y[600:].copy()
    moved = np.flatnonzero(draw.random(1400) < 0.2)
    given[moved] = draw.permutation(y)[: len(moved)]
    wrong = np.abs(given - y[600:]) > 3
    found = soseleto.scan((x[600:], given), (x[:250], y[:250]), learner=learner, out=tmp_path / "run")
    suspects = found.suspects()
    assert roc_auc_score(wrong, -found.scores.numpy()) > (0.8 if learner is None else 0.93)
    assert wrong[suspects.is_suspect.numpy()].mean() > 0.8
    assert suspects.wrong_share.low <= 0.2 <= suspects.wrong_share.high
    at = suspects.is_suspect.numpy() & wrong
    assert np.abs(suspects.suggested.numpy() - y[600:])[at].mean() < np.abs(given - y[600:])[at].mean() / 2

    def error(predicted):
        return float(np.square(np.ravel(predicted) - y[250:600]).mean())

    on_all = clone(learner or ridge()).fit(np.concatenate([x[600:], x[:250]]), np.concatenate([given, y[:250]]))
    loaded = soseleto.load(tmp_path / "run", model="linear")
    assert error(loaded.predict(torch.from_numpy(x[250:600]))) < error(on_all.predict(x[250:600]))
    ranking = RunFolder.open(tmp_path / "run").ranking()
    assert ranking["suggested_label"].dtype.kind == "f"
    assert "wrong" in write_report(tmp_path / "run").read_text()


def test_the_same_seed_gives_the_same_answer(scanned, digits):
    again = soseleto.scan(digits[0], digits[1])
    assert torch.equal(again.scores, scanned.scores)
    assert torch.equal(again.weights, scanned.weights)


def test_what_it_refuses(digits):
    source, target, _, _ = digits
    with pytest.raises(UsageError, match="takes no sample weights"):
        soseleto.scan(source, target, KNeighborsClassifier())
    with pytest.raises(UsageError, match="no linear layer"):
        soseleto.scan(source, target, model=nn.Sequential(nn.Conv1d(1, 10, 64), nn.Flatten()))
    with pytest.raises(UsageError, match="not one class or number"):
        soseleto.scan(*((x, np.stack([y, y], 1).astype(np.float32)) for x, y in (source, target)))


def test_the_command(digits, tmp_path):
    (x, labels), (known, truth), _, wrong = digits
    for name, inputs, its in (("source", x, labels), ("target", known, truth)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*(f"pixel{at}" for at in range(64)), "label"])
            writer.writerows([*row.tolist(), f"digit {label}"] for row, label in zip(inputs, its, strict=True))
    line = ["scan", "--source", tmp_path / "source.csv", "--target", tmp_path / "target.csv", "--out", tmp_path / "run"]
    assert "suspects: precision" in run(*line)
    assert "holds a run already" in typed(*line).err
    rows = list(csv.DictReader(run("rank", tmp_path / "run", "--suspects").splitlines()))
    assert np.mean([wrong[int(row["id"])] for row in rows if row["id"].isdigit()]) > 0.8


def test_copies_are_judged_by_classifiers_that_have_seen_neither() -> None:
    """A nearest neighbour knows the label of every copy that it has seen."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 5)), draw.integers(0, 2, 60)
    sides = (
        (np.concatenate([x[:20], draw.normal(size=(200, 5))]), draw.integers(0, 2, 220)),
        (x.repeat(4, 0), y.repeat(4)),
    )
    numbers = np.concatenate([np.arange(20), np.arange(100, 300)]), np.arange(60).repeat(4)

    def right(groups):
        found = cross_fit(
            *sides[0], *sides[1], classes=2, learner=RandomForestClassifier(20, random_state=0), groups=groups
        )
        return np.mean(found.rivals["target_only"].argmax(1) == sides[1][1])

    assert right(None) > 0.9
    assert right(numbers) < 0.7


def test_trusted_labels_look_no_more_certain_than_right_labels_of_the_source() -> None:
    """Were the weights of the source's labels judged by classifiers that know a trusted label, it would be 0.69."""
    found = []
    for seed in range(3):
        draw = np.random.default_rng(seed)
        x = draw.normal(size=(880, 60))
        truth = (x[:, :4] + draw.gumbel(size=(880, 4))).argmax(1)
        labels, wrong = truth[:800].copy(), draw.random(800) < 0.1
        labels[wrong] = (labels[wrong] + 1) % 4
        beliefs = cross_fit(x[:800], labels, x[800:], truth[800:], classes=4)
        right = beliefs.right[~wrong]
        sides = np.concatenate([np.zeros(len(right)), np.ones(80)])
        found.append(roc_auc_score(sides, np.concatenate([right, beliefs.of_trusted])))
    assert 0.45 < np.mean(found) < 0.6


def test_earlier_labels_of_trusted_examples_count_the_share_and_choose_who_shows_right_labels(digits) -> None:
    (x, labels), (known, checked), _, _ = digits
    found = cross_fit(x, labels, known, checked, classes=10)
    hardest = np.argsort(found.of_trusted)
    before = checked.copy()
    before[hardest[:15]] = (checked[hardest[:15]] + 1) % 10
    before[hardest[-20:]] = -1
    plain, counted = judge(found), judge(replace(found, before=before))
    assert counted.wrong_share.value == pytest.approx(15.5 / 131)
    assert counted.wrong_share.low < 15 / 130 < counted.wrong_share.high < 0.2
    assert counted.false[299] < plain.false[299]  # the hardest right labels of the target are not like the source's
    assert counted.count <= round(1000 * counted.wrong_share.value)


def test_a_list_that_does_not_reach_the_precision_is_short(digits) -> None:
    found = cross_fit(*digits[0], *digits[1], classes=10)
    judged = judge(found, precision=0.9999)
    assert 0 < judged.count <= max(10, round(1000 * judged.wrong_share.low))
    assert judged.precision(judged.count).value < 0.9999
