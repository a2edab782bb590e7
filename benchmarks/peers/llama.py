"""Run llama.cpp token by token, through its own C interface as llama-cpp-python has it.

What is set here are the parameters that its command line sets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import model


def llama_cpp(file: Path, threads: int, repack: bool) -> tuple[str, Iterator[int]]:
    """Open a GGUF file with llama.cpp, its weights mapped into memory.

    repack: copy quantised weights into memory in the order that the processor prefers.
    Returns the instruction sets it was built for, and an endless iterator over new tokens.
    """
    import llama_cpp as api

    api.llama_log_set(_SILENT, ctypes.c_void_p(0))
    api.llama_backend_init()
    how = api.llama_model_default_params()
    how.load_mode, how.use_extra_bufts = api.LLAMA_LOAD_MODE_MMAP, repack
    loaded = api.llama_model_load_from_file(str(file).encode(), how)
    sizes = api.llama_context_default_params()
    sizes.n_ctx, sizes.n_batch, sizes.n_ubatch = model.CONTEXT, model.PROMPT, model.PROMPT
    sizes.n_threads = sizes.n_threads_batch = threads
    context = api.llama_init_from_model(loaded, sizes)
    return api.llama_print_system_info().decode(), _tokens(api, context)


def quantise(source: Path, target: Path, threads: int) -> None:
    """Write a GGUF file of bf16 weights with all matrices in Q4_0, by llama.cpp's own quantiser."""
    import llama_cpp as api

    api.llama_log_set(_SILENT, ctypes.c_void_p(0))
    api.llama_backend_init()
    how = api.llama_model_quantize_default_params()
    how.ftype, how.nthread, how.pure = api.LLAMA_FTYPE_MOSTLY_Q4_0, threads, True
    if api.llama_model_quantize(str(source).encode(), str(target).encode(), how):
        raise SystemExit(f"{source}: llama.cpp could not quantise it")


def _tokens(api: Any, context: Any) -> Iterator[int]:
    """Feed the prompt, then every new token: the one of the largest logit."""
    import numpy as np

    batch, fed, position = api.llama_batch_init(model.PROMPT, 0, 1), model.prompt(), 0
    while True:
        batch.n_tokens = len(fed)
        for row, token in enumerate(fed):
            batch.token[row], batch.pos[row] = token, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row == len(fed) - 1
        position += len(fed)
        if api.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        logits = api.llama_get_logits_ith(context, len(fed) - 1)
        fed = [int(np.ctypeslib.as_array(logits, (model.VOCABULARY,)).argmax())]
        yield fed[0]


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level: int, text: bytes, data: object) -> None:
    """Drop a message of llama.cpp's."""
