"""``python -m soseleto``."""

from soseleto.cli.main import main

if __name__ == "__main__":
    main()
