"""The entry point of the command line."""

from __future__ import annotations

from soseleto.cli.main import main

if __name__ == "__main__":
    main()
