#!/bin/sh
# Make the shipped traces again: capture.sh TEXTS OUT
#
# TEXTS holds code.heldout.txt, docs.heldout.txt and kjv.heldout.txt (what they are: traces/README.md);
# the traces are written to the folder OUT. Needs the command `crisp` with the extra `hf`.
set -eu
if [ $# -ne 2 ]; then
    echo "usage: capture.sh TEXTS OUT" >&2
    exit 2
fi
model=$(dirname "$0")/../tiny-mixtral

for kind in code docs kjv; do
    # 96 + 160 tokens: the length of the windows the model was trained on.
    crisp trace capture "$model" --text "$1/$kind.heldout.txt" \
        --out "$2/tiny-mixtral-$kind.trace.safetensors" \
        --sequences 24 --prompt-tokens 96 --new-tokens 160 --batch 24 --temperature 1 --seed 0
done
