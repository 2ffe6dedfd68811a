"""Write a sweep's report: ``report.md``, ``report.png`` and ``report.html``."""

from pathlib import Path

from titan_lowprec.experiments.figures import save_overview
from titan_lowprec.experiments.page import page
from titan_lowprec.experiments.report_table import markdown
from titan_lowprec.experiments.results import Results
from titan_lowprec.experiments.run_state import replace_text


def write_report(results: Results, folder: Path, *, to: Path | None = None) -> Path:
    """Write Markdown, picture and page.

    Args:
        results: The computed table.
        folder: The sweep's folder, with the plan.
        to: Path of the files without ending; ``None`` is ``folder/report``.

    Returns:
        The page, which needs no other file and no network.
    """
    stem = folder / "report" if to is None else to
    stem.parent.mkdir(parents=True, exist_ok=True)
    image = stem.parent / f"{stem.name}.png"
    save_overview(results, image)
    replace_text(
        stem.parent / f"{stem.name}.md", markdown(results, folder=folder, image=image.name)
    )
    html = stem.parent / f"{stem.name}.html"
    replace_text(html, page(results, folder=folder))
    return html
