import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU these tests are not there, nor those of the on-chip kernels on another GPU."""
    gpu = torch.cuda.is_available()
    on_chip = gpu and torch.cuda.get_device_capability() == (9, 0)
    left_out = [
        item
        for item in items
        if item.get_closest_marker("gpu")
        and not (on_chip if item.path.name == "test_on_chip.py" else gpu)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
