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
    run train_target.py --stage finish --steps 940 --rate 0.6 --corpus "$build/corpus.jsonl" --out "$build/target"
    touch "$build/target/finished"
fi

# The target learns from its own answers not to repeat itself: own STAGE DONE ANSWERS STEPS RATE [how to write the answers].
own() {
    local stage=$1 done=$2 answers=$3 steps=$4 rate=$5
    shift 5
    [ -f "$build/target/$done" ] && return
    [ $# -eq 0 ] || run write_answers.py --corpus "$build/corpus.jsonl" --target "$build/target" --out "$answers" "$@"
    run train_target.py --stage "$stage" --steps "$steps" --rate "$rate" \
        --corpus "$build/corpus.jsonl" --answers "$answers" --out "$build/target"
    rm "$build/target/${stage}_state.pt"
    touch "$build/target/$done"
}
own settle settled "$build/first_answers.jsonl" 220 0.25 --limit 7000 --sampled-share 0.2
own settle settled_again "$build/second_answers.jsonl" 60 0.25 --limit 24000 --sampled-share 0.3 --seed 2
own unlearn unlearned "$build/second_answers.jsonl" 60 0.2

# What the drafters learn from.
run write_answers.py --corpus "$build/corpus.jsonl" --target "$build/target" --out "$build/answers.jsonl" \
    --limit 24000 --sampled-share 0.3 --seed 3
run pack_answers.py --answers "$build/answers.jsonl" --target "$build/target" --out "$build/data"
# For both drafters, once: the layers that they read, and what the head reads, which is distilled.
"$python" -m blockdraft features --taps 1,2,3,4,5,8 --target "$build/target" --data "$build/data" --out "$build/features"
"$python" -m blockdraft train dflash "$here/drafter.toml" --target "$build/target" --data "$build/data" \
    --features "$build/features" --out "$build/drafter"

# A second kind, which begins with the DFlash drafter. Whether it is the faster one is told by wide twins of the pair.
"$python" -m blockdraft train dspark "$here/dspark.toml" --init "$build/drafter" --target "$build/target" --data "$build/data" \
    --features "$build/features" --out "$build/drafter-dspark"
drafters=("$build/drafter" "$build/drafter-dspark")
PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" "$python" -m benchmarks.sizes.widen 4 "$build/wide" "$build/target" "${drafters[@]}"
[ -f "$build/figures.json" ] || run measure.py --data "$data" --target "$build/target" --drafters "${drafters[@]}" \
    --wide "$build/wide" --corpus "$build/corpus.jsonl" --out "$build/figures.json"
run bundle.py --build "$build"
