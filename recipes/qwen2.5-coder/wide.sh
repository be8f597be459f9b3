#!/usr/bin/env bash
# Train the drafter of wide.toml on dense tasks, code files and chats, and pack it for the package (README.md).
#
#     TARGET=GGUF DATA=DIR chrt -i 0 recipes/qwen2.5-coder/wide.sh [chats|mix|train|end|pack ...]
#
# Without arguments, all stages run. Every stage resumes where it was stopped. Before it, build/wide/dense and
# build/wide/code need `data` and `hidden-states`, made as README.md says, of the target layers 7,16,26,28.
set -euo pipefail
RECIPE=$(dirname "$0") OUT=${OUT:-build/wide} LAYERS=7,16,26,28
CHAT_TASKS=${CHAT_TASKS:-2500} # a third of the tokens, at some 250 a task
stages=${*:-chats mix train end pack}

chats() { # the target's own responses, with the hidden states that it has computed
    python "$RECIPE/prompts.py" --data "$DATA/train" --measured "$DATA"/prompts/*.jsonl --out "$OUT/prompts.jsonl"
    grep -m "$CHAT_TASKS" -E '"kind": "(chat|instruction|question|maths)"' "$OUT/prompts.jsonl" >"$OUT/chats.jsonl"
    python "$RECIPE/responses.py" --target "$TARGET" --measured "$DATA"/prompts/*.jsonl --prompts "$OUT/chats.jsonl" \
        --out "$OUT/chat-responses" --record "$OUT/chat-parts" --target-layers $LAYERS
}

mix() { # one data folder, whose documents the trainer shuffles
    python "$RECIPE/recording.py" --target "$TARGET" --recorded "$OUT/chat-parts" --also "$OUT/dense" "$OUT/code" \
        --target-layers $LAYERS --out "$OUT/mixed"
}

data() { echo --target "$TARGET" --data "$OUT/mixed/data" --hidden-states "$OUT/mixed/hidden-states"; }

train() {
    blockdraft train eagle3 "$RECIPE/wide.toml" $(data) --out "$OUT/drafter-1"
}

end() { # in 4 bits, with the objective of acceptance, at rates that fall to nothing
    blockdraft train eagle3 "$RECIPE/wide.toml" $(data) --init "$OUT/drafter-1" --alone 0 --batch 2 --epochs 1 \
        --schedule linear --learning-rate 5e-4 --muon-learning-rate 0.012 --qat-bits 4 --seed 1 \
        --objective decay=0.1,total_variation=0.9 --out "$OUT/drafter"
}

pack() {
    blockdraft export "$OUT/drafter" --target "$TARGET" --format gguf --type q4_0 --no-tokenizer --out "$OUT/bundle"
    ls -l "$OUT/bundle"
}

for stage in $stages; do $stage; done
