#!/usr/bin/env bash
# Builds a zoo and fills tables from it within a time limit, on a machine that keeps nothing:
#
#   LIMIT=570 OUT=results bash benchmarks/block.sh "build --task ag_news --runs 4096 --seeds one" \
#       "table2 --seeds 3 --splits 3 --jobs 9 --models transformer_nfn,statnn,mlp" "table3 --jobs 2"
#
# Steps are taken in order. A table is filled in the background, from the zoo as it is then: a later
# build may add runs to it. On a GPU the multi-process service of CUDA shares it among all. In the
# last CELL seconds no cell is begun, and what is not finished after LIMIT seconds is left out. The
# zoo is called ZOO. OUT gets, for each table, the records and predictions of its cells and what was
# ready of the tables, in pieces of 15 MB (cat them together).
set -u
: "${LIMIT:?seconds in all}" "${OUT:?folder of the results}"
DEVICE=${DEVICE:-cuda}
CELL=${CELL:-90}
TNFN=${TNFN:-python3 -m transformer_nfn}
start=$(date +%s)
name=${ZOO:-zoo}
work=$(mktemp -d)
zoo=$work/build/$name
left() { echo $((LIMIT - $1 - $(date +%s) + start)); }
say() { echo "$1 after $(($(date +%s) - start)) s"; }

if [ "$DEVICE" = cuda ] && command -v nvidia-cuda-mps-control > /dev/null; then
  nvidia-cuda-mps-control -d
  if ! timeout 40 python3 -c "import torch; torch.ones(1).cuda()"; then
    echo quit | nvidia-cuda-mps-control
    say "the multi-process service does not work here"
  fi
fi
number=0
for step in "$@"; do
  number=$((number + 1))
  what=${step%% *} log=$work/$number-${step%% *}.log
  if [ "$what" = build ]; then
    $TNFN zoo build ${step#* } --device "$DEVICE" --out "$work/build/$name" --json > "$log" || exit
    zoo=$work/$number/$name  # tables read a copy: the next build changes the zoo
    mkdir "$work/$number" && cp -r "$work/build/$name" "$work/$number"
    say built
    continue
  fi
  timeout "$(left 30)" $TNFN reproduce "$what" "$zoo" ${step#* } --device "$DEVICE" \
    --out "$work/out/$number-$what" \
    --minutes "$(awk "BEGIN { t = $(left "$CELL"); print (t > 0 ? t : 0) / 60 }")" > "$log" 2>&1 &
  running="${running:-} $!"
done
wait ${running:-}
say trained
mkdir -p "$OUT" "$work/out"
cp "$work"/*.log "$work/out"
cd "$work" && find out -name '*.safetensors' -delete
tar cz --exclude=state out | split -b 15000000 - results.tgz.
cd - > /dev/null && mv "$work"/results.tgz.* "$OUT"
say packed
rm -r "$work"
