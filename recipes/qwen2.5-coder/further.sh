#!/usr/bin/env bash
# Continue the bundled drafter, and pack it for the package (README.md, "One size up").
#
#     TARGET=GGUF DATA=DIR chrt -i 0 recipes/qwen2.5-coder/further.sh [data|states|train|pack ...]
#
# Without arguments, all stages run. Every stage resumes where it was stopped. The responses beside this script are used.
# WIDTH is the inner size of the MLP, if it is to be wider.
set -euo pipefail
RECIPE=$(dirname "$0") OUT=${OUT:-build/further} TOKENS=${TOKENS:-600000 400000} # of tasks, and of code files
INIT=${INIT:-src/blockdraft/pair/qwen2.5-coder-1.5b/drafter/drafter.gguf}
stages=${*:-data states train pack}

data() {
    [ -d "$OUT/responses" ] || python "$RECIPE/shards.py" unpack "$OUT/responses"
    python "$RECIPE/prompts.py" --data "$DATA/train" --measured "$DATA"/prompts/*.jsonl --out "$OUT/prompts.jsonl"
    python "$RECIPE/documents.py" --target "$TARGET" --prompts "$OUT/prompts.jsonl" --responses "$OUT/responses" \
        --out "$OUT/dense" --dense
    python "$RECIPE/code_files.py" --target "$TARGET" --data "$DATA/train" --measured "$DATA"/prompts/*.jsonl \
        --holes 0.6 --seed "${SEED:-23}" --out "$OUT/code/data"
    python "$RECIPE/mix.py" --target "$TARGET" --data "$OUT/dense/data" "$OUT/code/data" --tokens $TOKENS --out "$OUT/data"
}

states() {
    blockdraft hidden-states --data "$OUT/data" --target "$TARGET" --target-layers 7,16,26,28 --out "$OUT/hidden-states"
}

train() { # higher rates gain less (README.md)
    blockdraft train eagle3 "$RECIPE/drafter.toml" --target "$TARGET" --data "$OUT/data" \
        --hidden-states "$OUT/hidden-states" --init "$INIT" --intermediate-size "${WIDTH:-1024}" --alone 0 --batch 2 \
        --epochs 1 --schedule linear --learning-rate 2.5e-4 --muon-learning-rate 0.006 --qat-bits 4 --out "$OUT/drafter"
}

pack() {
    blockdraft export "$OUT/drafter" --target "$TARGET" --format gguf --type q4_0 --no-tokenizer --out "$OUT/bundle"
    ls -l "$OUT/bundle"
}

for stage in $stages; do $stage; done
