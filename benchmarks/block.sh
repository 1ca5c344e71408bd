#!/usr/bin/env bash
# Builds a zoo and fills tables from it within a time limit, on a machine that keeps nothing:
#
#   LIMIT=570 OUT=results bash benchmarks/block.sh "--task ag_news --runs 4096 --seeds one" \
#       "table2 --seeds 3 --splits 3 --jobs 9 --models transformer_nfn,statnn,mlp" "table3 --jobs 2"
#
# The tables are filled side by side; on a GPU the multi-process service of CUDA shares it among
# the cells. In the last CELL seconds none is begun, and what is not finished after LIMIT seconds is
# left out. The zoo is called ZOO. OUT gets records and predictions of the cells and the tables that
# were ready, in pieces of 15 MB (cat them together).
set -u
: "${LIMIT:?seconds in all}" "${OUT:?folder of the results}"
DEVICE=${DEVICE:-cuda}
CELL=${CELL:-90}
TNFN=${TNFN:-python3 -m transformer_nfn}
start=$(date +%s)
name=${ZOO:-zoo}
work=$(mktemp -d)
left() { echo $((LIMIT - $1 - $(date +%s) + start)); }
say() { echo "$1 after $(($(date +%s) - start)) s"; }

options=$1
shift
$TNFN zoo build $options --device "$DEVICE" --out "$work/$name" --json > "$work/build.json" || exit
say built
if [ "$DEVICE" = cuda ] && command -v nvidia-cuda-mps-control > /dev/null; then
  nvidia-cuda-mps-control -d
  if ! timeout 40 python3 -c "import torch; torch.ones(1).cuda()"; then
    echo quit | nvidia-cuda-mps-control
    say "the multi-process service does not work here"
  fi
fi
for table in "$@"; do
  timeout "$(left 30)" $TNFN reproduce ${table%% *} "$work/$name" ${table#* } --device "$DEVICE" \
    --out "$work/out" --minutes "$(awk "BEGIN { t = $(left "$CELL"); print (t > 0 ? t : 0) / 60 }")" > "$work/${table%% *}.log" 2>&1 &
  running="${running:-} $!"
done
wait $running
say trained
mkdir -p "$OUT"
cp "$work"/*.log "$work/build.json" "$work/out"
cd "$work" && find out -name '*.safetensors' -delete
tar cz --exclude=state out | split -b 15000000 - results.tgz.
cd - > /dev/null && mv "$work"/results.tgz.* "$OUT"
say packed
rm -r "$work"
