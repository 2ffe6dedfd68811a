"""A trained checkpoint evaluated again, exported, and on a task through lm-eval."""

import dataclasses
import importlib.util
import json
import sys

import pytest
import torch

from titan_lowprec.experiments.optional import need
from titan_lowprec.titan.checkpoints import load_model, open_run
from titan_lowprec.titan.evaluate import evaluate
from titan_lowprec.titan.export import export_hugging_face
from titan_lowprec.titan.tasks import NEEDED, TaskPlan, evaluate_tasks, scores_of

CPU = torch.device("cpu")
TASK = """
task: tiny_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
QUESTIONS = [
    ("The function returns the", ["value", "zqx"], 0),
    ("This method raises a", ["xqx", "TypeError"], 1),
    ("See also the", ["module", "jqj"], 0),
]


@pytest.fixture(scope="module")
def run(train):
    """Three steps of MXFP8 with a validation round and a checkpoint at the end."""
    run = train(
        "evaluated",
        "--training.steps=3",
        "--validation.enable",
        "--validation.steps=2",
        "--validation.local_batch_size=2",
    )
    assert run.status == 0, run.output
    return run


@pytest.fixture(scope="module")
def saved(run):
    return open_run(run.folder)


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export_hugging_face(saved, folder)
    return folder


@pytest.mark.slow
def test_native_attention_gives_the_recorded_loss_in_every_bit(run, saved):
    native, exact = evaluate(saved, ["native", "fp32"], data=saved, batches=2, device=CPU)
    (record,) = run.metrics("validation")
    assert (saved.step, sum(native.tokens)) == (3, record["tokens"])
    assert native.loss == record["loss"]
    assert 0 < abs(exact.loss - native.loss) < 1e-2


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"lm-eval must be installed.*'titan_lowprec\[eval\]'"):
        need("lm_eval", **NEEDED)


@pytest.mark.slow
def test_a_step_or_folder_without_a_checkpoint_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint of step 7, got steps \[3\]"):
        open_run(run.folder, step=7)
    with pytest.raises(ValueError, match=r"config.toml: must exist"):
        open_run(tmp_path)


@pytest.mark.slow
def test_exported_folder_is_the_same_model_and_begins_texts_with_bos(saved, exported):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("The function returns the value", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id == 0
    assert ids[0, -1] != tokenizer.eos_token_id
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    with torch.no_grad():
        logits = load_model(saved, device=CPU)(ids)
        truth = theirs(ids).logits
    assert (logits - truth).norm() / truth.norm() < 2e-2  # mxfp8 against fp32
    with pytest.raises(ValueError, match=r"must be new or empty"):
        export_hugging_face(saved, exported)


@pytest.mark.slow
def test_weights_in_hugging_face_format_load_as_the_same_model(saved, exported):
    from_torchtitan = load_model(saved, device=CPU).state_dict()
    from_export = load_model(dataclasses.replace(saved, weights=exported), device=CPU).state_dict()
    assert from_torchtitan.keys() == from_export.keys()
    for name, tensor in from_torchtitan.items():
        assert torch.equal(tensor, from_export[name]), name


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval is not installed: pip install 'titan_lowprec[eval]'",
)
def test_a_local_task_is_scored_by_document_under_each_attention(saved, tmp_path, monkeypatch):
    for name, value in (("HF_HOME", str(tmp_path)), ("HF_DATASETS_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(
            json.dumps({"question": question, "choices": choices, "answer": answer}) + "\n"
            for question, choices, answer in QUESTIONS
        )
    )
    (tmp_path / "tiny_local.yaml").write_text(TASK.format(documents=documents))
    plan = TaskPlan(("tiny_local",), tmp_path, None)
    results = list(evaluate_tasks(saved, ["transformers", "native"], plan=plan, device=CPU))
    assert [(result.task, result.metric) for result in results] == [("tiny_local", "acc")] * 2
    assert all(len(result.scores) == 3 for result in results)
    assert all(score in (0.0, 1.0) for result in results for score in result.scores)


def test_scores_are_in_the_order_of_documents_and_of_one_filter():
    samples = [
        {"doc_id": doc, "filter": name, "metrics": ["acc", "words"], "acc": acc, "words": "x"}
        for doc, name, acc in ((1, "none", 0.0), (0, "none", 1.0), (0, "strict", 0.0))
    ]
    (result,) = scores_of("model", "task", samples)
    assert result.metric == "acc" and result.scores == (1.0, 0.0)
