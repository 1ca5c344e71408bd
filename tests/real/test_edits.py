"""What people do to checkpoints, done to real weights: every verdict and exit code is right."""

import pytest
from every_command import fetched

import real_models

QUICK = (
    ("sceptr", "cast to float16"),
    ("sceptr", "averaged with a fine-tune"),
    ("sceptr", "middle layer duplicated"),
    ("sapiens", "cast to bfloat16"),
    ("sapiens", "3 tokens added"),
    ("sapiens", "half of each matrix pruned"),
    ("sapiens", "middle layer dropped"),
    ("sapiens", "LoRA of rank 4 merged"),
    ("sapiens", "new head"),
    ("sapiens", "3 embeddings negated"),
)


@pytest.mark.parametrize(("package", "edit"), QUICK)
def test_an_edit_in_disguise_gets_the_right_verdict(tmp_path, package, edit):
    model = fetched(lambda: real_models.MODELS[package](tmp_path))
    result = real_models.compare(model, edit, tmp_path, hidden=True)
    assert result.right, result


@pytest.mark.nightly
@pytest.mark.parametrize("package", ["sceptr", "sapiens", "rxnfp", "minilm"])
def test_every_edit_gets_the_right_verdict(package):
    results = fetched(lambda: real_models.run([package], None))
    assert [r for r in results if not r.right] == []


def test_the_table_is_written_after_the_mark_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{real_models.MARK}\n\nold\n")
    row = real_models.Result("M", "cast", True, {"same": 0}, "derived", 1, 0.5, 1.0)
    real_models.write_page(page, real_models.table([row]))
    text = page.read_text()
    assert text.startswith("# Title\n\n")
    assert "old" not in text
    assert "| cast, disguised | same, 0 | **derived 0.500, exit 1** |" in text
