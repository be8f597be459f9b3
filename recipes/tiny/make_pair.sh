#!/usr/bin/env bash
# From text to bundled pair, in the project's environment. Steps whose result is there are skipped; training and answers
# resume where they were interrupted.
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

answers() { run write_answers.py --corpus "$build/corpus.jsonl" --target "$build/target" --out "$build/$1" "${@:2}"; }

# The target learns from its own answers not to loop, and to be more certain.
# own STAGE DONE STEPS RATE ANSWERS...
own() {
    local answers=("${@:5}")
    [ -f "$build/target/$2" ] && return
    run train_target.py --stage "$1" --steps "$3" --rate "$4" --corpus "$build/corpus.jsonl" \
        --answers "${answers[@]/#/$build/}" --out "$build/target"
    rm "$build/target/${1}_state.pt"
    touch "$build/target/$2"
}
if [ ! -f "$build/target/settled" ]; then answers first_answers.jsonl --limit 7000 --sampled-share 0.2; fi
own settle settled 220 0.25 first_answers.jsonl
if [ ! -f "$build/target/settled_again" ]; then answers second_answers.jsonl --limit 24000 --sampled-share 0.3 --seed 2; fi
own settle settled_again 60 0.25 second_answers.jsonl
own unlearn unlearned 60 0.2 second_answers.jsonl
if [ ! -f "$build/target/sharpened" ]; then
    answers third_answers.jsonl --limit 24000 --sampled-share 0.3 --seed 3
    answers third_hard_answers.jsonl --hard --sampled-share 0.4 --temperature 1 --seed 4
fi
own sharpen sharpened 580 0.25 third_answers.jsonl third_hard_answers.jsonl

# Training data of the drafters: mostly answers that are hard to guess. Features are computed once for all drafters: the
# layers that they read, and the input of the head for distillation.
answers hard_answers.jsonl --hard --sampled-share 0.4 --temperature 1 --limit 18000 --seed 6
answers answers.jsonl --sampled-share 0.3 --temperature 1 --limit 7000 --seed 5
run pack_answers.py --answers "$build/hard_answers.jsonl" "$build/answers.jsonl" --target "$build/target" --out "$build/data"
learning=(--target "$build/target" --data "$build/data")
"$python" -m blockdraft hidden-states --target-layers 1,2,3,4,5,8 "${learning[@]}" --out "$build/features"
learning+=(--hidden-states "$build/features")
"$python" -m blockdraft train dflash "$here/drafter.toml" "${learning[@]}" --out "$build/drafter"

# Other kinds, which begin with the DFlash drafter, to compare with it in the widened pair.
drafters=("$build/drafter")
for kind in dspark dflash2; do
    "$python" -m blockdraft train $kind "$here/$kind.toml" --init "$build/drafter" "${learning[@]}" --out "$build/drafter-$kind"
    drafters+=("$build/drafter-$kind")
done
PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" "$python" -m benchmarks.sizes.widen 4 "$build/wide" "$build/target" "${drafters[@]}"
[ -f "$build/figures.json" ] || run measure.py --data "$data" --target "$build/target" --drafters "${drafters[@]}" \
    --wide "$build/wide" --corpus "$build/corpus.jsonl" --out "$build/figures.json"
run bundle.py --build "$build"
