"""Verdicts of `tnfn compare` on real models and on what people do to them.

    python benchmarks/real_models.py [--packages sceptr sapiens …] [--json] [--markdown PAGE]

Models that other people trained come from packages of the package index; see `real_weights`. Each
is compared with what an edit makes of it, and with a disguise of that. Exit code 1 if a verdict
is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from real_weights.edits import Real, cases_for, read_tensors, write_edit
from real_weights.models import (
    FACTS,
    minilm_model,
    rxnfp_models,
    sceptr_models,
    write_sapiens,
    write_smollm2,
)
from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.paper.table_text import markdown_rows

EXIT = {True: 0, False: 1, None: 3}
SMALL = ("sceptr", "sapiens")
BERT_ADAPTED = ("query.weight", "value.weight")
MARK = "<!-- table: benchmarks/real_models.py writes what follows -->"


@dataclass(frozen=True)
class Result:
    """One comparison."""

    model: str
    edit: str
    disguised: bool
    expected: Mapping[str, int]
    verdict: str
    exit: int
    score: float | None
    seconds: float

    @property
    def right(self) -> bool:
        """Whether verdict and exit code are the expected ones."""
        return self.expected.get(self.verdict) == self.exit


def sceptr(place: Path) -> Real:
    """SCEPTR with its fine-tune."""
    files = sceptr_models()
    return Real(
        "SCEPTR", files["SCEPTR"], read_tensors(files["SCEPTR"]), None, None, "",
        ("in_proj_weight", "out_proj.weight"), read_tensors(files["SCEPTR_finetuned"]), FACTS,
    )  # fmt: skip


def sapiens(place: Path) -> Real:
    """The RoBERTa for heavy chains."""
    folder = write_sapiens("h", place / "sapiens-h")
    embedding = "roberta.embeddings.word_embeddings.weight"
    return Real.of_folder("Sapiens VH", folder, embedding, "lm_head.", BERT_ADAPTED)


def rxnfp(place: Path) -> Real:
    """The fine-tuned BERT that classifies reactions, with the one that it was made from."""
    folders = rxnfp_models()
    folder, embedding = folders["bert_ft_10k_25s"], "bert.embeddings.word_embeddings.weight"
    made = Real.of_folder("rxnfp", folder, embedding, "classifier.", BERT_ADAPTED)
    return replace(made, tuned=read_tensors(folders["bert_pretrained"]))


def minilm(place: Path) -> Real:
    """The sentence encoder."""
    embedding = "embeddings.word_embeddings.weight"
    return Real.of_folder("MiniLM", minilm_model(), embedding, "", BERT_ADAPTED)


def smollm2(place: Path) -> Real:
    """The Llama."""
    folder = write_smollm2(place / "smollm2")
    embedding = "model.embed_tokens.weight"
    return Real.of_folder("SmolLM2", folder, embedding, "", ("q_proj.weight", "v_proj.weight"))


MODELS = {
    "sceptr": sceptr,
    "sapiens": sapiens,
    "rxnfp": rxnfp,
    "minilm": minilm,
    "smollm2": smollm2,
}


def compare(model: Real, edit: str, place: Path, *, hidden: bool) -> Result:
    """Relates a model to what an edit makes of it, disguised or not."""
    case = cases_for(model)[edit]
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        second = write_edit(case.edit(model), Path(temporary) / "edited")
        if hidden:
            out = second.with_name(f"disguised{second.suffix}")
            with open_model(second, model.options) as opened:
                disguise(opened, out, torch.Generator().manual_seed(1))
            second = out
        start = time.perf_counter()
        with open_model(model.path, model.options) as A, open_model(second, model.options) as B:
            relation = relate(A, B)
        seconds = time.perf_counter() - start
    return Result(
        model.name, edit, hidden, case.right, relation.verdict,
        EXIT[relation.same_function], relation.score, seconds,
    )  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """A row for each edit, a column for each model: verdicts, and what was expected if wrong."""
    models = list(dict.fromkeys(r.model for r in results))
    edits = list(dict.fromkeys(r.edit for r in results))
    head = ["second model", "expected, exit code", *models]
    rows = []
    for edit in edits:
        for hidden in (False, True):
            cells = {r.model: r for r in results if r.edit == edit and r.disguised is hidden}
            if not cells:
                continue
            first = next(iter(cells.values()))
            right = " or ".join(f"{verdict}, {code}" for verdict, code in first.expected.items())
            row = [f"{edit}, disguised" if hidden else edit, right]
            rows.append([*row, *(_cell(cells.get(model)) for model in models)])
    return "\n".join(markdown_rows(head, [], rows))


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    score = "" if result.score is None else f" {result.score:.3f}"
    shown = f"{result.verdict}{score}"
    return shown if result.right else f"**{shown}, exit {result.exit}**"


def write_page(page: Path, text: str) -> None:
    """Replaces what follows the mark on a page."""
    before = page.read_text(encoding="utf-8").partition(MARK)[0]
    page.write_text(f"{before}{MARK}\n\n{text}\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", nargs="+", choices=MODELS, default=list(SMALL))
    parser.add_argument("--edits", nargs="+", help="only these")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    options = parser.parse_args(words)
    try:
        results = run(options.packages, options.edits)
    except TransformerNFNError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps([asdict(r) for r in results], indent=2) if options.json else table(results))
    wrong = [r for r in results if not r.right]
    print(f"{len(results)} comparisons, {len(wrong)} not as expected", file=sys.stderr)
    if options.markdown is not None:
        write_page(options.markdown, table(results))
    sys.exit(1 if wrong else 0)


def run(packages: Sequence[str], edits: Sequence[str] | None) -> list[Result]:
    """All comparisons of some packages."""
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for package in packages:
            model = MODELS[package](place)
            for edit in cases_for(model):
                if edits is not None and edit not in edits:
                    continue
                for hidden in (False, True):
                    result = compare(model, edit, place, hidden=hidden)
                    results.append(result)
                    print(
                        f"{result.seconds:6.1f} s  {model.name}, {edit}"
                        f"{', disguised' if hidden else ''}: {_cell(result)}",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
    return results


if __name__ == "__main__":
    main()
