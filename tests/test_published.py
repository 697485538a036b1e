"""The config.json files of published models. Each is taken, with the published number of
parameters, or refused by name.
"""

from dataclasses import replace

import pytest
import torch

from model import GPT
from training.huggingface import from_config, hf_class, to_config

NULL = None  # so that the tables below read as the files do
COMMON = dict(
    attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, torch_dtype="bfloat16",
    transformers_version="4.51.0", use_cache=True,
)  # fmt: skip
QWEN2 = COMMON | dict(
    architectures=["Qwen2ForCausalLM"], bos_token_id=151643, eos_token_id=151643,
    max_position_embeddings=131072, max_window_layers=28, model_type="qwen2",
    num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=131072,
    tie_word_embeddings=True, use_mrope=False, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
QWEN3 = COMMON | dict(
    architectures=["Qwen3ForCausalLM"], attention_bias=False, bos_token_id=151643,
    eos_token_id=151645, head_dim=128, max_position_embeddings=40960, max_window_layers=28,
    model_type="qwen3", num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=NULL,
    rope_theta=1000000, sliding_window=NULL, tie_word_embeddings=True, use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
LLAMA = COMMON | dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, mlp_bias=False, model_type="llama",
    pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=NULL, tie_word_embeddings=False,
)  # fmt: skip
SCALED = dict(
    factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0,
    original_max_position_embeddings=8192, rope_type="llama3",
)  # fmt: skip
SMOL = LLAMA | dict(
    bos_token_id=0, eos_token_id=0, initializer_range=0.041666666666666664, is_llama_config=True,
    max_position_embeddings=8192, rope_interleaved=False, rope_theta=100000,
    tie_word_embeddings=True, vocab_size=49152,
    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
)  # fmt: skip
MISTRAL = COMMON | dict(
    architectures=["MistralForCausalLM"], max_position_embeddings=32768, model_type="mistral",
    num_key_value_heads=8, rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip
GPT2 = dict(
    activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
    bos_token_id=50256, embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02,
    layer_norm_epsilon=1e-5, model_type="gpt2", n_ctx=1024, n_positions=1024, resid_pdrop=0.1,
    summary_activation=NULL, summary_first_dropout=0.1, summary_proj_to_labels=True,
    summary_type="cls_index", summary_use_proj=True, vocab_size=50257,
    task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
)  # fmt: skip


def shape(hidden: int, inner: int, heads: int, layers: int, **more) -> dict:
    width = dict(hidden_size=hidden, intermediate_size=inner)
    return width | dict(num_attention_heads=heads, num_hidden_layers=layers) | more


TAKEN = {  # name -> (config.json, parameters)
    "Qwen2.5-7B, with YaRN": (
        QWEN2
        | shape(3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064)
        | dict(tie_word_embeddings=False)
        | dict(rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn")),
        7_615_616_512,
    ),
    "Qwen2-0.5B": (QWEN2 | shape(896, 4864, 14, 24, max_window_layers=24), 494_032_768),
    "Qwen3-0.6B": (QWEN3 | shape(1024, 3072, 16, 28), 596_049_920),
    "Llama-2-7b": (
        LLAMA | shape(4096, 11008, 32, 32, max_position_embeddings=4096, vocab_size=32000),
        6_738_415_616,
    ),
    "Llama-3.2-1B": (
        LLAMA
        | shape(2048, 8192, 32, 16, head_dim=64, num_key_value_heads=8, vocab_size=128256)
        | dict(max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=SCALED)
        | dict(tie_word_embeddings=True),
        1_235_814_400,
    ),
    "SmolLM2-135M": (SMOL | shape(576, 1536, 9, 30, num_key_value_heads=3), 134_515_008),
    "Mistral-7B-v0.3": (
        MISTRAL | shape(4096, 14336, 32, 32, rope_theta=1e6, sliding_window=NULL, vocab_size=32768),
        7_248_023_552,
    ),
    "gpt2-medium": (
        GPT2 | dict(n_embd=1024, n_head=16, n_layer=24, n_special=0, predict_special_tokens=True),
        354_823_168,
    ),
}
REFUSED = {  # name -> (config.json, the setting that is named)
    "Mistral-7B-v0.1": (TAKEN["Mistral-7B-v0.3"][0] | {"sliding_window": 4096}, "sliding_window"),
    "MiniMind2": (dict(architectures=["MiniMindForCausalLM"], model_type="minimind"), "minimind"),
    "Llama, 4 bits": (
        TAKEN["Llama-2-7b"][0] | {"quantization_config": {"bits": 4}},
        "quantization_config",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_published_config_is_taken_with_the_published_number_of_parameters(name):
    published, parameters = TAKEN[name]
    c = from_config(published)
    small = replace(c, block_size=1) if c.pos == "rope" else c  # the table of RoPE is large
    with torch.device("meta"):
        assert GPT(small).num_params()["total"] == parameters
    assert c.block_size == published.get("max_position_embeddings", 1024)
    # What a checkpoint of ours says is the same model. Mistral is Llama, with another name.
    assert from_config(to_config(c)) == c
    assert hf_class(c) == published["architectures"][0].replace("Mistral", "Llama")


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_that_is_not_computed_here_is_refused_by_name(name):
    published, message = REFUSED[name]
    with pytest.raises(ValueError) as refused:
        from_config(published)
    assert message in str(refused.value) and "\n" not in str(refused.value)
