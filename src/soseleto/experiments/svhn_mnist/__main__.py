"""``python -m soseleto.experiments.svhn_mnist``."""

from soseleto.experiments.svhn_mnist.tables import main

if __name__ == "__main__":
    main()
