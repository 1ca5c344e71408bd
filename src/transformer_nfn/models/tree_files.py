"""Are the trees in a file trees? Asked before LightGBM or XGBoost reads them.

Both libraries trust their files: an index out of range ends the process or reads foreign memory,
a circle never ends. So a file is read here, checked, and written anew from what was checked; the
library sees only that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformer_nfn.io.ubjson import parse_ubjson
from transformer_nfn.models.predictor import PredictorError

MOST_LEAVES = 1 << 20
ROOT = 2**31 - 1
"""What XGBoost writes as the parent of a root."""
_WORDS = re.compile(r"[\w:. +-]{1,200}", re.ASCII)


def checked_lightgbm(data: bytes, width: int) -> str:
    """The model text of LightGBM, checked and written anew.

    Args:
        data: as it stands in the file.
        width: how many numbers a network has for it.
    """
    try:
        return _lightgbm(data.decode("ascii"), width)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise PredictorError(f"model.txt is no model of LightGBM: {_why(error)}") from error


def checked_xgboost(data: bytes, width: int) -> bytes:
    """The model of XGBoost in JSON, checked and written anew from universal binary JSON.

    Args:
        data: as it stands in the file.
        width: how many numbers a network has for it.
    """
    try:
        model = _xgboost(parse_ubjson(data), width)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise PredictorError(f"model.ubj is no model of XGBoost: {_why(error)}") from error
    return json.dumps(model, separators=(",", ":")).encode()


def _why(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)[:200]


def _lightgbm(text: str, width: int) -> str:
    head, *parts = text.partition("\nend of trees\n")[0].split("\nTree=")
    lines = _lines(head)
    version, rest = lines.get("version", ""), text.partition("\nend of trees\n")[1]
    if not head.startswith("tree\n") or version != "v4" or not rest or not parts:
        raise ValueError("it does not begin and end as one of version v4")
    for name, expected in (("num_class", "1"), ("num_tree_per_iteration", "1"),
                           ("max_feature_idx", str(width - 1))):  # fmt: skip
        if lines[name] != expected:
            raise ValueError(f"'{name}' expected {expected}, found '{lines[name][:40]}'")
    sizes = [int(size) for size in lines["tree_sizes"].split()]
    if len(sizes) != len(parts):
        raise ValueError(f"'tree_sizes' has {len(sizes)} numbers for {len(parts)} trees")
    if not _WORDS.fullmatch(lines["objective"]):
        raise ValueError(f"its objective is '{lines['objective'][:40]}'")
    trees = [f"Tree={i}\n{_lightgbm_tree(i, part, width)}\n\n" for i, part in enumerate(parts)]
    names = " ".join(f"Column_{i}" for i in range(width))
    out = [
        "tree", "version=v4", "num_class=1", "num_tree_per_iteration=1", "label_index=0",
        f"max_feature_idx={width - 1}", f"objective={lines['objective']}",
        *(["average_output"] if "average_output" in lines else []),
        f"feature_names={names}", f"feature_infos={' '.join(['none'] * width)}",
        f"tree_sizes={' '.join(str(len(tree)) for tree in trees)}",
    ]  # fmt: skip
    return "\n".join(out) + "\n\n" + "".join(trees) + "end of trees\n"


def _lines(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name and name in found:
            raise ValueError(f"'{name[:40]}' stands in it twice")
        found[name] = value
    return found


def _lightgbm_tree(number: int, part: str, width: int) -> str:
    index, _, body = part.partition("\n")
    lines = _lines(body)
    where = f"tree {number}"
    if index != str(number):
        raise ValueError(f"{where} is called '{index[:40]}'")
    leaves = int(lines["num_leaves"])
    if not 1 <= leaves <= MOST_LEAVES:
        raise ValueError(f"{where} has {leaves} leaves")
    if lines["num_cat"] != "0" or lines.get("is_linear", "0") != "0":
        raise ValueError(f"{where} has categories or linear leaves, which are not read here")
    inner = leaves - 1
    values = _numbers(lines["leaf_value"].split(), leaves, f"{where}, leaf_value")
    shrinkage = _numbers([lines["shrinkage"]], 1, f"{where}, shrinkage")
    out = [f"num_leaves={leaves}", "num_cat=0"]
    if inner:
        features = _whole(lines["split_feature"].split(), inner, 0, width - 1, where)
        limits = _numbers(lines["threshold"].split(), inner, f"{where}, threshold")
        kinds = _whole(lines["decision_type"].split(), inner, 0, 15, where)
        sides = [
            _whole(lines[name].split(), inner, -leaves, inner - 1, where)
            for name in ("left_child", "right_child")
        ]
        if any(kind & 1 for kind in kinds):
            raise ValueError(f"{where} has a split by category without categories")
        _check_tree(
            [[side[i] if side[i] >= 0 else inner + ~side[i] for side in sides]
             for i in range(inner)] + [[] for _ in range(leaves)],
            where,
        )  # fmt: skip
        columns: dict[str, Sequence[int | float]] = {
            "split_feature": features, "threshold": limits, "decision_type": kinds,
            "left_child": sides[0], "right_child": sides[1],
        }  # fmt: skip
        out += [f"{name}={' '.join(map(repr, column))}" for name, column in columns.items()]
    out += [f"leaf_value={' '.join(map(repr, values))}", "is_linear=0"]
    return "\n".join([*out, f"shrinkage={shrinkage[0]!r}"]) + "\n"


def _xgboost(model: Any, width: int) -> dict[str, Any]:
    learner, version = model["learner"], _whole(model["version"], 3, 0, 10**4, "version")
    booster, sizes = learner["gradient_booster"], learner["learner_model_param"]
    objective, base = learner["objective"], str(sizes["base_score"])
    if booster["name"] != "gbtree":
        raise ValueError(f"its booster is {booster['name']!r:.40}, expected 'gbtree'")
    for name, allowed in (("num_feature", str(width)), ("num_target", "1"), ("num_class", "0")):
        if sizes.get(name, allowed) != allowed:
            raise ValueError(f"'{name}' expected {allowed}, found {sizes[name]!r:.40}")
    if not math.isfinite(float(base.strip("[]"))) or not _WORDS.fullmatch(base.strip("[]")):
        raise ValueError(f"'base_score' is {base[:40]!r}")
    for words in (objective["name"], *_leaf_words(objective)):
        if not _WORDS.fullmatch(words):
            raise ValueError(f"its objective says {words[:40]!r}")
    held = booster["model"]
    trees = [_xgboost_tree(i, tree, width) for i, tree in enumerate(held["trees"])]
    if not trees:
        raise ValueError("it has no trees")
    _whole(held["tree_info"], len(trees), 0, 0, "tree_info")
    rounds = list(held.get("iteration_indptr", range(len(trees) + 1)))
    _whole(rounds, len(rounds), 0, len(trees), "iteration_indptr")
    if rounds != sorted(rounds) or rounds[:1] != [0] or rounds[-1] != len(trees):
        raise ValueError("its rounds do not count its trees")
    parallel = _whole([int(held["gbtree_model_param"]["num_parallel_tree"])], 1, 0, 10**6, "trees")
    inner = {
        "gbtree_model_param": {
            "num_parallel_tree": str(parallel[0]), "num_trees": str(len(trees)),
        },
        "iteration_indptr": rounds, "tree_info": [0] * len(trees), "trees": trees,
    }  # fmt: skip
    if "cats" in held:
        inner["cats"] = {"enc": [], "feature_segments": [], "sorted_idx": []}
    return {
        "learner": {
            "attributes": {}, "feature_names": [], "feature_types": [],
            "gradient_booster": {"model": inner, "name": "gbtree"},
            "learner_model_param": {
                "base_score": base, "boost_from_average": "1", "num_class": "0",
                "num_feature": str(width), "num_target": "1",
            },
            "objective": objective,
        },
        "version": version,
    }  # fmt: skip


def _leaf_words(data: Any) -> Iterator[str]:
    """Every text in objects of objects; anything else is refused."""
    for name, value in data.items():
        yield name
        if isinstance(value, dict):
            yield from _leaf_words(value)
        elif isinstance(value, str):
            yield value
        else:
            raise ValueError(f"its objective holds {value!r:.40}")


def _xgboost_tree(number: int, tree: Any, width: int) -> dict[str, Any]:
    where = f"tree {number}"
    left = list(tree["left_children"])
    nodes = len(left)
    sizes = tree["tree_param"]
    if not 1 <= nodes <= 2 * MOST_LEAVES or sizes["num_nodes"] != str(nodes):
        raise ValueError(f"{where} has {nodes} nodes and says {sizes['num_nodes']!r:.40}")
    if sizes.get("size_leaf_vector", "1") not in ("0", "1") or tree.get("categories"):
        raise ValueError(f"{where} has categories or vectors, which are not read here")
    sides = [
        _whole(tree[name], nodes, -1, nodes - 1, where)
        for name in ("left_children", "right_children")
    ]
    if any((a < 0) != (b < 0) for a, b in zip(*sides, strict=True)):
        raise ValueError(f"{where} has a node with one child")
    children = [[] if a < 0 else [a, b] for a, b in zip(*sides, strict=True)]
    deleted = _whole([int(sizes["num_deleted"])], 1, 0, nodes - 1, where)[0]
    parents = _check_tree(children, where, deleted)
    _whole(tree["split_type"], nodes, 0, 0, where)
    features = _whole(tree["split_indices"], nodes, 0, ROOT, where)
    if any(inner and feature >= width for inner, feature in zip(children, features, strict=True)):
        raise ValueError(f"{where} asks for a number beyond the {width} of a network")
    columns = {
        name: _numbers(tree[name], nodes, f"{where}, {name}")
        for name in ("base_weights", "loss_changes", "split_conditions", "sum_hessian")
    }
    return {
        **columns, "categories": [], "categories_nodes": [], "categories_segments": [],
        "categories_sizes": [], "id": number, "left_children": sides[0],
        "right_children": sides[1], "parents": parents, "split_indices": features,
        "split_type": [0] * nodes,
        "default_left": _whole(tree["default_left"], nodes, 0, 1, where),
        "tree_param": {
            "num_deleted": str(deleted), "num_feature": str(width), "num_nodes": str(nodes),
            "size_leaf_vector": sizes.get("size_leaf_vector", "1"),
        },
    }  # fmt: skip


def _check_tree(children: Sequence[Sequence[int]], where: str, apart: int = 0) -> list[int]:
    """The parent of every node; refuses what is no tree with node 0 at its root.

    Args:
        children: of every node.
        where: what errors call it.
        apart: how many nodes may be out of reach.
    """
    parents = [ROOT] * len(children)
    waiting, reached = [0], 1
    while waiting:
        node = waiting.pop()
        for child in children[node]:
            if child == 0 or parents[child] != ROOT:
                raise ValueError(f"{where} is no tree: node {child} has two parents")
            parents[child] = node
            waiting.append(child)
            reached += 1
    if reached != len(children) - apart:
        raise ValueError(f"{where} is no tree: {len(children) - reached} nodes are out of reach")
    return parents


def _whole(values: Any, count: int, least: int, most: int, where: str) -> list[int]:
    found = [int(v) if isinstance(v, str) or float(v).is_integer() else None for v in values]
    if len(found) != count:
        raise ValueError(f"{where} expected {count} numbers, found {len(found)}")
    for number in found:
        if number is None or not least <= number <= most:
            raise ValueError(f"{where} expected whole numbers from {least} to {most}")
    return found  # type: ignore[return-value]


def _numbers(values: Any, count: int, where: str) -> list[float]:
    found = [float(value) for value in values]
    if len(found) != count:
        raise ValueError(f"{where} expected {count} numbers, found {len(found)}")
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{where} expected finite numbers")
    return found
