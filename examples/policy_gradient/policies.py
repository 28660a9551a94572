"""A model that samples over a paged cache and is trained on packed sequences: in JAX, in PyTorch.

A record of a layer is its rotated queries, its rotated keys, its values and what attention gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_frontend
import torch_frontend
from harness.arrays import to_numpy
from shared_ffi.batch import Batch
from xla_paged_attention.engine import llama_jax, llama_torch
from xla_paged_attention.engine.checkpoint import Checkpoint
from xla_paged_attention.engine.jax_runner import JaxRunner
from xla_paged_attention.engine.scheduler import Limits
from xla_paged_attention.engine.torch_runner import TorchRunner

Record = list[tuple[np.ndarray, ...]]


class JaxPolicy(JaxRunner):
    """The parameters are one dictionary for both."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        self._config = checkpoint.config
        self.windows = checkpoint.config.sliding_windows
        self.records: list[tuple[Batch, Record]] = []
        self._sample = jax.jit(self._forward_and_record, donate_argnums=1)
        self._differentiate = jax.jit(jax.value_and_grad(self._loss))

    def _forward_and_record(self, params: Any, caches: Any, batch: Batch) -> Any:
        def attend(query: Any, key: Any, value: Any, rope: Any, cache: Any, *rest: Any) -> Any:
            attended, (cache, query) = llama_jax.attend_to_cache(
                query, key, value, rope, cache, *rest
            )
            written = cache.reshape(-1, *cache.shape[2:])[batch.slot_mapping]
            return attended, (cache, (query, written[:, 0::2], value, attended))

        x, layers = llama_jax.hidden(params, caches, batch, self._config, attend)
        logits = llama_jax.logits(params, x[batch.query_start_loc[1:] - 1], self._config)
        return logits, [cache for cache, _ in layers], [record for _, record in layers]

    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        logits, self.caches, records = self._sample(self.params, self.caches, batch)
        self.records.append((batch, jax.tree.map(np.asarray, records)))
        return np.asarray(logits)

    def attend(self, query: Any, key: Any, value: Any, batch: Batch, window: Any, own: bool) -> Any:
        """Packed attention, ours or the framework's `own`."""
        scale = query.shape[-1] ** -0.5
        if not own:
            starts, num_seqs = batch.query_start_loc, batch.num_seqs
            return jax_frontend.varlen_attention(query, key, value, starts, num_seqs, scale, window)
        bounds = np.asarray(batch.query_start_loc).tolist()
        local = None if window is None else (window - 1, 0)
        return jnp.concatenate([
            jax.nn.dot_product_attention(
                *(jnp.asarray(x[first:end]) for x in (query, key, value)),
                scale=scale, is_causal=True, local_window_size=local,
            )
            for first, end in pairwise(bounds)
        ])  # fmt: skip

    def logits(self, params: Any, batch: Batch, own: bool) -> tuple[Any, Any]:
        """The logits of all tokens, and the records of the layers."""

        def attend(
            query: Any, key: Any, value: Any, rope: Any, cache: Any, batch: Batch, window: Any
        ) -> Any:
            query, key = llama_jax.rotated(query, key, rope)
            attended = self.attend(query, key, value, batch, window, own)
            return attended, (query, key, value, attended)

        caches = [None] * len(self._config.sliding_windows)
        x, records = llama_jax.hidden(params, caches, batch, self._config, attend)
        return llama_jax.logits(params, x, self._config), records

    def score(self, batch: Batch, own: bool) -> tuple[np.ndarray, Record]:
        """The logits of all tokens, and the records, as arrays."""
        run = jax.jit(lambda params: self.logits(params, batch, own))
        result: tuple[np.ndarray, Record] = jax.tree.map(np.asarray, run(self.params))
        return result

    def _loss(
        self, params: Any, batch: Batch, rows: Any, targets: Any, sampled: Any, advantages: Any
    ) -> Any:
        logits, _ = self.logits(params, batch, own=False)
        logprobs = jax.nn.log_softmax(logits[rows])[jnp.arange(len(rows)), targets]
        return -(jnp.exp(logprobs - sampled) * advantages).mean()

    def train(self, rate: float, *arguments: Any) -> float:
        """Takes a step on `_loss`. Returns the loss before it."""
        value, gradients = self._differentiate(self.params, *arguments)
        self.params = jax.tree.map(lambda x, g: x - rate * g, self.params, gradients)
        return float(value)


