"""CIFAR-10N with a network that was trained on ImageNet: EfficientNet-lite0, fine-tuned on larger images."""
