"""What packing did to the documents: what was cut, dropped and padded."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingStatistics:
    """Counts over the documents of one epoch, or of the windows of a stream packed so far."""

    documents: int
    """Documents read."""
    tokens: int
    """Tokens read."""
    row_tokens: int
    """Tokens of a row."""
    rows: int
    """Rows packed."""
    packed_tokens: int
    """Tokens in rows; ``tokens`` less what was truncated or dropped."""
    padding_tokens: int
    """Tokens of rows past their last document."""
    long_documents: int
    """Documents longer than a row, whatever the policy did to them."""
    cut_documents: int
    """Documents spread over two rows or more."""
    cut_that_fit_documents: int
    """Of those, documents that would have fitted into one row."""
    truncated_tokens: int
    """Tokens lost to ``long_document="truncate"``."""
    dropped_long_documents: int
    """Documents lost to ``long_document="drop"``."""
    dropped_short_documents: int
    """Documents below ``min_document_tokens``."""
    dropped_tokens: int
    """Tokens of the documents dropped for either reason."""
    capacity_closed_rows: int
    """Rows that took padding because they held ``max_documents`` documents."""
    most_documents: int
    """Most documents in a row."""

    @property
    def fill(self) -> float:
        """Share of the rows' tokens that belong to documents."""
        return self.packed_tokens / max(1, self.rows * self.row_tokens)

    def __add__(self, other: "PackingStatistics") -> "PackingStatistics":
        """Join the statistics of two windows."""
        joined = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
        }
        joined["row_tokens"] = self.row_tokens
        joined["most_documents"] = max(self.most_documents, other.most_documents)
        return PackingStatistics(**joined)

    def describe(self) -> str:
        """Return one line for a log."""
        share = 100 / max(1, self.documents)
        return (
            f"{self.documents} documents, {self.tokens} tokens -> {self.rows} rows of "
            f"{self.row_tokens}, fill {100 * self.fill:.2f} %, padding {self.padding_tokens} "
            f"tokens; longer than a row {self.long_documents}; cut {self.cut_documents} "
            f"({share * self.cut_documents:.1f} %), of which {self.cut_that_fit_documents} would "
            f"have fitted; truncated {self.truncated_tokens} tokens; dropped "
            f"{self.dropped_long_documents} long and {self.dropped_short_documents} short "
            f"documents ({self.dropped_tokens} tokens); at most {self.most_documents} documents "
            f"a row, {self.capacity_closed_rows} rows closed at capacity"
        )
