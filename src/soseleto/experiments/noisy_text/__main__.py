"""``python -m soseleto.experiments.noisy_text``."""

from soseleto.experiments.noisy_text.command import main

if __name__ == "__main__":
    main()
