"""The example of Ray Train in the docs, on a local cluster with two workers and gloo."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md"
BEFORE = """
import torch, soseleto, torch.nn.functional as F

torch.manual_seed(1)
x, y = torch.randn(132, 2), torch.arange(132) % 2
per_example = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")
"""
# The page's function once more, in this process alone.
AFTER = """
def kept(checkpoint):
    with checkpoint.as_directory() as folder:
        return torch.load(folder + "/selection.pt", weights_only=True)["weights"]

two, one = kept(trainer.fit().checkpoint), {}
ray.train.report = lambda metrics, checkpoint: one.update(kept(checkpoint))
train()
assert one["weights"].std() > 0.01
torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
print("alike")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed: pip install 'ray[train]' (not in the dev dependencies, since it takes a minute)",
)
def test_the_example_of_the_page_trains_as_one_process(tmp_path: Path) -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if "import ray" in b)
    block = block.replace("print(trainer.fit().metrics)\n", "")
    script = tmp_path / "train.py"
    script.write_text(BEFORE + block + AFTER, "utf-8")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HOME": str(tmp_path), "TMPDIR": "/tmp", **quiet},
    )
    assert done.stdout.endswith("alike\n"), done.stdout[-1000:] + done.stderr[-3000:]
