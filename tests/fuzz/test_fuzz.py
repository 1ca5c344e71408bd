"""Damaged inputs of every command: refused in one sentence, or answered as if they were whole.

5,000 of them, as `make nightly` runs them: ``python tests/fuzz/fuzz.py --inputs 5000``
"""

from pathlib import Path

import pytest

from fuzz import explain, run

SEED = 0


# Two tests, for the two processes that tests run in.
@pytest.mark.nightly
@pytest.mark.parametrize("numbers", [range(2500), range(2500, 5000)])
def test_no_damaged_input_is_believed_or_brings_a_command_down(
    numbers: range, tmp_path: Path
) -> None:
    results = run(SEED, numbers, tmp_path)
    assert len(results) == len(numbers)
    wrong = [result for result in results if result["fault"]]
    assert not wrong, "\n".join(map(explain, wrong))
    rights = {result["right"] for result in results}
    assert rights == {"REFUSED", "EQUAL", "EQUAL_OR_REFUSED", "ACCEPTED", "ANSWERED"}
    answered = sum(result["status"] in (0, 1, 3) for result in results)
    assert 0.05 < answered / len(results) < 0.5, "some are answered, most are refused"
