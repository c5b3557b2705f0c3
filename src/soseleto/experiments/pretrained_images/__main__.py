"""``python -m soseleto.experiments.pretrained_images``."""

from soseleto.experiments.pretrained_images.command import main

if __name__ == "__main__":
    main()
