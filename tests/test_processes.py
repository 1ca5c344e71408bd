"""A process uses each core for other rows, and memory in large pages."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transformer_nfn.processes import map_rows

FAULTS = """
import resource, sys
from transformer_nfn.cli import main
sys.argv = ["tnfn", "--version"]
try:
    main()
except SystemExit:
    pass
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HAS_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_slices_of_a_batch_run_on_one_thread_each_and_keep_their_order(threads, count):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    batch, seen = torch.arange(count), []

    def work(rows):
        seen.append(torch.get_num_threads())
        return batch[rows] ** 2

    try:
        assert map_rows(work, batch, chunk=2).tolist() == [i**2 for i in range(count)]
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_an_error_in_a_slice_is_raised_and_the_number_of_threads_is_kept():
    before = torch.get_num_threads()

    def work(rows):
        raise ValueError(f"from {rows.start}")

    with pytest.raises(ValueError, match="from 0"):
        map_rows(work, torch.zeros(4), chunk=2)
    assert torch.get_num_threads() == before


@pytest.mark.nightly
def test_commands_ask_for_large_pages():
    output = subprocess.check_output([sys.executable, "-c", FAULTS], text=True)
    pages = 2**24 * torch.float32.itemsize // resource.getpagesize()
    offered = HAS_LARGE_PAGES.exists() and "[never]" not in HAS_LARGE_PAGES.read_text()
    assert int(output.split()[-1]) < (pages / 2 if offered else 2 * pages)
