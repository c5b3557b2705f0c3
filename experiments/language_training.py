"""A training of ``language``: with weights known or examples chosen beforehand, or with weights learned in the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from experiments.experiment import Run
from experiments.language_pools import FOREIGN, RIGHT, Pool, Text, Tokens
from soseleto import Selection, Soseleto, score
from soseleto.data import generator
from soseleto.data.batches import Batch, TargetCycle
from soseleto.integrations.huggingface import Join, default_loss, mean_embeddings
from soseleto.pieces import Piece, from_features, last_batch, preconditioned
from soseleto.pieces.piece import Alignment, State, Step
from soseleto.task.task import Task

WARM_UP = 5  # steps
Trained = tuple[nn.Module, Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Config(Run):
    """base: "fixed" (weights known beforehand), "chosen" (the best ``share`` of the pool) or "learned"
    criterion: of ``CRITERIA``, or with "learned" of ``METHODS``
    adapter: "full", all parameters are trained, or "lora" of rank 16 on all linear layers
    part: of the pool's size, for tests; epochs: passes over the pool
    """

    COLUMN = ("pool", "adapter")

    pool: str
    adapter: str = "full"
    criterion: str = ""
    share: float = 0.1
    epochs: int = 1
    batch_size: int = 64
    target_batch_size: int = 16
    max_tokens: int = 384
    lr: float = 1e-4
    schedule: str = "constant"
    model: str = "smollm2-135m"
    precision: str = "bfloat16"
    part: float = 1.0


@dataclass(frozen=True)
class shuffled_from_features(from_features):
    """The control: every example has the weight of another one of its batch, whose order is random."""

    def before(self, rows: Tensor, state: State, source: Batch, task: Task) -> None:
        super().before(rows, state, source, task)
        rows[0].copy_(rows[0].roll(1))


@dataclass(frozen=True)
class better_half(Piece):
    """As GREATS does to first order: the half of the batch with the larger alignments has weight 1, the others 0."""

    slot = "alignment"

    def update(self, value: Alignment, state: State, step: Step) -> Alignment:
        better = value.q.topk(len(value.q) // 2).indices
        return replace(value, evidence=torch.full_like(value.q, -0.5).index_fill_(0, better, 0.5))


METHODS: Mapping[str, Soseleto] = {
    "features": Soseleto(direction=preconditioned(), alignment=from_features()),
    "features, shuffled": Soseleto(direction=preconditioned(), alignment=shuffled_from_features()),
    "features, plain": Soseleto(alignment=from_features()),
    "after": Soseleto(direction=preconditioned(), weight_step=5.0),
    # a step that reaches 0 and 1 from everywhere, at the first rate of the warm-up too
    "greats": Soseleto(direction=last_batch(), alignment=better_half(), weight_step=2.0 * WARM_UP, weights_first=True),
}


@dataclass
class Training:
    """Each base of ``Config`` returns a trained model, weights, and scores: the higher, the better."""

    run: Config
    data: Pool
    make: Callable[[], nn.Module]
    device: torch.device
    tokens: int = 0
    steps: int = 0

    def fixed(self) -> Trained:
        weights = CRITERIA[self.run.criterion](self)
        scores = weights if self.run.criterion == "similarity" else None
        return self.trained(weights, torch.arange(len(weights)))[0], weights, scores

    def chosen(self) -> Trained:
        """Trained on the best of the pool alone, again and again."""
        scores = CRITERIA[self.run.criterion](self)
        weights = _best(scores, self.run.share)
        return self.trained(weights, weights.nonzero().flatten())[0], weights, scores

    def learned(self) -> Trained:
        model, n, target = self.make(), len(self.data.source), self.data.target
        optimizer = AdamW(model.parameters(), lr=self.run.lr, weight_decay=self.run.weight_decay)
        selection = Selection(
            model,
            n_source=n,
            loss=default_loss(model),
            features=mean_embeddings(model),
            method=METHODS[self.run.criterion],
            optimizer=optimizer,
            join=Join(0),
        )
        cycle = TargetCycle(len(target), min(self.run.target_batch_size, len(target)), self.run.seed)
        for step, index in enumerate(self._steps(optimizer, torch.arange(n))):
            of_target = target.batch(cycle(step).tolist(), self.device)
            with self.autocast():
                selection.backward(self._source(index), of_target, index=index)
        return model, selection.weights, selection.scores

    def trained(self, weights: Tensor, places: Tensor, steps: int | None = None) -> tuple[nn.Module, AdamW]:
        """Steps with weights known beforehand, on batches of ``places``; where all weights of a batch are 0, none."""
        model = self.make()
        optimizer = AdamW(model.parameters(), lr=self.run.lr, weight_decay=self.run.weight_decay)
        for index in self._steps(optimizer, places, steps):
            alpha = weights[index].to(self.device)
            if bool(alpha.any()):
                losses = self.losses(model, self._source(index))
                ((alpha * losses).sum() / alpha.sum()).backward()
        return model, optimizer

    def nll(self, model: nn.Module, tokens: Tokens) -> float:
        """The loss per token of the answers."""
        counts = torch.tensor([len(ids) - prompt for ids, prompt in zip(tokens.ids, tokens.prompts, strict=True)])
        return float((self.answers(model, tokens) * counts).sum() / counts.sum())

    @torch.no_grad()
    def answers(self, model: nn.Module, tokens: Tokens) -> Tensor:
        """The mean loss of every answer."""
        return torch.cat([self.losses(model.eval(), batch).double().cpu() for batch in tokens.batches(self.device)])

    def _steps(self, optimizer: AdamW, places: Tensor, steps: int | None = None) -> Iterator[Tensor]:
        """Random batches of these places, as many as the run has over the pool; after each the optimizer steps."""
        size, seed = self.run.batch_size, self.run.seed
        steps = steps or self.run.epochs * max(1, len(self.data.source) // size)
        passes = range(-(-steps * size // len(places)))
        order = [places[torch.randperm(len(places), generator=generator(seed, "language/order", i))] for i in passes]
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        for index in torch.cat(order)[: steps * size].split(size):
            yield index
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def _source(self, index: Tensor) -> dict[str, Tensor]:
        batch = self.data.source.batch(index.tolist(), self.device)
        self.tokens, self.steps = self.tokens + int(batch["attention_mask"].sum()), self.steps + 1
        return batch

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with self.autocast():
            losses: Tensor = default_loss(model)(model, batch)
        return losses

    def autocast(self) -> torch.autocast:
        precision = self.run.precision
        return torch.autocast(self.device.type, getattr(torch, precision), enabled=precision != "float32")


def similarity(training: Training) -> Tensor:
    """Weights that grow with the cosine of a text and the target's mean, a half at the mean cosine."""
    cosines = embeddings(training, training.data.source) @ embeddings(training, training.data.target).mean(0)
    return torch.sigmoid((cosines - cosines.mean()) / cosines.std())


