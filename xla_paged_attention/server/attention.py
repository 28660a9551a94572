"""Which attention a running server uses: its workers are asked at ``GET /attention``.

vLLM takes `Middleware` by ``--middleware`` and `Worker` by ``--worker-extension-cls``.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

PATH = "/attention"
OURS = "xla-paged-attention "
"""How the name of our attention begins; its version and the instructions follow."""


class Worker:
    """What vLLM's workers can be asked, beside what vLLM asks."""

    model_runner: Any
    device: Any

    def attention_names(self) -> list[str]:
        """The attention of the layers: our description, or the name of another backend."""
        groups = [group for groups in self.model_runner.attn_groups for group in groups]
        return sorted({self._name_of_attention(group.backend) for group in groups})

    def _name_of_attention(self, backend: Any) -> str:
        if backend.get_name() not in ("CUSTOM", "XLA_GPU_MLA"):
            return str(backend.get_name())
        from torch_frontend.integrations import vllm  # noqa: PLC0415  (may be missing)

        if issubclass(backend, vllm.XlaGpuAttentionBackend):  # vLLM derives one for chunks
            return vllm.description(self.device)
        return f"{backend.__module__}.{backend.__qualname__}"


class Middleware:
    """Answers `PATH` with the names, as JSON; hands on all other requests."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI calls it."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        worker_names = await scope["app"].state.engine_client.collective_rpc("attention_names")
        body = json.dumps(sorted({name for names in worker_names for name in names})).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def ask(url: str) -> list[str]:
    """The names of a server's attention.

    Args:
        url: such as ``http://127.0.0.1:8000``.

    Raises:
        OSError: the server does not answer, or cannot be asked.
    """
    with urllib.request.urlopen(url + PATH, timeout=60) as answer:
        return [str(name) for name in json.load(answer)]


def is_ours(names: list[str]) -> bool:
    """Whether all layers of all workers have our attention."""
    return bool(names) and all(name.startswith(OURS) for name in names)
