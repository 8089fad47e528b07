import importlib.util
import os
from pathlib import Path

import pytest
from browser import chromium, lab, open_page  # noqa: F401 - fixtures
from hypothesis import settings

# Same examples in every CI run; elsewhere new ones each time. No deadline: the machine may be busy.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("dev", deadline=None, max_examples=50)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

if importlib.util.find_spec("matplotlib"):
    import matplotlib

    matplotlib.use("Agg")  # not through MPLBACKEND: kernels started by a test would inherit it and lose their figures

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings, and repeats badly

    if not torch.cuda.is_available():
        # Without a GPU, kernels run in Triton's interpreter. This is read as a kernel is decorated, so it is set before
        # anything imports Triton: importing torch does not, importing transformers does.
        os.environ.setdefault("TRITON_INTERPRET", "1")


SLOW = {line for line in (Path(__file__).parent / "slow.txt").read_text().splitlines() if not line.startswith("#")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of real traces that may lie beside the repository."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder shared/ beside the repository")
    return folder
