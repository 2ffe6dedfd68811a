"""Names of results to keep are checked before the model is built."""

import pytest


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["atention"], "half_linears"),
        (["aten.no_such_op.default"], "aten.silu.default"),
        (["attention", "attention_if_smaller"], "not hold both"),
        (["linears", "half_linears"], "not hold both"),
    ],
)
def test_names_that_keep_nothing_or_contradict_are_refused(small, changed, problems, names, part):
    (problem,) = problems(changed(small, {"activation_checkpoint.save_ops": names}))
    assert problem.key == "activation_checkpoint.save_ops"
    assert part in str(problem)


@pytest.mark.parametrize(
    "names", [[], ["attention", "linears", "amax"], ["titan_lowprec.attention_forward.default"]]
)
def test_groups_and_ops_are_accepted(small, changed, problems, names):
    assert problems(changed(small, {"activation_checkpoint.save_ops": names})) == []
