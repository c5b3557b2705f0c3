"""The folder of all trainings of one ``soseleto fit``: ``--out``, or ``--rescue`` once that one cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from soseleto.errors import DiskError
from soseleto.run_folder.files import aside
from soseleto.run_folder.folder import RunFolder


class Home:
    """With a rescue folder, the files of the main training are also kept in memory, to be written again there."""

    def __init__(self, out: Path, rescue: Path | None) -> None:
        self.path, self.rescue = out, rescue
        self.report: Callable[[str], None] = lambda text: None
        self.main_ended = False
        self._files: dict[str, bytes] = {}

    def keep(self) -> None:
        """The main training has ended: with a rescue folder, read its files."""
        self.main_ended = True
        if self.rescue is not None:
            self._files = {path.name: path.read_bytes() for path in self.path.iterdir() if path.is_file()}

    def follow(self, written: Path | None) -> None:
        """Move if a training was written to the rescue folder."""
        if self.rescue is None or written is None or self.rescue not in (written, *written.parents):
            return
        if written == self.rescue:  # the main training, which has reported it
            self.path, self.rescue = written, None
        else:
            self.move(f"{self.path} could not be written")

    def check(self) -> None:
        """Move, or raise, if the main training has ended and is no longer there."""
        if self.main_ended and not RunFolder(self.path).is_run():
            self.move(f"{self.path} was deleted or emptied")

    def move(self, why: str) -> None:
        """Continue in the rescue folder, with the main training written there again."""
        if self.rescue is None:
            raise DiskError(f"{why} before the comparison was finished, so it is lost: run again, with --rescue DIR.")
        old, self.path, self.rescue = self.path, self.rescue, None
        if not RunFolder(self.path).is_run():
            self.path.mkdir(parents=True, exist_ok=True)
            for name, content in self._files.items():
                with aside(self.path / name) as part:
                    part.write_bytes(content)
        self.report(f"{why}: the run is now written to {self.path} instead of {old}")
