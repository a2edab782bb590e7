"""What transformers makes of a folder: a config, a model without weights, a tokenizer.

Code that a checkpoint brings is never run, and no question is asked. Whatever goes wrong in
transformers is an error of one line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crisp.checkpoint.deepseek import FAMILY, register
from crisp.checkpoint.meta_device import on_meta_device
from crisp.checkpoint.source import find_model
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.config import read_json

_TOKENIZERS = (
    "tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "tokenizer.tiktoken",
)  # fmt: skip


def load_config(name: str | Path) -> Any:
    """Return the transformers config in the folder ``name``, or of that name on the hub.

    A family that CRISP has and transformers lacks is registered first. Raises CrispError for one of
    which only the checkpoint's own code knows.
    """
    transformers = import_extra("transformers")
    folder = find_model(name).folder
    config = read_json(folder / "config.json")
    if config.get("model_type") == FAMILY:  # else nothing of it is imported
        register()
    _refuse_own_code(folder, config, transformers)
    with quiet(transformers), one_line_errors(str(name), "its config"):
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _refuse_own_code(folder: Path, config: dict[str, Any], transformers: Any) -> None:
    """Raise CrispError for a family that transformers does not have, and the checkpoint brings."""
    family = config.get("model_type")
    if config.get("auto_map") and family not in transformers.CONFIG_MAPPING:
        raise CrispError(
            f"{folder}: its model_type {family!r} is not in transformers "
            f"{transformers.__version__} and comes with code of its own (auto_map), which crisp "
            "never runs"
        )


def model_without_weights(name: str | Path, config: Any, dtype: Any = None) -> Any:
    """Return the model that ``config`` describes, without weights: on torch's meta device.

    name: of the folder or on the hub, for errors. dtype: torch's, of the weights to be; None: that
    of the config. Raises CrispError for a family that transformers has no model of.
    """
    auto = auto_class(config)
    typed = {"trust_remote_code": False} | ({} if dtype is None else {"dtype": dtype})
    what = f"model_type {config.model_type}"
    with one_line_errors(str(name), what):
        try:
            return on_meta_device(lambda: auto.from_config(config, **typed))
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise CrispError(f"{what} is no decoder-only language model of transformers") from error


def auto_class(config: Any) -> Any:
    """Return transformers' class that makes the model of a config.

    It is the language model where there is one; else the whole model, of images and text say, which
    takes text alone as well.
    """
    transformers = import_extra("transformers")
    language = transformers.AutoModelForCausalLM
    whole = transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM
    kinds = (auto for auto in (language, *whole) if type(config) in auto._model_mapping)
    return next(kinds, language)


def load_tokenizer(name: str | Path) -> Any:
    """Return the tokenizer beside a model.

    Raises CrispError if there is none, and for one that needs a package that is not installed or
    code of its own.
    """
    transformers = import_extra("transformers")
    folder = find_model(name).folder
    _check_tokenizer(folder, transformers)
    with quiet(transformers), one_line_errors(str(name), "its tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _check_tokenizer(folder: Path, transformers: Any) -> None:
    """Raise CrispError for a tokenizer that cannot be had, where transformers' reason misleads."""
    if (folder / "tokenizer.json").exists():
        return
    config = folder / "tokenizer_config.json"
    kind = read_json(config) if config.exists() else {}
    own = kind.get("auto_map")
    if own and not hasattr(transformers, str(kind.get("tokenizer_class"))):
        raise CrispError(
            f"{folder}: its tokenizer comes with code of its own (auto_map), which crisp never "
            "runs; a tokenizer.json was expected"
        )
    model = folder / "tokenizer.model"
    if model.exists():
        for module, package in (
            ("sentencepiece", "sentencepiece"),
            ("google.protobuf", "protobuf"),
        ):
            if not _is_installed(module):
                raise CrispError(
                    f"{model}: needs {package}, which is not installed: pip install sentencepiece "
                    "protobuf (they are part of the extra hf); or save the tokenizer as a "
                    "tokenizer.json"
                )
    elif not any((folder / name).exists() for name in _TOKENIZERS):
        raise CrispError(
            f"{folder}: cannot be used (its tokenizer): there is none; tokenizer.json or "
            "tokenizer.model was expected"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


@contextmanager
def one_line_errors(name: str, what: str) -> Iterator[None]:
    """Turn any error of transformers about the model ``name`` into a CrispError of one line."""
    try:
        yield
    except CrispError as error:
        raise CrispError(f"{name}: {error}" if name not in str(error) else str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError: no common base
        raise CrispError(f"{name}: cannot be used ({what}): {short_reason(error)}") from error


def short_reason(error: Exception) -> str:
    """Return an error's message as one line of at most 160 characters.

    >>> short_reason(ValueError("no such\\n   layer"))
    'no such layer'
    """
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if len(reason) <= 160 else reason[:157] + "..."


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence the progress bars and warnings of transformers and the hub.

    What they would warn of is checked here.
    """
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    log.set_verbosity_error()
    log.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            log.enable_progress_bar()
