"""``python -m soseleto.experiments.cifar10_noise``."""

from soseleto.experiments.cifar10_noise.tables import main

if __name__ == "__main__":
    main()
