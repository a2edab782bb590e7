"""Run llama.cpp, from the prebuilt wheel xllamacpp, in this process and without a network.

What is set here are the options of its command line, such as `--no-repack`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import model


def llama_cpp(
    file: Path, threads: int, new_tokens: int, repack: bool, on_token: Callable[[], bool]
) -> tuple[list[int], str]:
    """Continue the prompt greedily with the weights of a GGUF file, mapped into memory.

    repack: copy quantised weights into memory in the order that the processor prefers.
    on_token: called after each new token; True: that was enough.
    Returns the new tokens, and what instruction sets this llama.cpp was built for.
    """
    import xllamacpp

    how = xllamacpp.CommonParams()
    how.model.path = str(file)
    how.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    how.no_extra_bufts = not repack
    how.n_ctx, how.n_batch, how.n_ubatch, how.n_parallel = (
        model.CONTEXT,
        model.PROMPT,
        model.PROMPT,
        1,
    )
    how.cpuparams.n_threads = how.cpuparams_batch.n_threads = threads
    how.warmup, how.fit_params = False, False
    how.cache_ram_mib = how.n_ctx_checkpoints = (
        0  # nothing is kept of prompts before: there are none
    )
    how.verbosity = -1
    server = xllamacpp.Server(how)
    said, refused = list[str](), list[Any]()

    def take(chunk: Any) -> bool:
        answer = json.loads(chunk) if isinstance(chunk, str | bytes) else chunk
        if "choices" not in answer:
            refused.append(answer)
            return True
        choice = answer["choices"][0]
        if choice["finish_reason"] is not None:  # the last says only that it is the last
            return False
        said.append(choice["text"])
        return on_token()

    request = {
        "prompt": model.prompt(), "n_predict": new_tokens, "temperature": 0, "samplers": [],
        "stream": True, "ignore_eos": True, "cache_prompt": False,
    }  # fmt: skip
    server.handle_completions(request, take)
    if refused:
        raise SystemExit(f"llama.cpp: {refused[0]}")
    ids = [int(number) for number in re.findall(r"w(\d+)", "".join(said))]
    return ids, str(xllamacpp.get_system_info())
