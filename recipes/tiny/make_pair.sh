#!/usr/bin/env bash
# From text to bundled pair, in the project's environment. Each step is skipped once its result is there; training steps and answers
# go on where they were interrupted.
#
#   recipes/tiny/make_pair.sh DATA [BUILD]
#
# DATA holds train/ and prompts/ (README.md says which files); BUILD is build/tiny unless given.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${1:?usage: make_pair.sh DATA [BUILD]}"
build="${2:-build/tiny}"
python="${PYTHON:-$here/../../.venv/bin/python}"

run() { echo "== $*"; "$python" -u "$here/$1" "${@:2}"; }

[ -f "$build/corpus.jsonl" ] || run corpus.py --data "$data" --out "$build/corpus.jsonl"
[ -f "$build/target/tokenizer.json" ] || run train_tokenizer.py --corpus "$build/corpus.jsonl" --out "$build/target"
[ -f "$build/target/model.safetensors" ] || run train_target.py --corpus "$build/corpus.jsonl" --out "$build/target"
if [ ! -f "$build/target/finished" ]; then
    run train_target.py --stage finish --steps 240 --tokens-per-step 4096 --rate 0.4 \
        --corpus "$build/corpus.jsonl" --out "$build/target"
    touch "$build/target/finished"
fi
[ -f "$build/target/settled" ] || run write_answers.py --corpus "$build/corpus.jsonl" --target "$build/target" --out "$build/answers.jsonl"
if [ ! -f "$build/target/settled" ]; then
    run train_target.py --stage settle --steps 60 --rate 0.15 \
        --corpus "$build/corpus.jsonl" --answers "$build/answers.jsonl" --out "$build/target"
    touch "$build/target/settled"
fi
run train_drafter.py --answers "$build/answers.jsonl" --target "$build/target" --out "$build/drafter"
run measure.py --data "$data" --target "$build/target" --drafter "$build/drafter" --out "$build/figures.json"
run bundle.py --build "$build"
