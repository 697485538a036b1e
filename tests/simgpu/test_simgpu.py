"""Every command runs to its end on simulated GPUs, which compute nothing.

    SIMGPU=FOLDER make simgpu

simulation.py says what is simulated. These tests show that the host's side of each line runs and
that each kernel compiles. They say nothing of numbers, of speed, or of races.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO, make_records, write_jsonl
from tests.simgpu import simulation
from tests.simgpu.simulation import SIMGPU

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SIMGPU, reason="SIMGPU names no folder of simulated GPUs"),
]

# A model that has all that a real one has, and compiles in a minute.
SMALL = "--dataset=small --n_layer=2 --n_head=4 --n_embd=128 --block_size=64 --batch_size=2"
SMALL += " --batch_tokens=256 --max_steps=4 --eval_every=2 --sample_every=2 --save_every=2"
SMALL += " --log_every=1 --device=cuda"
EAGER = "--compile=false"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with data/small, made on the CPU."""
    folder = tmp_path_factory.mktemp("simgpu")
    corpus = write_jsonl(folder / "small.jsonl", make_records(300))
    command = [sys.executable, REPO / "prepare.py", "--input", corpus, "--name=small"]
    subprocess.run([*command, "--vocab_size=400", "--val_fraction=0.1"], cwd=folder, check=True)
    return folder


def simulated(gpu: str, processes: int, command: str, folder: Path) -> tuple[int, str]:
    """Run a command of this project on so many simulated GPUs. Return its exit code and output."""
    script, *options = command.split()
    argv = [script if script == "-m" else str(REPO / script), *options]
    ended = simulation.simulated(gpu, processes, argv, folder, timeout=900)
    return ended.returncode, ended.stdout


def trains(gpu: str, processes: int, options: str, folder: Path, run: str) -> str:
    """Train SMALL with these options, and check what the run left. Return the output."""
    more = f"--run_name={run} --follow=false {options}"  # the last picture may wait for a busy CPU
    code, output = simulated(gpu, processes, f"train.py {SMALL} {more}", folder)
    assert code == 0, output
    assert "\nwarning: " not in output, output
    lines = (folder / "out" / run / "metrics.jsonl").read_text().splitlines()
    steps = [r["step"] for r in map(json.loads, lines) if "tokens_per_s" in r]
    last = int(re.findall(r"--max_steps=(\d+)", f"{SMALL} {options}")[-1])
    assert steps == list(range(1, last + 1)), output
    assert (folder / f"out/{run}/ckpt/step_{last:08d}/manifest.json").exists()
    return output


LLAMA = "--preset=llama --n_kv_head=2"
MASK = "--documents=mask"
RUNS = {
    "eager": EAGER,
    "eager with dropout": f"{EAGER} --dropout=0.1",
    "eager float16": f"{EAGER} {LLAMA} --dtype=float16",
    "eager float32": f"{EAGER} --dtype=float32",
    "eager mask": f"{EAGER} {LLAMA} {MASK}",
    "eager pack": f"{EAGER} {LLAMA} --documents=pack --loss_per=document",
    "eager recompute": f"{EAGER} --recompute=blocks",
    "eager muon": f"{EAGER} --preset=qwen3 --optimizer=muon --average=0.5",
    "eager adafactor": f"{EAGER} --optimizer=adafactor --lr=0.03",
    "eager batch_size auto": f"{EAGER} --batch_size=auto",
    "compiled gpt2": "--compile=true",
    "compiled gpt2 with dropout": "--dropout=0.1",
    "compiled llama": LLAMA,
    "compiled float16": f"{LLAMA} --dtype=float16",
    "compiled float32": f"{LLAMA} --dtype=float32",
    "compiled mask": f"--preset=qwen3 {MASK}",
    "compiled pack": f"{LLAMA} --documents=pack",
    "compiled mask with narrow heads": f"{LLAMA} --n_embd=32 {MASK}",
    "compiled recompute and mask": f"{LLAMA} --recompute=blocks {MASK}",
    "compiled muon": "--preset=qwen3 --optimizer=muon --average=0.5",
    "compiled adafactor": f"{LLAMA} --optimizer=adafactor --lr=0.03",
    "compiled batch_size auto": f"{LLAMA} --batch_size=auto",
}


@pytest.mark.parametrize("run", RUNS)
def test_one_simulated_gpu_trains(run, folder):
    output = trains("a100", 1, RUNS[run], folder, run.replace(" ", "_"))
    assert ("\ncompiled in " in output) == ("eager" not in run)


@pytest.mark.parametrize("gpu", ["h100", "rtx4090"])
@pytest.mark.parametrize("options", [EAGER, f"{LLAMA} {MASK}"])
def test_other_gpus_train(gpu, options, folder):
    trains(gpu, 1, options, folder, f"{gpu}_{options == EAGER}")


SHARDS = ["none", "optimizer", "gradients", "all"]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("how", [EAGER, "--compile=true"])
def test_two_simulated_gpus_train(shard, how, folder):
    options = f"{LLAMA} {how} --shard={shard} {MASK}"
    trains("h100", 2, options, folder, f"two_{shard}_{how == EAGER}")


