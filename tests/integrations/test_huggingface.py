"""SoseletoTrainer with the real Trainer: weights, precision, accumulation, evaluation, checkpoints, ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from ranks import together  # noqa: E402
from soseleto import Selection, Soseleto  # noqa: E402
from soseleto.defaults import resolve  # noqa: E402
from soseleto.engines.layerwise import LayerwiseEngine  # noqa: E402
from soseleto.errors import UsageError  # noqa: E402
from soseleto.integrations.batches import INDEX  # noqa: E402
from soseleto.integrations.huggingface import (  # noqa: E402
    Join,
    SelectionMixin,
    SoseletoTrainer,
    _Texts,
    default_loss,
    mean_embeddings,
)
from soseleto.integrations.texts import write_run  # noqa: E402
from soseleto.report.export import export_ranking  # noqa: E402
from soseleto.run_folder.folder import RunFolder  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CLASSES, WORDS = 2, 40
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def bert(*, dropout: float = 0.0, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=WORDS, num_labels=CLASSES, max_position_embeddings=16, **TINY, **settings,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts(n: int, seed: int, *, wrong: int = 0) -> Any:
    """Words above WORDS/2 mean class 1; the first ``wrong`` labels are flipped; lengths differ."""
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=seeded)
    rows = []
    for label in labels.tolist():
        length = int(torch.randint(4, 9, (), generator=seeded))
        rows.append((torch.randint(3, WORDS // 2, (length,), generator=seeded) + label * (WORDS // 2 - 2)).tolist())
    given = [1 - y if i < wrong else y for i, y in enumerate(labels.tolist())]
    return datasets.Dataset.from_dict({"input_ids": rows, "label": given, "note": ["unused"] * n})


def collate(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = max(len(f["input_ids"]) for f in features)
    ids = torch.tensor([f["input_ids"] + [0] * (length - len(f["input_ids"])) for f in features])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([f["label"] for f in features]),
    }


def trainer(folder: Path, model: Any = None, kind: Any = SoseletoTrainer, **kwargs: Any) -> Any:
    settings = {"per_device_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 5e-3, "report_to": []}
    settings |= {"save_strategy": "no", "logging_steps": 2, "disable_tqdm": True, "use_cpu": True, "seed": 3}
    settings |= kwargs.pop("args", {})
    made = {"train_dataset": texts(48, 0, wrong=12), "target_dataset": texts(16, 1), "data_collator": collate}
    args = transformers.TrainingArguments(str(folder), **settings)
    model = bert() if model is None and "model_init" not in kwargs else model
    return kind(model, args, **(made | kwargs))


def test_weights_find_the_wrong_labels(tmp_path: Path) -> None:
    args = {"num_train_epochs": 7, "learning_rate": 0.01, "logging_steps": 10}
    # the default for classes moves weights beyond noise only, which seven visits seldom show
    trained = trainer(tmp_path, args=args, eval_dataset=texts(32, 2), method=Soseleto())
    trained.train()
    weights = trained.weights
    assert weights.shape == (48,)
    assert (trained.selection.visits == 7).all()
    assert trained.selection.engine == "layerwise"
    assert trained.selection.scores[:12].mean() < trained.selection.scores[12:].mean()
    assert weights[:12].mean() < weights[12:].mean() - 0.1
    logs = [entry for entry in trained.state.log_history if "target_loss" in entry]
    assert all(0.0 < entry["target_loss"] < 3.0 for entry in logs)
    assert 0.0 <= logs[-1]["mean_weight"] <= 1.0
    assert trained.evaluate()["eval_loss"] < 0.7  # batches of evaluation have no index


def test_a_step_is_that_of_selection(tmp_path: Path) -> None:
    """With accumulation over two batches: the same gradients and weights as by hand."""
    one, other, seen = bert(), bert(), []

    class Watched(SoseletoTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            seen.append({name: value.clone() for name, value in inputs.items()})
            return super().training_step(model, inputs, num_items_in_batch)

    args = {"gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    args |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    watched = trainer(tmp_path, one, Watched, args=args, target_batch_size=4, method=Soseleto())
    targets: list[Any] = []
    begin = watched._begin

    def kept(model: Any) -> Any:
        made = begin(model)
        draw = made.__class__.__next__
        return type("Kept", (), {"__next__": lambda self: targets.append(draw(made)) or targets[-1]})()

    watched._begin = kept
    watched.train()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other.train()
    selection = Selection(other, n_source=48, loss=default_loss(other), optimizer=optimizer, method=Soseleto())
    for step, (inputs, target) in enumerate(zip(seen, targets, strict=True)):
        index = inputs.pop(INDEX)
        selection.backward(inputs, target, index=index, scale=0.5)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert len(seen) == 4
    for mine, by_hand in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, by_hand, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(watched.weights, selection.weights, rtol=1e-4, atol=1e-5)


class StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.long), 0.1])
def test_a_resumed_training_has_the_same_weights(tmp_path: Path, dropout: float) -> None:
    """Dropout draws from the generators that the Trainer saves."""
    whole = trainer(tmp_path / "whole", bert(dropout=dropout), args={"max_steps": 8})
    whole.train()
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    cut = trainer(tmp_path / "cut", bert(dropout=dropout), args=settings, callbacks=[StopAt(6)])
    cut.train()  # to one step after the checkpoint
    again = trainer(tmp_path / "cut", bert(dropout=dropout, seed=9), args=settings)
    again.train(resume_from_checkpoint=True)
    torch.testing.assert_close(again.weights, whole.weights, rtol=0, atol=0)
    torch.testing.assert_close(again.selection.scores, whole.selection.scores, rtol=0, atol=0)
    for mine, right in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    args = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}

    def plain(*given: Any, target_dataset: Any, **named: Any) -> Any:
        return transformers.Trainer(*given, **named)

    trainer(tmp_path, kind=plain, args=args, train_dataset=texts(16, 0)).train()
    with pytest.raises(UsageError, match=r"has no selection\.pt, so another trainer wrote it"):
        trainer(tmp_path, args=args, train_dataset=texts(16, 0)).train(resume_from_checkpoint=True)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=30, n_positions=12, n_embd=8, n_layer=1, n_head=2)
    )


def t5() -> Any:
    sizes = {"vocab_size": 30, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize("make", [gpt2, t5])
def test_a_generating_model_has_a_loss_per_sequence(make: Any) -> None:
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(3, 30, (4, 9))
    labels = ids.masked_fill(torch.arange(9) > torch.tensor([[8], [6], [4], [2]]), -100)
    losses = default_loss(model)(model, {"input_ids": ids, "labels": labels})
    for i in range(4):
        right = model(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss
        torch.testing.assert_close(losses[i], right)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=1, max_position_embeddings=64, **sizes)
    return transformers.LlamaForCausalLM(config)


LENGTHS_OF_TEXTS = (5, 9, 2, 7, 1, 6)


def of_lengths(seed: int, lengths: tuple[int, ...] = LENGTHS_OF_TEXTS) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 30, (n,), generator=draw).tolist() for n in lengths]
    return [{"input_ids": row, "labels": [-100, *row[1:]] if at % 2 else row} for at, row in enumerate(ids)]


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("padded", [0, 8])
def test_texts_in_one_row_have_the_losses_and_alignments_of_each_alone(make: Any, padded: int) -> None:
    model, rows = make().double().eval(), of_lengths(0)
    flattened = transformers.DataCollatorWithFlattening(return_tensors="pt")(rows)
    if padded:  # as to a multiple of eight
        more = -flattened["input_ids"].shape[1] % padded
        fill = {"input_ids": 3, "labels": -100, "position_ids": 0}
        flattened = {name: F.pad(flattened[name], (0, more), value=value) for name, value in fill.items()}
    batch = _Texts(lambda items: flattened)(rows)
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
    loss, engine = default_loss(model), LayerwiseEngine()
    losses, alignments = engine(model, loss, batch, direction)
    assert engine.proofs == 1
    for i, row in enumerate(rows):
        given = {name: torch.tensor([value]) for name, value in row.items()}
        alone = loss(model, given)
        torch.testing.assert_close(losses[i], alone[0].detach())
        gradients = torch.autograd.grad(
            alone[0], [dict(model.named_parameters())[n] for n in direction], allow_unused=True
        )
        right = sum((g * d).sum() for g, d in zip(gradients, direction.values(), strict=True) if g is not None)
        torch.testing.assert_close(alignments[i], torch.as_tensor(right, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert losses[4] == 0  # a text of one token has nothing to predict


def test_a_trainer_of_flattened_batches_learns_what_one_of_padded_batches_learns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    source, target = (datasets.Dataset.from_list(of_lengths(a) + of_lengths(b)) for a, b in ((1, 2), (3, 4)))
    for collator in (transformers.DataCollatorWithFlattening(), padded_texts):
        made = {"train_dataset": source, "target_dataset": target, "data_collator": collator, "method": Soseleto()}
        trained = trainer(tmp_path, llama(), args={"per_device_train_batch_size": 4, "max_steps": 5}, **made)
        trained.train()
        found.append([trained.weights, trained.selection.scores, *trained.model.parameters()])
        assert trained.selection.visits.min() == 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert found[0][0].std() > 0.01
    assert "2 examples of train_dataset have no token with a label (places 4, 10)" in caplog.text


def test_several_tasks_have_equal_parts_of_the_target_batches(tmp_path: Path) -> None:
    seen = []

    def noting(model: Any, inputs: Any) -> Tensor:
        seen.append(inputs["labels"].tolist())
        return torch.nn.functional.cross_entropy(
            model(**{k: v for k, v in inputs.items() if k != "labels"}).logits, inputs["labels"], reduction="none"
        )

    many, few = texts(24, 1), texts(3, 2)
    tasks = {"many": [{**one, "label": 0} for one in many], "few": [{**one, "label": 1} for one in few]}
    given = {"target_dataset": tasks, "target_batch_size": 6, "per_example_loss": noting}
    trainer(tmp_path, args={"max_steps": 4}, method=Soseleto(engine="loop"), **given).train()
    of_target = [labels for labels in seen if len(labels) == 6]
    assert len(of_target) >= 4
    assert all(sum(labels) == 3 for labels in of_target)


def test_features_of_texts_in_one_row_are_those_of_each_alone() -> None:
    rows, features = of_lengths(0), mean_embeddings(llama())
    flattened = _Texts(transformers.DataCollatorWithFlattening(return_tensors="pt"))(rows)
    alone = torch.cat([features({"input_ids": torch.tensor([row["input_ids"]])}) for row in rows])
    torch.testing.assert_close(features(flattened), alone)
    torch.testing.assert_close(features(padded_texts(rows)), alone)


def test_the_device_is_cleared_as_the_trainer_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    monkeypatch.setattr("soseleto.integrations.huggingface.clear_device_cache", lambda: cleared.append(1))
    trainer(tmp_path, args={"max_steps": 5, "torch_empty_cache_steps": 2}).train()
    assert len(cleared) == 3  # before the first, third and fifth step of the optimizer


def padded_texts(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    pad = {"input_ids": 3, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {k: torch.tensor([row[k] + [value] * (length - len(row[k])) for row in rows]) for k, value in pad.items()}


def test_a_run_folder_with_texts(tmp_path: Path) -> None:
    rows = [row for seed in range(7) for row in of_lengths(seed, (5, 7, 9, 12))]
    made = {"train_dataset": rows[:24], "target_dataset": rows[24:], "data_collator": padded_texts}
    args = {"num_train_epochs": 2, "per_device_train_batch_size": 6, "logging_steps": 1}
    trained = trainer(tmp_path / "out", llama(), args=args, target_batch_size=4, **made)
    trained.train()
    words, files = [f"<b>text</b> {i}" for i in range(24)], ["sums" if i % 3 else "plays" for i in range(24)]
    page = write_run(trained, tmp_path / "run", texts=words, files=files).read_text("utf-8")
    assert "Trained on 24 source and 4 target examples for 2 epochs in" in page
    assert "&lt;b&gt;text&lt;/b&gt; " in page
    assert "<b>text" not in page
    for group in ("sums", "plays", "5 tokens", "12 tokens"):
        assert f'<th scope="row">{group}</th>' in page
    assert "cover 100 % of the trainable parameters" in page
    run = RunFolder.open(tmp_path / "run")
    ranking = run.ranking()
    places = ranking["id"].astype(int)
    assert sorted(places) == list(range(24))
    torch.testing.assert_close(torch.tensor(ranking["weight"]), trained.weights[places])
    assert list(ranking["score"]) == sorted(ranking["score"], reverse=True)
    assert [int(name.split()[1]) for name in ranking["x0"]] == places.tolist()
    assert len(run.metrics()) == 2 + 2 * 4
    assert export_ranking(run.path, worst=3).decode().startswith("id,label,weight,score,visits,tokens,text\n")
    assert "5 tokens" in write_run(trained, tmp_path / "plain").read_text("utf-8")
    with pytest.raises(UsageError, match="files has 1 entries for 24 examples"):
        write_run(trained, tmp_path / "other", files=["sums"])
    kept, trained.train_dataset = trained.train_dataset, [{"pixel_values": 0}]
    with pytest.raises(UsageError, match="rows of train_dataset have pixel_values, no input_ids"):
        write_run(trained, tmp_path / "other")
    trained.train_dataset = kept
    trained.is_world_process_zero = lambda: False  # of several processes the first writes
    assert write_run(trained, tmp_path / "another") == tmp_path / "another" / "report.html"
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("multi_label_classification", torch.tensor([[1.0, 0.0], [1.0, 1.0]])),
        ("regression", torch.tensor([[0.5, 1.0], [2.0, -1.0]])),
    ],
)
def test_other_kinds_of_labels(problem: str, labels: Tensor) -> None:
    model = bert(problem_type=problem).eval()
    ids = torch.randint(3, WORDS, (2, 5))
    losses = default_loss(model)(model, {"input_ids": ids, "labels": labels})
    for i in range(2):
        torch.testing.assert_close(losses[i], model(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss)


def test_joined_batches_are_padded_by_what_each_column_means() -> None:
    one, other = (collate([texts(3, seed)[i] for i in range(3)]) for seed in (0, 5))
    other = {name: value[:, :4] if value.ndim == 2 else value for name, value in other.items()}
    both = Join(pad_token=7)(one, other)
    assert both["labels"].tolist() == [*one["labels"].tolist(), *other["labels"].tolist()]
    assert (both["attention_mask"][3:, 4:] == 0).all()
    assert (both["input_ids"][3:, 4:] == 7).all()
    assert Join(pad_token=None)(one, other) is None  # nobody knows how to pad
    assert Join(pad_token=7)(one, {**other, "more": other["labels"]}) is None


def test_adapters_and_checkpointing(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))
    args = {"max_steps": 2, "gradient_checkpointing": True}
    args["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    trained = trainer(tmp_path, model, args=args, method=Soseleto())
    trained.train()
    assert trained.selection.engine == "layerwise"
    assert (trained.selection.visits <= 1).all()


def test_another_loss_is_refused(tmp_path: Path) -> None:
    def of_batch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.mean()

    class Logging(SoseletoTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(UsageError, match=r"compute_loss_func would be ignored.*give per_example_loss="):
        trainer(tmp_path, compute_loss_func=of_batch)
    with pytest.raises(UsageError, match=r"compute_loss of Logging would be ignored.*such as default_loss\(model\)"):
        trainer(tmp_path, kind=Logging)
    loss = default_loss(bert())
    made = trainer(tmp_path, kind=Logging, compute_loss_func=of_batch, per_example_loss=loss)
    assert made.per_example_loss is loss


def test_each_training_of_model_init_starts_afresh(tmp_path: Path) -> None:
    """As a Trainer's: the same seed, the same model, and here the same weights."""
    twice = trainer(tmp_path, model_init=lambda: bert(), args={"max_steps": 4})
    found = []
    for _ in range(2):
        twice.train()
        found.append((twice.weights, [p.detach().clone() for p in twice.model.parameters()], twice.selection.visits))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert not all(torch.equal(p, q) for p, q in zip(twice.model.parameters(), bert().parameters(), strict=True))
    assert int(found[1][2].sum()) == 4 * 8
    expected = resolve(bert(), classes=True, ends_in_linear=True, n_source=48, epochs=1)
    assert twice.selection.settings.method == expected.method


