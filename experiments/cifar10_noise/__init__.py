"""The paper's Table 1: CIFAR-10 with noisy labels."""
