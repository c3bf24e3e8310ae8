#!/usr/bin/env bash
# Answers and a drafter within a stated number of minutes, on whatever GPU is there (or none).
#
#   runs/smollm2_gpu.sh PROMPTS.jsonl MINUTES [FOLDER]
#
# FOLDER (default: build/smollm2-gpu) takes answers and hidden states; FOLDER/drafter is the result,
# in files of at most 16 MB. Run again after a break, every step goes on where it stopped.
# From the environment: TARGET (default smollm2-135m), RECIPE (default smollm2; empty for the
# general one), PREPARE and TRAIN (further options of these commands), DSPARK (the program).
set -euo pipefail
cd "$(dirname "$0")/.."

prompts=${1:?the prompts file}
minutes=${2:?the minutes that it may take}
folder=${3:-build/smollm2-gpu}
target=${TARGET:-smollm2-135m}
recipe=${RECIPE-smollm2}
if [ -z "${DSPARK:-}" ]; then
    make setup
    DSPARK=.venv/bin/dspark
fi
mkdir -p "$folder"

# Of the time, two fifths go to the target's answers and as much to training; loading, hidden
# states and the last answers in flight need the rest.
share=$(awk -v m="$minutes" 'BEGIN { printf "%.3f", 0.4 * m }')

$DSPARK prepare "$prompts" --out "$folder/answers.jsonl" --target "$target" --minutes "$share" \
    --concurrency 256 --sampling 0.7:0.95 --sampling 1.0 --max-new-tokens 200 ${PREPARE:-}

$DSPARK train "$folder/answers.jsonl" --out "$folder/drafter" --target "$target" \
    ${recipe:+--recipe "$recipe"} --minutes "$share" ${TRAIN:-}

$DSPARK split "$folder/drafter" --megabytes 16