def replicated(reducer: Any, folder: str) -> Any:
    os.environ |= {"LOCAL_RANK": str(reducer.rank), "LOCAL_WORLD_SIZE": str(reducer.ranks)}
    trained = trainer(Path(folder), args=OF_THREE_STEPS, target_batch_size=4, method=Soseleto())
    trained.train()
    return trained.weights.numpy(), trained.selection.visits.numpy()


OF_THREE_STEPS = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
posix = pytest.mark.skipif(os.name != "posix", reason="processes are started as POSIX does")


@posix
@pytest.mark.long
def test_two_ranks_share_the_weights(tmp_path: Path) -> None:
    args = {"per_device_train_batch_size": 16, **OF_THREE_STEPS}
    alone = trainer(tmp_path, args=args, target_batch_size=8, method=Soseleto())
    alone.train()
    assert alone.weights.unique().numel() > 2
    for weights, visits in together(2, replicated, str(tmp_path)):
        assert (visits == 1).all()
        torch.testing.assert_close(torch.as_tensor(weights), alone.weights, rtol=1e-4, atol=1e-4)


FULLY_SHARD = {"version": 2, "transformer_layer_cls_to_wrap": "BertLayer"}
SHARDED_ARGS = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": 4, "logging_steps": 1}


def sharded(folder: str, **args: Any) -> Any:
    """A trainer under FSDP, which accelerate has for GPUs alone unless it takes gloo for a backend of theirs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def as_on_gpus(*given: Any, **named: Any) -> Any:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return SoseletoTrainer(*given, **named)

    given = {"per_device_train_batch_size": 4, "fsdp": True, "fsdp_config": dict(FULLY_SHARD), **SHARDED_ARGS, **args}
    return trainer(Path(folder), kind=as_on_gpus, args=given, target_batch_size=2, method=Soseleto())


def found_by(trained: Any) -> dict[str, Any]:
    norms = [entry["grad_norm"] for entry in trained.state.log_history if "grad_norm" in entry]
    found = {"weights": trained.weights, "scores": trained.selection.scores, "norms": torch.tensor(norms)}
    for name, p in trained.model.named_parameters():
        found[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
    return {name: value.numpy() for name, value in found.items()}


def fully_sharded(reducer: Any, folder: str) -> Any:
    """A training, and one from its checkpoint on; whether all is placed as the parameters are."""
    from torch.distributed.tensor import DTensor

    os.environ |= {"LOCAL_RANK": str(reducer.rank), "LOCAL_WORLD_SIZE": str(reducer.ranks)}
    whole, seen = sharded(folder, save_strategy="steps", save_steps=2), []

    class Looking(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            means = whole.selection._state.pieces["direction"]["means"]
            for name, p in model.named_parameters():
                alike = {(type(t), t.placements, t.device_mesh) for t in (p, p.grad, means[name])}
                seen.append(len(alike) == 1 and type(p) is DTensor)

    whole.add_callback(Looking())
    whole.train()
    again = sharded(folder)
    with torch.no_grad():
        again.model.classifier.weight.zero_()
    again.train(resume_from_checkpoint=folder + "/checkpoint-2")
    with pytest.raises(UsageError, match="cpu_offload of fsdp_config keeps parameters on another"):
        sharded(folder, fsdp_config={**FULLY_SHARD, "cpu_offload": True})
    return found_by(whole), found_by(again), all(seen)


@posix
def test_a_model_of_fully_shard_trains_and_resumes_as_in_one_process(tmp_path: Path) -> None:
    args = {"per_device_train_batch_size": 8, **SHARDED_ARGS}
    alone = trainer(tmp_path, args=args, target_batch_size=4, method=Soseleto())
    before = {name: p.detach().clone() for name, p in alone.model.named_parameters()}
    alone.train()
    assert not torch.equal(alone.model.classifier.weight, before["classifier.weight"])
    right = found_by(alone)
    for answer in together(2, fully_sharded, str(tmp_path)):
        assert len(answer) == 3, answer
        whole, again, is_placed = answer
        assert is_placed
        for name, value in right.items():
            for found in (whole, again):
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("flag", "name"), [("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP 1")])
def test_other_kinds_of_shards_are_refused(tmp_path: Path, flag: str, name: str) -> None:
    class Other(SoseletoTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            setattr(self, flag, True)

    with pytest.raises(UsageError, match=rf"does not train with {name}: write TrainingArguments\(fsdp=True, "):
        trainer(tmp_path, kind=Other)


def test_the_mixin_goes_with_other_trainers(tmp_path: Path) -> None:
    class Other(transformers.Trainer):
        pass

    class Selecting(SelectionMixin, Other):
        pass

    made = trainer(tmp_path, kind=Selecting, args={"max_steps": 1}, train_dataset=texts(8, 0))
    with pytest.raises(UsageError, match=r"call train\(\) first"):
        _ = made.weights
    made.train()
    assert made.weights.shape == (8,)


class WithModes(torch.optim.SGD):
    """As optimizers without a schedule, which the Trainer puts in evaluation mode to evaluate."""

    trains = True

    def train(self) -> None:
        self.trains = True

    def eval(self) -> None:
        self.trains = False

    def step(self, closure: Any = None) -> Any:
        assert self.trains
        return super().step(closure)


def test_an_optimizer_trains_again_after_an_evaluation(tmp_path: Path) -> None:
    model = bert()
    evaluated = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    optimizer = WithModes(model.parameters(), lr=0.1)
    made = trainer(tmp_path, model, args=evaluated, eval_dataset=texts(8, 2), optimizers=(optimizer, None))
    made.train()
    assert made.state.global_step == 2
