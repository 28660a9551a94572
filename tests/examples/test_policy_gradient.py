"""The example that samples and trains: the bits that it compares."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.policy_gradient import run
from examples.policy_gradient.__main__ import main


@pytest.mark.parametrize(("framework", "block_size"), [("jax", 16), ("jax", 2), ("torch", 2)])
def test_sampled_and_trained_attention_has_the_same_bits(
    framework: str,
    block_size: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All words are one token here, so the prompts share blocks of 2."""
    monkeypatch.setattr(run, "LIMITS", replace(run.LIMITS, block_size=block_size))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 67}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(67)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--framework", framework, "--learning-rate", "0.5"]
    assert main([*options, "--iterations", "2"]) == 0
    printed = capsys.readouterr().out
    equal = "varlen_attention: attention has the sampler's bits in 2 of 2 layers"
    assert printed.count(equal) == 2
    ratios = re.findall(r"(\S+): largest .* importance ratio from 1: (\S+)", printed)
    assert [name for name, _ in ratios] == 2 * ["varlen_attention", "framework's"]
    assert max(float(ratio) for _, ratio in ratios) < 1e-4
    if framework == "jax":  # PyTorch's matrix products may round differently for other shapes
        assert {float(ratio) for name, ratio in ratios if name == "varlen_attention"} == {0}
    losses = [float(loss) for loss in re.findall(r"loss ([^,]+),", printed)]
    assert losses[1] < losses[0] and losses[3] < losses[2]
