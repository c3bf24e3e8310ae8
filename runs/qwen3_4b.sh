#!/usr/bin/env bash
# The verbs of runs/smollm2.sh at real size: Qwen3-4B with the paper's drafter.
#
#   runs/qwen3_4b.sh PROMPTS EVAL_DIR [FOLDER]
#
# PROMPTS is a file or a Hugging Face data set with conversations, EVAL_DIR holds the evaluation
# files; FOLDER (default: build/qwen3-4b) takes what is made on the way. Every step goes on where
# it stopped. ENDPOINTS names OpenAI-compatible servers of Qwen/Qwen3-4B (bases that end in /v1,
# separated by spaces), which is how answers are made at this size; without it they are made here.
set -euo pipefail
cd "$(dirname "$0")/.."

prompts=${1:?prompts: a file or a data set}
evaluation=${2:?the folder of evaluation files}
folder=${3:-build/qwen3-4b}
target=Qwen/Qwen3-4B
make setup
mkdir -p "$folder"

# What it will need: memory, disk and hours at this machine's speed, for 1.3 million answers.
.venv/bin/dspark train --dry-run --target "$target" --recipe qwen3-4b --steps 26400 \
    --num-answers 1300000 --prompt-tokens 200 --answer-tokens 700

# Non-thinking mode and the model card's sampling; recorded, and used again by evaluate.
servers=()
for url in ${ENDPOINTS:-}; do servers+=(--endpoint "$url"); done
.venv/bin/dspark prepare "$prompts" --out "$folder/answers.jsonl" --target "$target" \
    --no-thinking --sampling 0.7:0.8:20 --max-new-tokens 4096 --concurrency 256 "${servers[@]}"

.venv/bin/dspark train "$folder/answers.jsonl" --target "$target" --recipe qwen3-4b \
    --out "$folder/drafter" --steps 26400

for temperature in 0 1; do
    .venv/bin/dspark evaluate "$evaluation"/{gsm8k,humaneval,mt-bench}.jsonl --target "$target" \
        --drafter "$folder/drafter" --temperature "$temperature" --against-plain --batch-size 1 \
        --results "$folder/results.jsonl" --plots "$folder/plots"
done
