"""SoseletoSFTTrainer with the real TRL: packed rows, preparation of the target, what is refused."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read when TRL is imported
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

from soseleto import Soseleto, alignment  # noqa: E402
from soseleto.errors import UsageError  # noqa: E402
from soseleto.integrations.batches import INDEX  # noqa: E402
from soseleto.integrations.huggingface import SelectionMixin, default_loss  # noqa: E402
from soseleto.integrations.texts import write_run  # noqa: E402
from soseleto.integrations.trl import SoseletoSFTTrainer  # noqa: E402
from soseleto.run_folder.folder import RunFolder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SPECIAL = ("<pad>", "<eos>", "<unk>", "user", "assistant", ":")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' <eos> ' }}{% endfor %}"
LONGEST = 16


def tokenizer() -> Any:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocabulary = {word: at for at, word in enumerate((*SPECIAL, *(f"w{i}" for i in range(20))))}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **names)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=26, num_key_value_heads=1, max_position_embeddings=64, **sizes)
    return transformers.LlamaForCausalLM(config)


def texts(n: int, seed: int, *, long: tuple[int, ...] = ()) -> Any:
    """Questions and answers of one to six words; a ``long`` question fills all that is kept of its text."""
    draw = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return " ".join(f"w{int(i)}" for i in torch.randint(20, (count,), generator=draw))

    lengths = torch.randint(1, 7, (n, 2), generator=draw).tolist()
    rows = [(words(20 if i in long else a), " " + words(b)) for i, (a, b) in enumerate(lengths)]
    return datasets.Dataset.from_dict({"prompt": [p for p, _ in rows], "completion": [c for _, c in rows]})


def trainer(folder: Path, source: Any = None, target: Any = None, kind: Any = SoseletoSFTTrainer, **args: Any) -> Any:
    settings = {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 0.01, "report_to": [], "seed": 3}
    settings |= {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "max_length": LONGEST}
    settings |= {"gradient_checkpointing": False, "bf16": False, "optim": "sgd", "logging_steps": 1}
    given = {name: args.pop(name) for name in ("method", "per_example_loss") if name in args}
    return kind(
        llama(),
        trl.SFTConfig(str(folder), **settings | args),
        train_dataset=texts(24, 0, long=(3, 11)) if source is None else source,
        target_dataset=texts(12, 1) if target is None else target,
        processing_class=tokenizer(),
        **{"method": Soseleto(), **given},
    )


def row_of(example: dict[str, str]) -> dict[str, Tensor]:
    """One text alone, as TRL makes it: tokens, and labels of the answer."""
    ids = tokenizer()(example["prompt"] + example["completion"] + "<eos>".rjust(6))["input_ids"][:LONGEST]
    asked = len(example["prompt"].split())
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([[-100] * asked + ids[asked:]])}


def test_every_task_of_the_target_is_prepared(tmp_path: Path) -> None:
    tasks = {"one": texts(6, 1), "other": texts(4, 2)}
    made = trainer(tmp_path, target=tasks)
    made.train()
    for name, task in tasks.items():
        ids = [row_of(row)["input_ids"][0].tolist() for row in task]
        assert list(made.target_dataset[name]["input_ids"]) == ids


@pytest.mark.parametrize("settings", [{"packing": True}, {"padding_free": True, "max_length": None}])
def test_losses_and_alignments_of_a_batch_are_those_of_each_text_alone(tmp_path: Path, settings: Any) -> None:
    source = texts(24, 0, long=() if "padding_free" in settings else (3, 11))
    made = trainer(tmp_path, source, **settings)
    model, loss = made.model.double().eval(), made.per_example_loss
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    seen = []
    for batch in made.get_train_dataloader():
        places = batch.pop(INDEX).tolist()
        seen += places
        losses, found = alignment(model, loss, batch, direction, engine="layerwise")
        assert len(batch["input_ids"]) == 1
        for i, place in enumerate(places):
            alone = loss(model, row_of(source[place]))[0]
            torch.testing.assert_close(losses[i], alone.detach())
            gradients = torch.autograd.grad(alone, [dict(model.named_parameters())[n] for n in direction])
            right = sum((g * d).sum() for g, d in zip(gradients, direction.values(), strict=True))
            torch.testing.assert_close(found[i], right, rtol=1e-9, atol=1e-12)
    assert sorted(seen) == [i for i in range(24) if "padding_free" in settings or i not in (3, 11)]


def test_packed_rows_give_every_text_its_own_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(tmp_path, packing=True, per_device_train_batch_size=2, max_steps=-1, num_train_epochs=2)
    assert len(made.train_dataset) < 20
    made.train()
    visits = made.selection.visits
    assert visits[[3, 11]].tolist() == [0, 0]
    assert (visits == 2).sum() == 22
    assert made.weights.shape == (24,)
    assert made.selection.scores.unique().numel() == 23  # one of them 0, of the texts that were left out
    assert (made.weights[[3, 11]] == 1.0).all()
    assert "2 examples of train_dataset have no token with a label (places 3, 11)" in caplog.text


def test_the_target_is_prepared_as_the_source_is(tmp_path: Path) -> None:
    def messages(n: int, seed: int) -> Any:
        asked = texts(n, seed)
        said = [
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"].strip()}]
            for row in asked
        ]
        return datasets.Dataset.from_dict({"messages": said})

    made = trainer(tmp_path, messages(24, 0), messages(24, 0), packing=True)
    packed = [row["input_ids"] for row in made.train_dataset]
    lengths = [row["seq_lengths"] for row in made.train_dataset]
    apart = [ids.tolist() for row, its in zip(packed, lengths, strict=True) for ids in torch.tensor(row).split(its)]
    target = [row["input_ids"] for row in made.target_dataset]
    assert tokenizer().decode(target[0]).startswith("user : w")
    assert sorted(apart) == sorted(target)  # one text in each row
    made.train()
    assert made.selection.visits.sum() > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"loss_type": "dft"},
            r"loss_type='dft' would be ignored in training: leave it out, or give per_example_loss=",
        ),
        ({"packing": True, "packing_strategy": "bfd_split"}, r"'bfd_split' and max_length=16 can cut a text in two"),
        ({"packing": True, "packing_strategy": "wrapped"}, r"can cut a text in two, which would have two weights"),
        ({"activation_offloading": True}, r"activation_offloading=True has no effect here: write gradient_check"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "trl.trainer.sft_trainer.get_act_offloading_ctx_manager"  # TRL's own needs a GPU
    monkeypatch.setattr(made, lambda model: contextlib.nullcontext())
    with pytest.raises(UsageError, match=words):
        trainer(tmp_path, **settings)


def test_rows_that_another_trainer_packs_are_refused(tmp_path: Path) -> None:
    class Selecting(SelectionMixin, trl.SFTTrainer):
        pass

    with pytest.raises(UsageError, match="compute_loss of Selecting would be ignored"):
        trainer(tmp_path, kind=Selecting)
    made = trainer(tmp_path, kind=Selecting, packing=True, per_example_loss=default_loss(llama()))
    with pytest.raises(UsageError, match="texts, whose places are not known: give one text in each row, or use Sos"):
        next(iter(made.get_train_dataloader()))


@pytest.mark.parametrize("settings", [{"packing": True}, {"shuffle_dataset": True}])
def test_a_run_folder_has_each_text_beside_its_weight(tmp_path: Path, settings: Any) -> None:
    source = texts(24, 0, long=(3, 11))
    made = trainer(tmp_path / "trainer", source, **settings)
    made.train()
    write_run(made, tmp_path / "run")
    ranking = RunFolder.open(tmp_path / "run").ranking()
    for place, text, tokens in zip(ranking["id"].astype(int).tolist(), ranking["x0"], ranking["tokens"], strict=True):
        ids = [] if place in (3, 11) else row_of(source[place])["input_ids"][0].tolist()
        assert text == tokenizer().decode(ids, skip_special_tokens=True)
        assert tokens == len(ids)
