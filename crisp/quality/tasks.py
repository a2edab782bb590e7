"""Downstream tasks of lm-eval, answered by a model with or without a policy attached.

Tasks are lm-eval's own definitions, or a user's in the same format.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crisp.checkpoint.loading import LoadedModel, short_reason
from crisp.errors import CrispError

_SEED = 1234  # draws the examples that are shown; lm-eval's own default


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task, or of a group of tasks (which has no ``questions``)."""

    task: str
    metric: str
    value: float
    stderr: float | None
    questions: int | None
    shots: int | None  # examples shown before each question

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that is safe for JSON."""
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class EvaluationTasks:
    """Tasks with their data sets, ready for models to answer."""

    loaded: dict[str, dict[str, Any]]  # tasks, groups and group_map, as lm-eval loads them

    @classmethod
    def load(cls, names: Sequence[str]) -> EvaluationTasks:
        """Load tasks and groups of tasks by lm-eval's name, or by the path of a YAML file.

        Raises CrispError, naming the task, for one that is not known, cannot be read, or whose data
        set is not to be had.
        """
        _lm_eval("lm_eval")
        files = [Path(name).suffix in (".yaml", ".yml") for name in names]
        for name, is_file in zip(names, files, strict=True):
            if is_file and not Path(name).is_file():
                raise CrispError(f"--tasks {name}: no such file")
        loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
        with _quiet():
            # Reading thousands of definitions takes half a minute: not where all are files.
            manager = _lm_eval("lm_eval.tasks").TaskManager(include_defaults=not all(files))
            for name, is_file in zip(names, files, strict=True):
                if not is_file and name not in manager.all_tasks:
                    raise _unknown_task(name, manager.all_tasks)
                with _one_line_errors(name):
                    for kind, definitions in manager.load([name]).items():
                        loaded[kind].update(definitions)
        return cls(loaded)

    def run(self, loaded: LoadedModel, batch: int) -> list[TaskScore]:
        """Score ``loaded``'s model as it is now; ``batch`` questions side by side."""
        model = _lm_eval("lm_eval.models.huggingface").HFLM
        evaluate = _lm_eval("lm_eval.evaluator").evaluate
        for task in self.loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(_SEED)
        with _quiet(), _one_line_errors(",".join(self.loaded["tasks"])):
            lm = model(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch)
            return _scores(evaluate(lm, self.loaded, log_samples=False))


def _scores(results: Mapping[str, Any]) -> list[TaskScore]:
    """Return lm-eval's ``metric,filter`` and ``metric_stderr,filter`` of tasks, then of groups."""
    scores = []
    for task, figures in {**results["results"], **results.get("groups", {})}.items():
        for key, value in figures.items():
            metric, comma, which = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = figures.get(f"{metric}_stderr,{which}")
            scores.append(
                TaskScore(
                    task=task,
                    metric=metric if which == "none" else key,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, (int, float)) else None,
                    questions=results["n-samples"].get(task, {}).get("effective"),
                    shots=results["n-shot"].get(task),
                )
            )
    return scores


def _unknown_task(name: str, known: Sequence[str]) -> CrispError:
    """Return the error for an unknown task, with the closest known name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else "a name or a YAML file was expected"
    return CrispError(f"--tasks {name}: lm-eval knows no such task; {hint}")


def _lm_eval(module: str) -> Any:
    """Import a module of the extra ``eval``; CrispError names the extra if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CrispError(
            f"--tasks: lm-eval is needed and not installed: pip install '.[eval]' in the checkout "
            f"({error})"
        ) from error


@contextlib.contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turn any error of lm-eval and its data sets into a CrispError that names the task."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # of lm-eval, datasets, jinja, yaml: no common base
        raise CrispError(f"--tasks {name}: cannot be run: {short_reason(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings, and progress bars where standard error is not a terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    stderr = contextlib.nullcontext() if sys.stderr.isatty() else _hidden_stderr()
    try:
        with stderr:
            yield
    finally:
        logging.disable(disabled)


def _hidden_stderr() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stderr(io.StringIO())
