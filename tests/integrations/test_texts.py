"""The run folder of a real Trainer: its ranking, its report in words, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from soseleto.errors import UsageError
from soseleto.report.export import export_ranking
from soseleto.run_folder.folder import RunFolder

transformers = pytest.importorskip("transformers")
N = 24


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from soseleto.integrations.huggingface import SoseletoTrainer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    texts = [{"input_ids": ids, "labels": ids} for n in range(N + 4) for ids in [torch.randint(3, 50, (5 + n % 8,))]]
    arguments = transformers.TrainingArguments(
        str(tmp_path_factory.mktemp("out")), num_train_epochs=2, per_device_train_batch_size=6, report_to=[],
        use_cpu=True, logging_steps=1, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip

    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        filling = {"input_ids": 0, "labels": -100}
        padded = {
            name: torch.nn.utils.rnn.pad_sequence([one[name] for one in items], True, value)
            for name, value in filling.items()
        }
        return {**padded, "attention_mask": (padded["input_ids"] > 0).long()}

    made = SoseletoTrainer(
        model, arguments, train_dataset=texts[:N], target_dataset=texts[N:], data_collator=collate, target_batch_size=4
    )
    made.train()
    return made


def test_a_run_folder_with_texts(trainer: Any, tmp_path: Path) -> None:
    from soseleto.integrations.texts import write_run

    words = [f"<b>text</b> {i}" for i in range(N)]
    report = write_run(trainer, tmp_path / "run", texts=words, files=["sums" if i % 3 else "plays" for i in range(N)])
    page = report.read_text("utf-8")
    assert "Trained on 24 source and 4 target examples for 2 epochs in" in page
    assert "&lt;b&gt;text&lt;/b&gt; " in page
    assert "<b>text" not in page
    for group in ("sums", "plays", "5 to 6 tokens", "11 to 12 tokens"):
        assert f'<th scope="row">{group}</th>' in page
    assert "cover 100 % of the trainable parameters" in page
    run = RunFolder.open(tmp_path / "run")
    ranking = run.ranking()
    places = ranking["id"].astype(int)
    assert sorted(places) == list(range(N))
    torch.testing.assert_close(torch.tensor(ranking["weight"]), trainer.weights[places])
    assert list(ranking["score"]) == sorted(ranking["score"], reverse=True)
    assert [int(name.split()[1]) for name in ranking["x0"]] == places.tolist()
    assert len(run.metrics()) == 2 + 2 * N // 6
    assert export_ranking(run.path, worst=3).decode().startswith("id,label,weight,score,visits,tokens,text\n")


def test_texts_and_files_may_be_unknown(trainer: Any, tmp_path: Path) -> None:
    from soseleto.integrations.texts import write_run

    page = write_run(trainer, tmp_path / "run").read_text("utf-8")
    assert "5 to 6 tokens" in page
    with pytest.raises(UsageError, match="files has 1 entries for 24 examples"):
        write_run(trainer, tmp_path / "other", files=["sums"])


def test_of_several_processes_the_first_writes(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from soseleto.integrations.texts import write_run

    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    assert write_run(trainer, tmp_path / "run") == tmp_path / "run" / "report.html"
    assert not (tmp_path / "run").exists()
