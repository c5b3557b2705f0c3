"""CIFAR-10 with wrong labels and a deep network: the strong recipe, its parts, and what it is compared with."""
