"""The table and the sentences around it, as plain text for Markdown and HTML alike."""

from collections.abc import Sequence
from pathlib import Path

from titan_lowprec.experiments.estimates import Estimate
from titan_lowprec.experiments.matrix import SEED_KEYS
from titan_lowprec.experiments.plan import plan_note
from titan_lowprec.experiments.resolution import NOT_IDENTITY, differing_keys
from titan_lowprec.experiments.results import ArmResult, Results

HEADER = (
    "arm",
    "verdict",
    "seeds",
    "loss",
    "spread",
    "difference to baseline",
    "95 % interval",
    "valid tokens/s",
)
MISSING = "–"  # noqa: RUF001


def table_rows(results: Results) -> list[tuple[str, ...]]:
    """A row per arm, in the order of ``HEADER``."""
    return [row(arm, len(results.matrix.seeds)) for arm in results.arms]


def row(arm: ArmResult, seeds: int) -> tuple[str, ...]:
    """One arm's cells."""
    speed = MISSING if arm.tokens_per_s is None else f"{arm.tokens_per_s:,.0f}"
    return (
        arm.arm,
        arm.verdict,
        f"{arm.finished}/{seeds}",
        number(arm.loss and arm.loss.mean, ".4f"),
        number(arm.loss and arm.loss.spread, ".4f"),
        number(arm.difference and arm.difference.mean, "+.4f"),
        interval(arm.difference),
        speed,
    )


def number(value: float | None, form: str) -> str:
    """A formatted number, or a dash."""
    return MISSING if value is None else format(value, form)


def interval(value: Estimate | None, *, digits: int = 4) -> str:
    """``low to high``, or a dash where one value gives none."""
    if value is None or value.low is None or value.high is None:
        return MISSING
    return f"{value.low:+.{digits}f} to {value.high:+.{digits}f}"


def notes(results: Results, folder: Path) -> list[str]:
    """What a reader must know to read the table."""
    matrix = results.matrix
    if matrix.metric == "train":
        metric = f"training loss over the last {100 * matrix.tail_fraction:g} % of the tokens"
    else:
        metric = "validation loss"
    lines = [
        f"Loss: {metric}, nats per token, at {results.tokens:,} valid tokens of every arm.",
        f"Spread: standard deviation over {len(matrix.seeds)} seeds. Difference: mean over seeds "
        f"of arm - {baseline_text(results)} with equal seed; its interval is Student's t, not "
        "adjusted for the number of arms.",
        f"Verdict: acceptable if the whole interval is at most {matrix.acceptable_difference:g}, "
        "not acceptable if the whole interval is above, else undecided.",
        plan_note(matrix, folder),
        pairing_note(results),
    ]
    commits = sorted({item.commit for item in results.histories if item.commit})
    lines.append(f"Commit: {', '.join(commits) or 'unknown'}.")
    if any(commit.endswith("-dirty") for commit in commits):
        lines.append("Dirty: files had changes that the commit does not have.")
    if len(commits) > 1:
        lines.append("The runs were made with DIFFERENT commits: code may explain differences.")
    return lines


def baseline_text(results: Results) -> str:
    """What arms are compared with."""
    baselines = results.matrix.baselines
    names = list(dict.fromkeys(baselines.values()))
    if len(names) == 1:
        return names[0]
    pairs = [f"{arm} with {other}" for arm, other in baselines.items() if arm != other]
    return f"baseline ({', '.join(pairs)})"


def pairing_note(results: Results) -> str:
    """Which arms saw the baseline's batches."""
    unequal = [arm.arm for arm in results.arms if arm.same_batches is False]
    unknown = [arm.arm for arm in results.arms if arm.same_batches is None]
    if unknown and not unequal:
        return f"No run says yet which batches these arms saw: {', '.join(unknown)}."
    if not unequal:
        return "Every arm saw the baseline's batches of equal seed (fingerprints of all steps)."
    return (
        f"Other batches than the baseline's, so that the data add to the difference: "
        f"{', '.join(unequal)}."
    )


def problem_lines(results: Results) -> list[str]:
    """Every run without a final number, with its reason."""
    return [f"{arm.arm}, {problem}" for arm in results.arms for problem in arm.problems]


def setting_rows(
    results: Results, *, hidden: Sequence[str] = (*NOT_IDENTITY, *SEED_KEYS)
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the keys, but for the hidden ones, in which arms differ.

    A row per arm, or a row per key where keys outnumber arms.
    """
    settings = differing_keys([item.run for item in results.histories], hidden=hidden)
    keys = list(next(iter(settings.values()), {}))
    if len(keys) > len(settings):
        rows = [(key, *(str(values[key]) for values in settings.values())) for key in keys]
        return ("setting", *settings), rows
    rows = [(arm, *(str(values[key]) for key in keys)) for arm, values in settings.items()]
    return ("arm", *keys), rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def markdown(results: Results, *, folder: Path, image: str) -> str:
    """The report of a sweep as Markdown.

    Args:
        results: The computed table.
        folder: The sweep's folder, with the plan.
        image: Path of the picture, relative to the report.
    """
    matrix = results.matrix
    parts = [f"# {matrix.name}", matrix.question, markdown_table(HEADER, table_rows(results))]
    problems = problem_lines(results)
    if problems:
        parts.append("Runs without a result:\n\n" + "\n".join(f"- {line}" for line in problems))
    parts.append("\n".join(f"- {line}" for line in notes(results, folder)))
    parts.append(f"![Losses and their differences to {baseline_text(results)}]({image})")
    parts.append("## Settings\n\n" + markdown_table(*setting_rows(results)))
    return "\n\n".join(part for part in parts if part) + "\n"