def nearest(training: Training) -> Tensor:
    """The cosine of every text and the target example that it is most like; RDS+ takes turns over the target's."""
    return (embeddings(training, training.data.source) @ embeddings(training, training.data.target).T).amax(1)


@torch.no_grad()
def embeddings(training: Training, tokens: Tokens) -> Tensor:
    """The mean of each text's last hidden states, later tokens weighing more, at length 1."""
    model, found = training.make().eval(), []
    for batch in tokens.batches(training.device):
        seen = batch["attention_mask"]
        with training.autocast():
            outputs = model(input_ids=batch["input_ids"], attention_mask=seen, output_hidden_states=True)
        sums = torch.einsum("bl,bld->bd", (seen.cumsum(1) * seen).float(), outputs.hidden_states[-1].float())
        found.append(F.normalize(sums).cpu())
    return torch.cat(found)


def _best(scores: Tensor, share: float) -> Tensor:
    return torch.zeros(len(scores)).index_fill_(0, scores.topk(max(1, round(share * len(scores)))).indices, 1.0)


def at_random(training: Training) -> Tensor:
    return torch.rand(len(training.data.source), generator=generator(training.run.seed, "language/random"))


def balanced(training: Training) -> Tensor:
    """The random order of each file's texts, so that the best are equally many of each file."""
    files, drawn = np.array([text.file for text in training.data.source.texts]), at_random(training)
    for name in np.unique(files):
        own = torch.from_numpy(files == name)
        drawn[own] = -drawn[own].argsort().argsort().float()
    return drawn


def bm25(queries: Sequence[Text], texts: Sequence[Text], k: float = 1.5, b: float = 0.75) -> Tensor:
    """The mean BM25 score of every text for the queries' words (Robertson and Zaragoza, 2009).

        Σ over words w of a query:  log(1 + (N − n_w + ½)/(n_w + ½)) · c_w (k + 1)/(c_w + k (1 − b + b·length/mean))

    c_w: how often the text has w;  n_w: how many of the N texts have it
    """
    words = CountVectorizer(token_pattern=r"\w+")
    counts = words.fit_transform([f"{text.question} {text.answer}" for text in texts]).astype(np.float64).tocoo()
    asked = np.asarray(words.transform([f"{text.question} {text.answer}" for text in queries]).mean(0)).ravel()
    of_texts, n = np.bincount(counts.row, counts.data, len(texts)), np.bincount(counts.col, minlength=len(asked))
    size = k * (1.0 - b + b * of_texts / of_texts.mean())
    counts.data *= (k + 1.0) / (counts.data + size[counts.row])
    return torch.from_numpy(counts @ (asked * np.log1p((len(texts) - n + 0.5) / (n + 0.5))))


def less(training: Training) -> Tensor:
    """Alignments with the target's mean gradient as Adam scales it, after a warm-up on a twentieth of the pool.

    LESS takes cosines of projected LoRA gradients at several checkpoints.
    """
    size, n = training.run.batch_size, len(training.data.source)
    model, optimizer = replace(training).trained(torch.ones(n), torch.arange(n), steps=max(1, n // size // 20))
    pool, target = ([(of, i) for i in range(len(of))] for of in (training.data.source, training.data.target))

    def collate(items: list[tuple[Tokens, int]]) -> dict[str, Tensor]:
        return items[0][0].batch([i for _, i in items], training.device)

    given = {"loss": training.losses, "collate": collate, "batch_size": size, "optimizer": optimizer}
    return score(model, pool, {"": target}, **given).values[0]


CRITERIA: Mapping[str, Callable[[Training], Tensor]] = {
    "all": lambda training: torch.ones(len(training.data.source)),
    "right": lambda training: (training.data.kinds == RIGHT).float(),
    "topic": lambda training: (training.data.kinds != FOREIGN).float(),
    "similarity": similarity,
    "nearest tenth": lambda training: _best(nearest(training), training.run.share),
    "random": at_random,
    "balanced": balanced,
    "shortest": lambda training: -CRITERIA["longest"](training),
    "longest": lambda training: torch.tensor([len(ids) for ids in training.data.source.ids]).float(),
    "bm25": lambda training: bm25(training.data.target.texts, training.data.source.texts),
    "embeddings": nearest,
    "loss": lambda training: -training.answers(training.make(), training.data.source),
    "less": less,
}
