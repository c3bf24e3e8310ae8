#!/usr/bin/env bash
# From nothing to the shipped drafter of SmolLM2-135M: prepare, train, evaluate.
#
#   runs/smollm2.sh PROMPTS.jsonl EVAL_DIR [FOLDER]
#
# PROMPTS.jsonl holds rows {"id", "domain", "turns": [text]}; EVAL_DIR holds gsm8k.jsonl,
# humaneval.jsonl and mt-bench.jsonl in the same form. FOLDER (default: build/smollm2) takes what is
# made on the way. Every step goes on where it stopped, so run the script again after a break.
# MINUTES bounds the training (default 180).
set -euo pipefail
cd "$(dirname "$0")/.."

prompts=${1:?the prompts file}
evaluation=${2:?the folder of evaluation files}
folder=${3:-build/smollm2}
minutes=${MINUTES:-180}
make setup
mkdir -p "$folder"

# The drafter has to guess this model, so it learns from this model's answers and no others;
# half of them at the model's usual temperature, half at 1.0, where its whole distribution shows.
.venv/bin/dspark prepare "$prompts" --out "$folder/answers.jsonl" \
    --sampling 0.7:0.95 --sampling 1.0 --max-new-tokens 200

# Hidden states are computed once and kept in FOLDER/drafter-work (about 7 kB a token).
.venv/bin/dspark train "$folder/answers.jsonl" --recipe smollm2 --states cache \
    --out "$folder/drafter" --minutes "$minutes"

# On prompts of other origin, greedy and sampled; --heads-off tells what the sequential head is worth.
for temperature in 0 1; do
    .venv/bin/dspark evaluate "$evaluation"/{gsm8k,humaneval,mt-bench}.jsonl --limit 20 \
        --drafter "$folder/drafter" --temperature "$temperature" --heads-off --json \
        | tee "$folder/evaluation-t$temperature.json"
done

# What a person sees. If it is better than the shipped one, copy it:
#   dspark split "$folder/drafter" && rm drafters/smollm2-135m/model*
#   cp "$folder"/drafter/{config.json,model*} drafters/smollm2-135m/
.venv/bin/dspark demo --drafter "$folder/drafter"