@pytest.mark.parametrize("optimizer", ["adamw --recompute=blocks", "muon"])
def test_optimizers_train_in_shards(optimizer, folder):
    options = f"{LLAMA} {EAGER} --shard=all --optimizer={optimizer}"
    trains("a100", 2, options, folder, f"shards_{optimizer.split()[0]}")


@pytest.mark.parametrize("shard", ["none", "all"])
def test_six_simulated_gpus_train(shard, folder):
    options = f"{LLAMA} {EAGER} --batch_tokens=768 --shard={shard}"
    trains("a100", 6, options, folder, f"six_{shard}")


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_simulated_gpus(before, after, folder):
    run = f"from_{before}_to_{after}"
    trains("a100", before, EAGER, folder, run)
    trains("a100", after, f"{EAGER} --init_from=resume --max_steps=6", folder, run)


@pytest.mark.parametrize("config", sorted(path.name for path in (REPO / "config").glob("*.py")))
def test_each_config_trains(config, folder):
    """A config's own width, with two layers, one short sequence in a step, and not compiled."""
    own = "--dataset=small --device=cuda --compile=false --batch_size=1 --block_size=64"
    brief = "--batch_tokens=64 --max_tokens=0 --max_epochs=0 --max_steps=1 --n_layer=2 --overwrite"
    command = f"train.py {REPO}/config/{config} {own} {brief} --run_name=config"
    code, output = simulated("h100", 1, f"{command} --out_dir=configs", folder)
    shutil.rmtree(folder / "configs", ignore_errors=True)
    assert code == 0, output


@pytest.mark.parametrize("texts", [1, 32])
@pytest.mark.parametrize("options", ["", "--eval=data/small"])
def test_a_model_writes_on_a_simulated_gpu(texts, options, folder):
    if not (folder / "out/writer").exists():
        trains("a100", 1, f"{LLAMA} {EAGER}", folder, "writer")
    which = f"--ckpt=out/writer/ckpt/step_00000004 --num_samples={texts} --max_new_tokens=40"
    code, output = simulated("a100", 1, f"sample.py {which} --device=cuda {options}", folder)
    assert code == 0, output
    assert "\nwarning: " not in output, output


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("options", [EAGER, f"{MASK} --shard=all"])
def test_an_imported_model_trains(kind, options, folder):
    """Qwen2 has biases in its queries, keys and values; Llama 3 has scaled RoPE."""
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=400, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    if kind == "llama":
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5e5}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        shape |= {"rope_parameters": rope}
    config = transformers.AutoConfig.for_model(kind, **shape)
    model = folder / f"their_{kind}"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    processes = 2 if "shard" in options else 1
    trains("a100", processes, f"--init_from={model} {options}", folder, f"{kind}_{processes}")


TOOLS = {
    "plan --check": f"plan.py {SMALL} {LLAMA} --check",
    "plan --trial": f"plan.py {SMALL} {LLAMA} {EAGER} --trial",
    "sweep": f"-m bench.sweep {SMALL} --block_sizes 64 --batch_sizes 1 2 --accums 1 --seconds=0.1",
    "roof": f"-m bench.roof {SMALL} --compile=false --seconds=0.001",
    "compare": f"-m bench.compare {SMALL} {EAGER} --steps=4 --warmup=1 --rounds=1",
    "compare --sampling": f"-m bench.compare {SMALL} --sampling --max_new_tokens=8 --rounds=1",
    "roof --squares": "-m bench.roof --squares 64 128 --seconds=0.001",
    "by turns": f"-m bench.sweep {SMALL} {EAGER} --vary=optimizer,documents --rounds=1",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_measuring_runs_on_a_simulated_gpu(tool, folder):
    code, output = simulated("h100", 1, TOOLS[tool], folder)
    assert code == 0, output


@pytest.mark.parametrize(
    "options",
    ["--eager --configs minimind_26m --only bfloat16", "--compiled --configs demo --only float16"],
)
def test_the_predicted_peaks_are_those_of_the_allocator_within_5_percent(options):
    command = [sys.executable, REPO / "tests/simgpu/memory.py", *options.split()]
    ended = subprocess.run(command, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


# Those that compare numbers, or whose run depends on them.
NUMBERS = """
compiled_equals_eager bf16_computes_the_loss masked_documents greedy_tokens the_defaults_train
resume_is_bit_identical fp16_trains do_not_disturb_each_other attention_in_bf16 a_step_waits
""".split()


def test_the_tests_for_gpus_that_compare_no_numbers_pass():
    tests = ["-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py", "-k"]
    argv = [*tests, f"not ({' or '.join(NUMBERS)})"]
    ended = simulation.simulated("h100", 1, argv, REPO, timeout=900)
    assert ended.returncode == 0, ended.stdout
    assert "passed" in ended.stdout and "skipped" not in ended.stdout
