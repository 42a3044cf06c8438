"""Forms of pages as browsers send them without a script: names and values in the body."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from utils.errors import UserError

# The form of a submission has a field for each key of the configuration.
_MOST_FIELDS = 1000


async def read_pairs(request: Request) -> list[tuple[str, str]]:
    """Parse the fields of a form in their order; a body of another form is a `UserError`."""
    try:
        text = (await request.body()).decode()
        return parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), errors="strict",
            max_num_fields=_MOST_FIELDS,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(
            "the body is no form of names and values; use the page's own form, or the API"
        ) from error


Pairs = Annotated[list[tuple[str, str]], Depends(read_pairs)]


def read_form(pairs: Pairs) -> dict[str, str]:
    """Return the fields of a form; of several with one name the last one counts."""
    return dict(pairs)


Fields = Annotated[dict[str, str], Depends(read_form)]
