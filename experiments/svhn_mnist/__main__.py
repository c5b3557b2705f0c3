"""``python -m experiments.svhn_mnist``."""

from experiments.svhn_mnist.tables import main

if __name__ == "__main__":
    main()
