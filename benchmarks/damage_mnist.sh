#!/bin/sh
# Broken MNIST networks on a GPU: 480 damaged relatives to learn from, 1,000 of kinds never seen.
#   sh benchmarks/damage_mnist.sh ZOO DATA WORK [MODELS]
# ZOO: a zoo of MNIST networks with a seed each; DATA: the folder of MNIST's four files; WORK: a new
# folder. Prints how long each part took, the tables, and a line of JSON per run. MNIST is
# new to the rules of the guard, which were chosen on digits networks.
set -e
python=${PYTHON:-python}
$python benchmarks/damage.py "$1" --work "$3/held-1" --data "$2" --device cuda \
    --models "${4:-whole_network}" --seeds 3 --learn 120 --count 200
