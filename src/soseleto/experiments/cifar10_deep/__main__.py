"""``python -m soseleto.experiments.cifar10_deep``."""

from soseleto.experiments.cifar10_deep.command import main

if __name__ == "__main__":
    main()
