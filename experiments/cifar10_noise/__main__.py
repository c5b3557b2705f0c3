"""``python -m experiments.cifar10_noise``."""

from experiments.cifar10_noise.tables import main

if __name__ == "__main__":
    main()
