"""``python -m experiments.cifar10_deep``."""

from experiments.cifar10_deep.command import main

if __name__ == "__main__":
    main()
