"""vLLM in processes of its own: a server, tensor parallelism, and torch_xla's device."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.serve import load_test
from tests.support.model_families import model_of

ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
XLA_PYTHON = os.environ.get("XLA_GPU_TORCH_XLA_PYTHON")
"""The interpreter of an environment with torch_xla, for the tests of its device."""

TOKENS = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    options = json.loads(sys.argv[1])
    engine = LLM(skip_tokenizer_init=True, dtype="float32", max_model_len=256, enforce_eager=True,
                 attention_backend="CUSTOM", **options)
    prompts = [{"prompt_token_ids": [*range(2, 2 + n)]} for n in (1, 12, 40, 90)]
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    print("tokens:", [list(x.outputs[0].token_ids) for x in outputs])

if __name__ == "__main__":
    main()
"""


def test_tensor_parallelism(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    script = tmp_path / "tokens.py"  # vLLM starts its workers from the file
    script.write_text(TOKENS)
    found = []
    for devices in (1, 2):
        options = {"model": str(tmp_path), "tensor_parallel_size": devices}
        command = [sys.executable, str(script), json.dumps(options)]
        result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        lines = [x for x in result.stdout.splitlines() if x.startswith("tokens:")]
        assert lines, result.stderr[-3000:]
        found += lines
    assert found[0] == found[1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the packaged model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "examples.serve", "--port", str(port), "--dtype", "float32"]
    command += ["--folder", str(tmp_path / "model"), "--", "--enforce-eager"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_server_loses_no_request(server: str) -> None:
    """PyTorch's matrix products depend on the size of the batch in their last bits, so that an
    answer may differ from that given alone. test_a_real_model_alone_and_in_a_batch does without."""
    prompts = load_test.PROMPTS
    assert len({*prompts}) == 64
    report = asyncio.run(load_test.measure(server, prompts, max_tokens=16))
    assert report.num_lost == 0
    assert all(answer and answer.num_chunks > 1 for answer in report.together), "not streamed"
    assert report.num_equal >= 60, "more than rounding"


def test_without_a_server() -> None:
    command = [sys.executable, "-m", "examples.serve.load_test", "--url", "http://127.0.0.1:9/v1"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("no server answers at http://127.0.0.1:9/v1: start it with")


@pytest.mark.skipif(XLA_PYTHON is None, reason="XLA_GPU_TORCH_XLA_PYTHON is not set")
def test_the_layers_on_torch_xlas_device(tmp_path: Path) -> None:
    """vLLM is pure Python there: its compiled part is for another PyTorch."""
    origin = importlib.util.find_spec("vllm").origin
    assert origin is not None
    arguments = ["--door", "torch", "vllm-torch_xla", "vllm-openxla", "--max-new-tokens", "16"]
    script = (
        f"import runpy, sys; sys.path.append({str(Path(origin).parents[1])!r}); "
        f"sys.argv[1:] = {[*arguments, '--json']!r}; "
        "runpy.run_module('examples.generate', run_name='__main__')"
    )
    command = [XLA_PYTHON, "-W", "ignore", "-c", script]
    environment = ENVIRONMENT | {"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert report["same_tokens"] and report["same_as_transformers"] and report["same_custom_calls"]
    for door in ("vllm-torch_xla", "vllm-openxla"):
        assert report["doors"][door]["programs"] == 2
        assert report["doors"][door]["late_programs"] == 0
