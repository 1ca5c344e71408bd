#!/bin/sh
# Trains a shipped predictor again, with a guard against broken networks, and packs it.
#   sh tools/guarded_predictor.sh ZOO DATA WORK SAMPLE NAME DESCRIPTION
# ZOO: many networks of the sample's task, with seeds of their own and none of the sample's runs (for
# mnist-sample: built with --seed 1); DATA: the folder of the task's files; WORK: a new folder. Damaged
# networks are tested on a GPU. MODEL and SEEDS in the environment: invariant_boosting and 1 unless said. Look at what `evaluate` prints before the last line: tau on the sample
# must not be lower than that of the predictor it replaces.
set -e
tnfn="${PYTHON:-python} -m transformer_nfn"
$tnfn zoo damage "$1" --out "$3/damaged" --count 120 --data "$2" --device "${DEVICE:-cuda}"
$tnfn train "$1" --model "${MODEL:-invariant_boosting}" --seeds "${SEEDS:-1}" --damaged "$3/damaged" --out "$3/run"
$tnfn evaluate "$5" "$4"
$tnfn evaluate "$3/run" "$4"
${PYTHON:-python} tools/pack_assets.py predictor "$3/run" "$5" --description "$6"
