"""The config.json files of published models. Each is taken, with the published number of
parameters, or refused by name.
"""

from dataclasses import replace

import pytest
import torch

from model import GPT
from training.huggingface import from_config, hf_class, to_config

NULL = None  # so that the tables below read as the files do
QWEN2 = dict(
    architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643,
    eos_token_id=151643, hidden_act="silu", initializer_range=0.02, max_position_embeddings=131072,
    max_window_layers=28, model_type="qwen2", num_key_value_heads=2, rms_norm_eps=1e-6,
    rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=True, torch_dtype="bfloat16",
    transformers_version="4.40.1", use_cache=True, use_mrope=False, use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=151643, eos_token_id=151645, head_dim=128, hidden_act="silu",
    initializer_range=0.02, max_position_embeddings=40960, max_window_layers=28, model_type="qwen3",
    num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-6,
    rope_scaling=NULL, rope_theta=1000000, sliding_window=NULL, tie_word_embeddings=True,
    torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
LLAMA = dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0,
    bos_token_id=1, eos_token_id=2, hidden_act="silu", initializer_range=0.02, mlp_bias=False,
    model_type="llama", pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=NULL,
    tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.42.3",
    use_cache=True,
)  # fmt: skip
SCALED = dict(
    factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0,
    original_max_position_embeddings=8192, rope_type="llama3",
)  # fmt: skip
LLAMA3 = LLAMA | dict(
    bos_token_id=128000, eos_token_id=128001, max_position_embeddings=131072,
    num_key_value_heads=8, rope_theta=500000.0, vocab_size=128256, rope_scaling=SCALED,
)  # fmt: skip
SMOL = LLAMA | dict(
    bos_token_id=0, eos_token_id=0, initializer_range=0.041666666666666664, is_llama_config=True,
    max_position_embeddings=8192, rope_interleaved=False, rope_theta=100000,
    tie_word_embeddings=True, vocab_size=49152,
    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
)  # fmt: skip
MISTRAL = dict(
    architectures=["MistralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_act="silu",
    hidden_size=4096, initializer_range=0.02, intermediate_size=14336,
    max_position_embeddings=32768, model_type="mistral", num_attention_heads=32,
    num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5, tie_word_embeddings=False,
    torch_dtype="bfloat16", use_cache=True,
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


TAKEN = {  # name -> (config.json, parameters, the class that our checkpoint has)
    "Qwen2-0.5B": (QWEN2 | shape(896, 4864, 14, 24, max_window_layers=24), 494_032_768),
    "Qwen2.5-7B, with YaRN": (
        QWEN2
        | shape(3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064)
        | dict(tie_word_embeddings=False)
        | dict(rope_scaling=dict(factor=4.0, original_max_position_embeddings=32768, type="yarn")),
        7_615_616_512,
    ),
    "Qwen3-0.6B": (QWEN3 | dict(hidden_size=1024, intermediate_size=3072), 596_049_920),
    "Llama-2-7b": (
        LLAMA
        | shape(4096, 11008, 32, 32, num_key_value_heads=32)
        | dict(max_position_embeddings=4096, vocab_size=32000),
        6_738_415_616,
    ),
    "Llama-3.2-1B": (
        LLAMA3 | shape(2048, 8192, 32, 16, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "SmolLM2-135M": (SMOL | shape(576, 1536, 9, 30, num_key_value_heads=3), 134_515_008),
    "Mistral-7B-v0.3": (
        MISTRAL | dict(rope_theta=1000000.0, sliding_window=NULL, vocab_size=32768),
        7_248_023_552,
    ),
    "gpt2": (GPT2 | dict(n_embd=768, n_head=12, n_layer=12), 124_439_808),
}
REFUSED = {  # name -> (config.json, what is said)
    "Mistral-7B-v0.1": (
        MISTRAL | dict(rope_theta=10000.0, sliding_window=4096, vocab_size=32000),
        "sliding_window=4096 is not supported",
    ),
    "MiniMind2": (
        dict(architectures=["MiniMindForCausalLM"], model_type="minimind", hidden_size=768),
        "model_type='minimind'",
    ),
    "Llama, 4 bits": (
        TAKEN["Llama-2-7b"][0] | dict(quantization_config={"bits": 4}),
        "quantization_config={'bits': 4} is not supported",
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
