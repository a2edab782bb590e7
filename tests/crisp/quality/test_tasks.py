from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crisp.adapter import attach
from crisp.checkpoint.loading import LoadedModel, load_model, to_float32
from crisp.errors import CrispError
from crisp.policy import named
from crisp.quality import EvaluationTasks
from crisp.quality import tasks as tasks_module

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = [
    ("import numpy as", [" np", " the LORD"], 0),
    ("And God said unto", [" self.assertEqual", " Moses"], 1),
    ("def __init__(", ["self", "heaven"], 0),
    ("class Error(Exception", ["):", " begat"], 1),  # the wrong one is called right
]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task of four questions, defined by two files."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "questions.jsonl"
    lines = [json.dumps({"q": q, "choices": c, "answer": a}) for q, c, a in QUESTIONS]
    data.write_text("\n".join(lines), encoding="utf-8")
    path = tmp_path / "four.yaml"
    path.write_text(
        f"""
task: four
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{q}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return to_float32(load_model(str(ROOT / "traces" / "tiny-mixtral")))


def likelier(tiny: LoadedModel, question: str, choices: list[str]) -> int:
    """The choice that the model gives the higher likelihood, from its logits alone."""
    scores = []
    for choice in choices:
        head = tiny.tokenizer(question)["input_ids"]
        ids = tiny.tokenizer(question + choice)["input_ids"]
        logits = tiny.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        scores.append(sum(float(logits[i - 1, ids[i]]) for i in range(len(head), len(ids))))
    return scores.index(max(scores))


def test_the_attached_model_answers(
    tiny: LoadedModel, task: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = EvaluationTasks.load([str(task)])

    def right() -> float:
        with torch.inference_mode():
            answers = [likelier(tiny, q, c) == a for q, c, a in QUESTIONS]
        return sum(answers) / len(answers)

    (plain,) = tasks.run(tiny, batch=3)
    assert (plain.task, plain.metric, plain.questions, plain.shots) == ("four", "acc", 4, 0)
    assert plain.value == right() > 0
    with attach(tiny.model, named("up", width="uniform(.1)")) as attached:
        (narrow,) = tasks.run(tiny, batch=3)
        assert attached.tally.rows > 0  # it was this model that answered
        assert narrow.value == right()
    assert tasks.run(tiny, batch=1) == [plain]
    assert json.dumps(plain.to_dict())
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")  # where nobody looks on


def test_a_data_set_that_is_not_there(task: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").unlink()
    with pytest.raises(CrispError, match=r"--tasks .*four.yaml: cannot be run: .*questions.jsonl"):
        EvaluationTasks.load([str(task)])


def test_a_task_that_is_not_there(task: Path, tmp_path: Path) -> None:
    with pytest.raises(CrispError, match=r"--tasks nothing.yaml: no such file"):
        EvaluationTasks.load(["nothing.yaml"])
    task.write_text("nonsense: 1", encoding="utf-8")
    with pytest.raises(CrispError, match=r"four.yaml: cannot be run: Unknown config shape"):
        EvaluationTasks.load([str(task)])


def test_a_name_that_lm_eval_does_not_know(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        all_tasks = ("arc_challenge", "hellaswag")

        def __init__(self, **_: Any) -> None:
            pass

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Known)
    for name, hint in (("hellswag", "did you mean 'hellaswag'?"), ("zzz", "a YAML file was")):
        with pytest.raises(CrispError) as error:
            EvaluationTasks.load([name])
        assert f"--tasks {name}: lm-eval knows no such task; " in str(error.value)
        assert hint in str(error.value)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(tasks_module.importlib, "import_module", missing)
    with pytest.raises(CrispError, match=r"lm-eval is needed .*pip install '.\[eval\]'"):
        EvaluationTasks.load(["arc_challenge"])


def test_scores_of_groups_follow_those_of_tasks() -> None:
    results = {
        "results": {
            "one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1},
        },
        "groups": {"both": {"alias": "both", "acc,none": 0.75, "acc_stderr,none": "N/A"}},
        "n-samples": {"one": {"original": 9, "effective": 8}},
        "n-shot": {"one": 5},
    }
    rows = [tuple(score.to_dict().values()) for score in tasks_module._scores(results)]
    assert rows == [
        ("one", "acc", 0.5, 0.1, 8, 5),
        ("one", "em,strict", 1.0, None, 8, 5),
        ("both", "acc", 0.75, None, None, None),
    ]
