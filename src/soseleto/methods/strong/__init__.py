"""The strong recipe: labels doubted by a teacher, strong augmentation, the teacher's answers for doubted labels."""

from soseleto.methods.strong.method import Strong
from soseleto.methods.strong.transfer import StrongTransfer

__all__ = ["Strong", "StrongTransfer"]
