"""A tiny BERT with its tokenizer, written as a folder that ``from_pretrained`` reads: tests download nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

GOOD, BAD = ("good", "great", "lovely", "fine"), ("bad", "awful", "poor", "dull")
WORDS = (*GOOD, *BAD, "the", "a", "film", "book", "was", "and", "very", *map(str, range(10)))
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_folder(folder: Path, *, longest: int = 64, layers: int = 1) -> Path:
    """Write the model; about 4,000 parameters."""
    import tokenizers
    import transformers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    vocabulary = {word: at for at, word in enumerate((*SPECIAL, *WORDS))}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=longest, **names)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=longest,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    return folder


def write_reviews(path: Path, n: int, *, seed: int, wrong: float = 0.0) -> Path:
    """A table of reviews of 7 to 26 words; ``wrong`` is the share of wrong labels, whose truth is beside them."""
    draw = np.random.default_rng(seed)
    lines = ["review,label,truth,stars"]
    for row in range(n):
        good = bool(draw.integers(2))
        first, second = draw.choice(GOOD if good else BAD, 2)
        text = ["the", str(draw.choice(["film", "book"])), "was", first, "and", second, *["very"] * (row % 20)]
        given = good ^ bool(draw.random() < wrong)
        sides = ("neg", "pos")
        lines.append(f"{' '.join(text)} {row + 1000 * seed},{sides[given]},{sides[good]},{row % 5}")
    path.write_text("\n".join(lines) + "\n")
    return path
