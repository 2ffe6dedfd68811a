"""What a sweep stated before its first run; a verdict whose rule changed since says so."""

import datetime
import json
from pathlib import Path
from typing import Any

from titan_lowprec.experiments.matrix import Matrix

PLAN_FILE = "plan.json"


def rule_of(matrix: Matrix) -> dict[str, Any]:
    """What decides a verdict, beside the numbers."""
    return {
        "baselines": dict(matrix.baselines),
        "acceptable_difference": matrix.acceptable_difference,
        "metric": matrix.metric,
        "tail_fraction": matrix.tail_fraction,
        "seeds": list(matrix.seeds),
    }


def state_plan(matrix: Matrix, folder: Path) -> None:
    """Write the rule of a sweep's verdicts, unless an earlier start wrote it."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        with (folder / PLAN_FILE).open("x") as file:
            json.dump({"stated": stated, **rule_of(matrix)}, file, indent=1)
    except FileExistsError:
        return


def plan_note(matrix: Matrix, folder: Path) -> str:
    """A sentence on when the rule was stated, and what changed since."""
    path = folder / PLAN_FILE
    if not path.is_file():
        return "The rule of the verdicts was not recorded before the first run."
    plan = json.loads(path.read_text())
    changed = [
        f"{key} from {plan.get(key)!r} to {value!r}"
        for key, value in rule_of(matrix).items()
        if plan.get(key) != value
    ]
    note = f"The rule of the verdicts was stated before the first run, {plan['stated']}"
    if changed:
        return f"{note}, and CHANGED since: {', '.join(changed)}."
    return f"{note}, and has not changed."
