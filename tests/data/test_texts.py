"""Texts as tokens: batches by length, padding that changes nothing, the cache, and which column is read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from soseleto.data import Reading, TablePreparation, read_pair
from soseleto.data.cells import plan_of
from soseleto.data.text import NO_TOKEN, TextExamples, TextPreparation, Tokenizer, length_batches, padded_length
from soseleto.errors import UsageError
from soseleto.models.pretrained import make_text_model, open_text_model
from tiny_text_model import make_folder, write_reviews


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    opened = open_text_model(f"hf:{folder}")
    assert (opened.longest, opened.pad) == (64, 0)
    return Tokenizer(opened.tokenizer, 32, opened.pad)


def test_tokens_are_those_of_the_tokenizer(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["The film was GOOD", "", None, "bad " * 50, "unheard words"]
    known = AutoTokenizer.from_pretrained(folder)([text or "" for text in texts], truncation=True, max_length=32)
    tokens = tokenizer.encode(texts)
    assert [row[row != NO_TOKEN].tolist() for row in tokens] == known["input_ids"]
    examples = TextExamples(tokens[:3], torch.zeros(3, dtype=torch.int64))
    made = TextPreparation("review", tokenizer)(examples.take(torch.arange(3))[0])
    assert made["input_ids"].shape == (3, 16)
    assert made["input_ids"][1].tolist() == [*known["input_ids"][1], *[0] * 14]
    assert made["attention_mask"].sum(1).tolist() == [6, 2, 2]


def test_batches_have_texts_of_similar_length_and_every_text_once() -> None:
    lengths = torch.tensor(np.random.default_rng(0).integers(3, 200, 1003))
    padded = torch.tensor([padded_length(int(n), 256) for n in lengths])
    batches = length_batches(padded, 16, seed=3, epoch=2)
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(1003))
    assert [len(batch) for batch in batches] == [16] * 62 + [11]
    widths = [int(padded[batch].max()) for batch in batches[:-1]]
    assert sum(widths) < 0.65 * sum(int(padded[batch].max()) for batch in torch.randperm(992).split(16))
    assert widths != sorted(widths)  # short and long batches alternate
    again = length_batches(padded, 16, seed=3, epoch=2)
    assert all(torch.equal(one, other) for one, other in zip(batches, again, strict=True))
    assert not torch.equal(batches[0], length_batches(padded, 16, seed=3, epoch=3)[0])
    assert len(set(widths)) <= 9


def test_padding_changes_no_output(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_text_model(f"hf:{folder}", "noisy", classes=3).double().eval()
    prepare = TextPreparation("review", tokenizer)
    tokens = tokenizer.encode(["good film", "the book was awful and dull"])
    alone = torch.cat([model(**prepare(row[None, : int((row != NO_TOKEN).sum())])) for row in tokens])
    assert torch.allclose(model(**prepare(tokens)), alone, atol=1e-12)


def test_text_examples_stay_whole_in_subsets(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokens = tokenizer.encode(["good", "very " * 30, "bad"])
    examples = TextExamples(tokens, torch.tensor([0, 1, 0]))
    assert examples.take(torch.tensor([0, 2]))[0].shape == (2, 16)
    assert examples.take(torch.tensor([0, 1]))[0].shape == (2, 32)
    part = examples.subset([2, 0])
    assert isinstance(part, TextExamples)
    assert torch.equal(part.inputs, tokens[[2, 0]])


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tables")
    return write_reviews(folder / "s.csv", 60, seed=0, wrong=0.2), write_reviews(folder / "t.csv", 40, seed=1)


def test_the_only_text_column_is_found_and_others_are_left_out(tables, tokenizer, tmp_path) -> None:
    reading = Reading(tokenizer=tokenizer, truth_column="truth")
    pair = read_pair(*tables, mode="noisy", reading=reading)
    assert isinstance(pair.preparation, TextPreparation)
    assert pair.preparation.column == "review"
    assert "the model reads the text alone" in "\n".join(plan_of(pair.preparation.seen))
    assert isinstance(pair.source, TextExamples)
    kept = TextPreparation.from_dict(pair.preparation.to_dict(), tokenizer.json)
    assert kept == pair.preparation
    words = read_pair(*tables, mode="noisy", reading=Reading(truth_column="truth"))
    assert isinstance(words.preparation, TablePreparation)


def test_texts_in_both_sets_are_found_but_not_by_their_beginning_alone(tokenizer, tmp_path) -> None:
    """Of a target that was checked, the labels in the source are those from before; a common beginning is no copy."""
    source, target = tmp_path / "s.csv", tmp_path / "t.csv"
    begin = "very " * 40
    rows = [f"the film was {word} number {row},pos" for row, word in enumerate(["good", "bad", "fine"] * 10)]
    source.write_text("\n".join(["review,label", *rows, f"{begin} bad,neg"]) + "\n")
    kept = [f"{rows[0].removesuffix('pos')}neg", rows[1], f"{begin} awful,neg", "the book was dull 77,neg"]
    target.write_text("\n".join(["review,label", *kept]) + "\n")
    reading = Reading(text_columns=["review"], tokenizer=tokenizer)
    pair = read_pair(source, target, mode="noisy", reading=reading)
    assert len(pair.source) == 29
    assert pair.labels_before.tolist() == [1, 1, -1, -1]
    (near,) = [problem for problem in pair.problems if problem.kind == "near duplicate"]
    assert "texts with the same beginning, before they are cut, as 1 target example (target 2 = source 30" in str(near)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"text_columns": ["reviews"]}, "did you mean 'review'"),
        ({"text_columns": ["review", "stars"]}, "2 columns of text .*--text-column NAME"),
        ({"drop_columns": ["review"]}, "no column of text"),
        ({"numeric_columns": ["stars"]}, "'stars' has no effect"),
    ],
)
def test_columns_that_cannot_be_read(tables, tokenizer, tmp_path, options, sentence) -> None:
    reading = Reading(tokenizer=tokenizer, truth_column="truth", **options)
    with pytest.raises(UsageError, match=sentence):
        read_pair(*tables, mode="noisy", reading=reading)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hf:./nowhere", "there is no folder './nowhere': write --model hf:FOLDER, or hf:OWNER/NAME"),
        ("hf:{empty}", "has no config.json"),
        ("hf:{images}", "is not a text model with a fast tokenizer|cannot be read"),
    ],
)
def test_names_that_are_no_text_model(tmp_path, name, sentence) -> None:
    empty, images = tmp_path / "empty", tmp_path / "images"
    empty.mkdir()
    images.mkdir()
    (images / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UsageError, match=sentence):
        open_text_model(name.format(empty=empty, images=images))


def test_a_hub_id_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="hf:nobody/nothing is no folder here and could not be loaded from") as caught:
        open_text_model("hf:nobody/nothing")
    assert "\n" not in str(caught.value)
