"""Request traces: when requests arrive, and how many tokens they bring and ask for."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from examples.scheduler import Arrival

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path) -> Iterator[Arrival]:
    """The rows of a CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens (the format
    of AzurePublicDataset's LLM inference traces).

    Raises:
        ValueError: there is no such file, or it has other columns.
    """
    if not path.is_file():
        raise ValueError(f"a trace must be a CSV file; got {path}, which is no file")
    with path.open(newline="") as file:
        began: datetime | None = None
        rows = csv.DictReader(file)
        if missing := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
            raise ValueError(
                f"a trace must have the columns {', '.join(_COLUMNS)}; {path} has no "
                f"{', '.join(missing)}"
            )
        for row in rows:
            # Seven digits of a second in the file; Python takes six.
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            began = began or moment
            seconds = (moment - began).total_seconds()
            yield Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def generate(count: int, seed: int = 0) -> Iterator[Arrival]:
    """A trace of the same shape as recorded chat traffic: Poisson arrivals, 5.5 a second, and
    heavy-tailed lengths, with medians of 1,020 prompt tokens and 129 generated ones."""
    rng = np.random.default_rng(seed)
    seconds = 0.0
    for _ in range(count):
        prompt = int(np.clip(rng.lognormal(np.log(1020), 1.0), 1, 14_050))
        generated = int(np.clip(rng.lognormal(np.log(129), 0.9), 1, 1_000))
        yield Arrival(seconds, prompt, generated)
        seconds += rng.exponential(1 / 5.5)
