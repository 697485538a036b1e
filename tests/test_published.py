"""The config.json files of published models, in published.jsonl. Each is taken, with the published
number of parameters, or refused by name.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model import GPT
from training.huggingface import architecture_of, from_config, to_config

LINES = Path(__file__).with_name("published.jsonl").read_text().splitlines()
MODELS = {row["model"]: row for row in map(json.loads, LINES)}
TAKEN = [name for name, row in MODELS.items() if "parameters" in row]


@pytest.mark.parametrize("name", TAKEN)
def test_a_published_model_has_its_number_of_parameters(name):
    published = MODELS[name]["config"]
    c = from_config(published)
    small = replace(c, block_size=1) if c.pos == "rope" else c  # the table of RoPE is large
    with torch.device("meta"):
        assert GPT(small).num_params()["total"] == MODELS[name]["parameters"]
    assert c.block_size == published.get("max_position_embeddings", 1024)
    # What a checkpoint of ours says is the same model.
    assert from_config(to_config(c)) == c
    assert architecture_of(c).name == published["architectures"][0]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TAKEN])
def test_a_config_not_computed_here_is_refused(name):
    with pytest.raises(ValueError) as refused:
        from_config(MODELS[name]["config"])
    assert MODELS[name]["refused"] in str(refused.value)
