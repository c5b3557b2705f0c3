"""Where a training writes: its run folder, and after a failed write the rescue folder, or memory until one succeeds.

A folder that is deleted, emptied or made read-only, or a full disk, does not end a training that has begun. Everything
that was written stays in memory, so that it can be written again: to the rescue folder at once if there is one, else to
the run folder at the next write that succeeds. A folder that was deleted is not made again, as somebody deleted it; an
empty one in its place is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from soseleto.errors import DiskError, SoseletoError, UsageError
from soseleto.run_folder import checkpoint
from soseleto.run_folder.folder import CONFIG, METRICS, RunFolder

Write = Callable[[RunFolder], object]


class Place:
    """The folder of a training and a copy of everything written to it."""

    def __init__(self, folder: RunFolder, rescue: Path | None) -> None:
        self.folder = folder
        self.checkpoint_due = False  # the folder was written anew and has none
        self._rescue = rescue
        self._config: Mapping[str, Any] = {}
        self._records: list[Mapping[str, Any]] = []
        self._report: Callable[[str], None] | None = None  # set once the training has begun
        self._identity: tuple[int, int] | None = None
        self._behind = False  # whether the folder lacks some of the records
        self._failing = False
        self._wrote_all = False  # whether the last ``_catch_up`` wrote all records
        self._news: str | None = None  # to report after the next successful write
        self._locks = ExitStack()

    def begin(self, config: Mapping[str, Any], report: Callable[[str], None]) -> None:
        """From now on a failed write does not raise; ``report`` gets one message when writes begin to fail."""
        self._records = list(self.folder.metrics())
        self._config, self._identity, self._report = config, _identity(self.folder.path), report

    def log(self, record: Mapping[str, Any]) -> None:
        self._records.append(record)
        self.attempt(lambda folder: None if self._wrote_all else folder.log(record))

    def attempt(self, write: Write) -> SoseletoError | None:
        """Write to the folder, or to the rescue folder; the error where neither can be written."""
        if self._report is None:
            write(self.folder)
            return None
        try:
            self._catch_up()
            write(self.folder)
        except (SoseletoError, OSError) as error:
            if not self._is_a_failed_write(error):
                raise
            return self._after_failure(error, write)
        if self._news is not None:
            text, self._news, self._failing = self._news, None, False
            self._report(text)
        return None

    def close(self) -> None:
        """Release the lock of the rescue folder."""
        self._locks.close()

    def _catch_up(self) -> None:
        """Raise DiskError where the folder is gone; write everything again where it was emptied or lacks records."""
        path = self.folder.path
        now = _identity(path)
        if now is None:
            raise DiskError(f"{path} was deleted during the training")
        if now != self._identity and any(path.iterdir()):
            raise DiskError(f"{path} was replaced by another folder during the training")
        emptied = now != self._identity or not all((path / name).exists() for name in (CONFIG, METRICS))
        self._wrote_all = self._behind or emptied
        if not self._wrote_all:
            return
        self._behind = True
        if emptied:
            self._news = f"{path} was emptied during the training: everything was written to it again"
        elif self._failing:
            self._news = f"{path} can be written again and has the whole run"
        self.folder.write_config(self._config)
        self.folder.cut_metrics(0)
        for record in self._records:
            self.folder.log(record)
        self._identity, self._behind = now, False
        self.checkpoint_due = not checkpoint.existing(path)

    def _is_a_failed_write(self, error: Exception) -> bool:
        """An error in reading back what was just written also means that the folder is gone."""
        return isinstance(error, OSError) or _identity(self.folder.path) != self._identity or self._emptied()

    def _emptied(self) -> bool:
        return not (self.folder.path / CONFIG).exists()

    def _after_failure(self, error: Exception, write: Write) -> SoseletoError | None:
        assert self._report is not None
        self._behind = True
        why = str(error).partition(": fix that")[0].rstrip(".")
        if self._rescue is not None and self._moved(self._rescue):
            self._report(f"{why}: the run is now written to {self.folder.path}")
            return self.attempt(write)
        if not self._failing:
            self._failing = True
            self._report(f"{why}: the training continues in memory and tries again at every write")
        return error if isinstance(error, SoseletoError) else DiskError(why)

    def _moved(self, rescue: Path) -> bool:
        """Whether the rescue folder could be made; it is tried again after the next failed write otherwise."""
        try:
            folder = RunFolder.create(rescue)
            self._locks.enter_context(folder.held())
        except SoseletoError:
            return False
        self.folder, self._rescue = folder, None
        self._identity, self._news = _identity(rescue), None
        return True


def check_rescue(rescue: Path | None, out: Path | None) -> None:
    """Raise, before the training, where a rescue folder could not be used."""
    if rescue is None:
        return
    if out is None:
        raise UsageError("a rescue folder has no effect without a run folder: add out='runs/name', or leave it out.")
    if rescue.exists() and (not rescue.is_dir() or any(rescue.iterdir())):
        raise UsageError(
            f"the rescue folder {rescue} must be new or empty: give --rescue another one, or --out {rescue} to resume "
            "a run that was rescued there."
        )
    if out.resolve() == rescue.resolve() or out.resolve() in rescue.resolve().parents:
        raise UsageError(f"the rescue folder {rescue} is inside {out}, with which it would be lost: give another one.")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
