#!/usr/bin/env bash
# The kinds of drafters and the trainer's switches at one budget: the same answers, optimiser steps,
# order and seed for each, then accepted length on held-out prompts, measured the same way.
#
#   runs/smollm2_baselines.sh ANSWERS.jsonl EVAL_DIR STEPS [FOLDER]
#
# FOLDER (default: build/smollm2-baselines) takes a drafter for each row, the hidden states that
# they share, FOLDER/table.tsv (teacher-forced tau of each row at temperature 1) and
# FOLDER/results.jsonl (decoded tau). Run it again after a break: rows that are done stay, one that
# was being trained goes on.
# From the environment: ROWS (names of rows, default all), TASKS (files in EVAL_DIR), LIMIT (prompts
# of each, default 20), TEMPERATURES, TRAIN (further options of `dspark train`), EVALUATE (of
# `dspark evaluate`; "no" leaves it out), RECIPE (default smollm2; empty for the general one),
# TARGET, DSPARK (the program).
set -euo pipefail
cd "$(dirname "$0")/.."

answers=${1:?the answers file}
evaluation=${2:?the folder of evaluation files}
steps=${3:?optimiser steps of each row}
folder=${4:-build/smollm2-baselines}
recipe=${RECIPE-smollm2}
target=${TARGET:-smollm2-135m}
if [ -z "${DSPARK:-}" ]; then
    make setup
    DSPARK=.venv/bin/dspark
fi
mkdir -p "$folder/states"
states=$(realpath "$folder/states")

# What a row changes of the paper's recipe; the rest (shape, data, optimiser) is RECIPE's.
switches() {
    case "$1" in
        states* | dflash* | eagle3 | mtp) ;;
        pairs*) echo "--no-state-start" ;;
        *) echo "--no-pair-start --no-state-start" ;;
    esac
    case "$1" in
        dspark) ;;
        dflash) echo "--kind dflash" ;;
        dflash-5) echo "--kind dflash --num-layers 5" ;;
        eagle3) echo "--kind eagle3" ;;
        mtp) echo "--kind mtp" ;;
        gated) echo "--markov-head gated" ;;
        rnn) echo "--markov-head rnn --base-weight 1.0" ;;
        pairs) echo "--pair-start" ;;
        states) echo "--pair-start --state-start" ;;
        pairs-kl) echo "--pair-start --loss-ce 0 --loss-l1 0 --loss-kl 1" ;;
        pairs-lk) echo "--pair-start --loss-ce 0 --loss-l1 0 --loss-hybrid 1" ;;
        pairs-gated) echo "--pair-start --markov-head gated" ;;
        rnn-plain) echo "--markov-head rnn" ;;
        tap-mixing) echo "--tap-mixing" ;;
        on-policy) echo "--on-policy 0.25" ;;
        dpace) echo "--position-weights dpace" ;;
        dpace-acceptance) echo "--position-weights dpace-acceptance" ;;
        decay-2) echo "--loss-decay 2" ;;
        lk-alpha) echo "--loss-ce 0 --loss-l1 0 --loss-nla 1" ;;
        lk-lambda) echo "--loss-ce 0 --loss-l1 0 --loss-hybrid 1" ;;
        kl) echo "--loss-ce 0 --loss-l1 0 --loss-kl 1" ;;
        dpace-lk) echo "--loss-ce 0 --loss-l1 0 --loss-nla 1 --position-weights dpace-acceptance" ;;
        chat-2) echo "--repeats chat=2" ;;
        layers-1) echo "--num-layers 1" ;;
        layers-3) echo "--num-layers 3" ;;
        block-4) echo "--block-size 4" ;;
        block-7) echo "--block-size 7" ;;
        rank-32) echo "--markov-rank 32" ;;
        rank-128) echo "--markov-rank 128" ;;
        taps-2) echo "--tap-layers 14,27" ;;
        taps-3) echo "--tap-layers 1,14,27" ;;
        vocab-8k) echo "--draft-vocab-size 8192" ;;
        vocab-16k) echo "--draft-vocab-size 16384" ;;
        *) echo "No row is called $1." >&2; return 1 ;;
    esac
}
all="dspark
    dflash eagle3 mtp dflash-5 dpace dpace-acceptance decay-2 lk-alpha lk-lambda kl dpace-lk
    states pairs pairs-kl pairs-lk pairs-gated rnn rnn-plain gated tap-mixing on-policy chat-2
    layers-1 layers-3 block-4 block-7 rank-32 rank-128 taps-2 taps-3 vocab-8k vocab-16k"

drafters=()
for row in ${ROWS:-$all}; do
    options=$(switches "$row")
    work="$folder/$row-work"
    mkdir -p "$work"
    if [ ! -e "$folder/$row.json" ]; then
        # A cache holds the taps that it was made for: rows with others have their own.
        case "$row" in
            mtp | taps-*) ;;
            *) ln -sfn "$states" "$work/states" ;;
        esac
        # shellcheck disable=SC2086
        $DSPARK train "$answers" --target "$target" ${recipe:+--recipe "$recipe"} $options \
            --states cache --steps "$steps" --out "$folder/$row" --work "$work" --json \
            ${TRAIN:-} | tail -n 1 >"$folder/$row.json.part"
        mv "$folder/$row.json.part" "$folder/$row.json"
    fi
    drafters+=(--drafter "$folder/$row")
done

# Teacher-forced, on the same held-out answers.
for file in "$folder"/*.json; do
    sed -E "s/.*\"held_out_tau\": *([0-9.]+).*\"best_step\": *([0-9]+).*/\1\t\2/; s/^/$(basename "$file" .json)\t/" "$file"
done | sort -t "$(printf '\t')" -k 2 -r | tee "$folder/table.tsv"

[ "${EVALUATE:-}" = no ] && exit 0
files=()
for task in ${TASKS:-gsm8k humaneval mbpp math500 mt-bench arena-hard-v2}; do
    files+=("$evaluation/$task.jsonl")
done
temperatures=()
for temperature in ${TEMPERATURES:-0 1}; do temperatures+=(--temperature "$temperature"); done
# shellcheck disable=SC2086
$DSPARK evaluate "${files[@]}" --target "$target" "${drafters[@]}" "${temperatures[@]}" \
    --limit "${LIMIT:-20}" --results "$folder/results.jsonl" ${EVALUATE:-}
