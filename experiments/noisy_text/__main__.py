"""``python -m experiments.noisy_text``."""

from experiments.noisy_text.command import main

if __name__ == "__main__":
    main()
