"""The example that samples and trains: the bits that it compares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.policy_gradient.__main__ import main


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_sampled_and_trained_attention_has_the_same_bits(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 67}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(67)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--framework", framework, "--learning-rate", "0.5"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "varlen_attention: attention has the sampler's bits in 2 of 2 layers" in printed
    ratios = [float(x.split()[-1]) for x in printed.splitlines() if "importance ratio" in x]
    assert len(ratios) == 2
    assert max(ratios) < 1e-4
    first, second = (float(x.split("loss ")[1].split(",")[0]) for x in printed.splitlines()[-2:])
    assert second < first
