"""``python -m soseleto``."""

from soseleto.cli import main

if __name__ == "__main__":
    main()
