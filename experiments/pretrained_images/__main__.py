"""``python -m experiments.pretrained_images``."""

from experiments.pretrained_images.command import main

if __name__ == "__main__":
    main()
