"""``python -m experiments NAME``: a table or figure of the paper, or ``data NAME`` for a public data set."""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "figure1": ("experiments.synthetic", "500 points in the plane, 100 of them with a flipped label"),
    "table1": ("experiments.cifar10_noise.tables", "CIFAR-10 with noisy labels, every method"),
    "table2": ("experiments.svhn_mnist.tables", "SVHN digits to 20 or 25 MNIST digits 5-9, every method"),
    "deep": ("experiments.cifar10_deep.command", "CIFAR-10 with wrong labels, PreAct ResNet-18: the strong recipe"),
    "news": ("experiments.noisy_text.command", "news with wrong labels, MiniLM fine-tuned and frozen"),
    "photos": ("experiments.pretrained_images.command", "CIFAR-10N with EfficientNet-lite0, fine-tuned"),
    "data": ("experiments.data", "fetch and verify a public data set"),
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in NAMES:
        print("\n".join(f"python -m experiments {name:8} {what}" for name, (_, what) in NAMES.items()))
        raise SystemExit(0 if name is None else 2)
    importlib.import_module(NAMES[name][0]).main(sys.argv[2:])


if __name__ == "__main__":
    main()
