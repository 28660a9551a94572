"""What the engine needs of a model: one function that runs a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from shared_ffi.batch import Batch


class ModelRunner(ABC):
    """A way to run a model, with caches of its own."""

    replicas = 1
    """Copies of the model, each with sequences and caches of its own, that run in one step."""

    @abstractmethod
    def step(self, batch: Batch) -> np.ndarray:
        """Runs the model, and writes the new tokens' keys and values into the caches.

        Args:
            batch: NumPy arrays, as ``pad_batch`` builds them. With several replicas, each has one
                dimension more in front, of the replicas.

        Returns:
            The logits of each sequence's last token, ``[max_seqs, vocab_size]`` float32, with
            several replicas ``[replicas, max_seqs, vocab_size]``. Rows of padding mean nothing.
        """

    @abstractmethod
    def weights(self) -> list[tuple[Any, int]]:
        """Each array of the weights, and how often it was written in place."""

    @abstractmethod
    def compiles(self) -> int:
        """Programs compiled so far, as the framework counts them."""

    def hlo(self, batch: Batch) -> str | None:
        """HLO text of the step before optimization, where there is one."""
        return None
