"""Where the bundled text and its tokenizer lie, and the names that stand for them in a recipe."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"

BUNDLED = {
    "bundled:train": ASSETS / "train.jsonl",
    "bundled:validation": ASSETS / "validation.jsonl",
    "bundled:tokenizer": ASSETS / "tokenizer",
}
"""Names usable wherever a path is, so that a recipe works from any folder."""


def resolve_path(name: str) -> str:
    """Return the path that a ``bundled:`` name stands for; any other path comes back expanded.

    Raises:
        ValueError: The name starts with ``bundled:`` and is none of ours.
    """
    if not name.startswith("bundled:"):
        return str(Path(name).expanduser())
    if name not in BUNDLED:
        raise ValueError(
            f"resolve_path: a bundled name must be one of {sorted(BUNDLED)}, got {name!r}; "
            "use one of them or a path"
        )
    return str(BUNDLED[name])