class TorchPolicy(TorchRunner):
    """The modules are the same for both; what attends is changed between them."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        self.windows = checkpoint.config.sliding_windows
        self.records: list[tuple[Batch, Record]] = []
        self._layers: list[Any] = []
        self._attentions: list[Any] = [layer.self_attn for layer in self.model.layers]

    def _attend_and_record(
        self, module: Any, query: Any, key: Any, value: Any, rope: Any, cache: Any, batch: Batch
    ) -> torch.Tensor:
        attended = llama_torch.Attention.attend(module, query, key, value, rope, cache, batch)
        written = cache.flatten(0, 1)[batch.slot_mapping.long()]
        layer = (query, written[:, 0::2], value, attended)
        self._layers.append(tuple(to_numpy(x).copy() for x in layer))
        return attended

    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        self._layers = []
        for module in self._attentions:
            module.attend = partial(self._attend_and_record, module)
        logits = super().step(batch)
        self.records.append((batch, self._layers))
        return logits

    def attend(self, query: Any, key: Any, value: Any, batch: Batch, window: Any, own: bool) -> Any:
        """Packed attention, ours or the framework's `own`."""
        query, key, value, starts, num_seqs = (
            torch.as_tensor(x) for x in (query, key, value, batch.query_start_loc, batch.num_seqs)
        )
        scale = query.shape[-1] ** -0.5
        if not own:
            return torch_frontend.varlen_attention(
                query, key, value, starts, num_seqs, scale, window
            )
        if window is not None:
            raise NotImplementedError("scaled_dot_product_attention has no sliding window")
        attend: Any = torch.nn.functional.scaled_dot_product_attention
        parts = (x.split(starts.diff().tolist()) for x in (query, key, value))
        return torch.cat([
            attend(
                *(x.transpose(0, 1)[None] for x in part),
                scale=scale, is_causal=True, enable_gqa=True,
            )[0].transpose(0, 1)
            for part in zip(*parts, strict=True)
        ])  # fmt: skip

    def logits(self, batch: Batch, own: bool) -> torch.Tensor:
        """The logits of all tokens. The records of the layers are kept."""
        self._layers = []

        def attend(
            window: Any, query: Any, key: Any, value: Any, rope: Any, cache: Any, batch: Batch
        ) -> torch.Tensor:
            query, key = llama_torch.rotated(query, key, rope)
            attended: torch.Tensor = self.attend(query, key, value, batch, window, own)
            self._layers.append(tuple(map(to_numpy, (query, key, value, attended))))
            return attended

        for module in self._attentions:
            module.attend = partial(attend, module.window)
        caches: Sequence[Any] = [None] * len(self.model.layers)
        return self.model.logits(self.model.hidden(caches, self.place(batch)))

    @torch.no_grad()
    def score(self, batch: Batch, own: bool) -> tuple[np.ndarray, Record]:
        """The logits of all tokens, and the records, as arrays."""
        return to_numpy(self.logits(batch, own)), self._layers

    def train(
        self, rate: float, batch: Batch, rows: Any, targets: Any, sampled: Any, advantages: Any
    ) -> float:
        """Takes a step. Returns the loss before it."""
        self.model.requires_grad_()
        logprobs = self.logits(batch, own=False)[rows].log_softmax(-1)
        chosen = logprobs[torch.arange(len(rows)), torch.as_tensor(targets)]
        ratios = (chosen - torch.as_tensor(sampled)).exp()
        loss = -(ratios * torch.as_tensor(advantages)).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None
        return float(loss.detach())
