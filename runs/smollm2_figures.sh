#!/usr/bin/env bash
# The figures in the card of the shipped drafter, made again: held-out tau by domain, greedy and at
# temperature 1, and what the sequential head is worth.
#
#   runs/smollm2_figures.sh EVAL_DIR [DRAFTER]
#
# EVAL_DIR holds gsm8k.jsonl (math), humaneval.jsonl (code) and mt-bench.jsonl (chat), rows
# {"turns": [text]}; DRAFTER is the shipped one unless given.
set -euo pipefail
evaluation=$(realpath "${1:?the folder of evaluation files}")
drafter=$(realpath "${2:-$(dirname "$0")/../drafters/smollm2-135m}")
cd "$(dirname "$0")/.."
make setup >/dev/null
for temperature in 0 1; do
    .venv/bin/dspark evaluate "$evaluation"/{gsm8k,humaneval,mt-bench}.jsonl --limit 20 \
        --drafter "$drafter" --temperature "$temperature" --heads-off --json
done
