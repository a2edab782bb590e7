#!/bin/sh
# Capture the shipped traces again: capture.sh TEXTS OUT
#
# TEXTS is a folder with code.heldout.txt, docs.heldout.txt and kjv.heldout.txt (see traces/README.md);
# the traces are written to the folder OUT. Needs the command `crisp` with the extra `hf`.
set -eu
if [ $# -ne 2 ]; then
    echo "usage: capture.sh TEXTS OUT" >&2
    exit 2
fi
models=$(dirname "$0")/..

capture() { # MODEL KIND NAME OPTION...
    model=$1 kind=$2 name=$3
    shift 3
    crisp trace capture "$models/$model" --text "$texts/$kind.heldout.txt" \
        --out "$out/$model-$name.trace.safetensors" --temperature 1 --seed 0 "$@"
}

texts=$1 out=$2
for model in tiny-mixtral tiny-deepseek; do
    for kind in code docs kjv; do
        # 96 + 160 tokens: the length of most windows the models were trained on.
        capture $model $kind $kind --sequences 24 --prompt-tokens 96 --new-tokens 160 --batch 24
    done
done
for length in 128 512 1920; do
    capture tiny-deepseek code prompt-$length \
        --sequences 4 --prompt-tokens $length --new-tokens 128 --batch 4
done
