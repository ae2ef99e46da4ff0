"""Markdown tables."""


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def described_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table whose last column is text and takes most of the width."""
    return f'<div class="described" markdown>\n\n{table(head, rows)}\n\n</div>'
