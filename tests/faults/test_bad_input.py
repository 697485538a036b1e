"""Wrong input ends in one line and exit code 2, without a traceback. Nothing is written or lost."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, TINY, forge, make_records, train_tiny, write_jsonl
from safetensors.torch import save_file

import bench.compare
import bench.lab
import bench.prepare
import bench.roof
import bench.sweep
import plan
import plot
import prepare
import sample
import train
from hardware.disk import file_sha256
from training.runs import newest_checkpoint


@pytest.fixture(scope="module")
def place(tiny_data, tmp_path_factory) -> dict[str, Path]:
    """Make what the tables below name in braces: a corpus, data sets, a finished run, and copies of
    them that are damaged or look as if another program wrote them.
    """
    root = tmp_path_factory.mktemp("place")
    shutil.copytree(tiny_data / "tiny", root / "data" / "tiny")
    train_tiny(root / "data", root / "out", "--max_steps=4")
    gpt2 = train_tiny(
        root / "data", root / "gpt2", "--max_steps=1", "--preset=gpt2", "--n_kv_head=0"
    )
    ckpt = newest_checkpoint(root / "out" / "run" / "ckpt")
    put_checkpoints(root, ckpt)
    put_data_sets(root / "data")
    shutil.copytree(root / "out" / "run" / "ckpt", root / "only_ckpt" / "run" / "ckpt")
    shutil.copytree(root / "out", root / "log")
    (root / "log" / "run" / "metrics.jsonl").write_text('{"step": 1, "lo\n{"step": 2}\n')
    write_jsonl(root / "corpus.jsonl", make_records(50))
    (root / "begun" / "run").mkdir(parents=True)
    (root / "begun" / "run" / "metrics.jsonl").write_text('{"step": 0, "settings": {}}\n')
    (root / "syntax.py").write_text("n_layer = 2\nn_head = (\n")
    (root / "crash.py").write_text("n_layer = 2\nn_head = 1 / 0\n")
    (root / "unknown.py").write_text("n_layers = 2\n")
    (root / "typed.py").write_text("lr = 'high'\n")
    (root / "nul.py").write_text("run_name = 'a\\0b'\n")
    (root / "blank.txt").write_text(" \n")
    (root / "long.txt").write_text("the loop reads tokens " * 50)
    (root / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (root / "a_file").write_text("in the way")
    (root / "mine" / "run").mkdir(parents=True)
    (root / "mine" / "run" / "thesis.tex").write_text("precious")
    names = {name: root / name for name in ("data", "out", "mine", "log", "begun")}
    names |= {"root": root, "ckpt": ckpt, "corpus": root / "corpus.jsonl"}
    names |= {"gpt2": newest_checkpoint(gpt2 / "ckpt")}
    return names | {"inits": REPO / "bench" / "questions" / "inits.py"}


def put_checkpoints(root: Path, ckpt: Path) -> None:
    def relative(name: str) -> Path:
        """Copy the checkpoint without its manifest, so that no hash of its files is checked."""
        copy = Path(shutil.copytree(ckpt, root / name))
        (copy / "manifest.json").unlink()
        return copy

    os.truncate(relative("cut") / "model.safetensors", 1000)
    (relative("bert") / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    (relative("empty_config") / "config.json").write_text("")
    (relative("pickled") / "model.safetensors").rename(root / "pickled" / "pytorch_model.bin")
    save_file({"other.weight": torch.zeros(2, 2)}, relative("other_names") / "model.safetensors")
    (relative("no_tokenizer") / "tokenizer.model").unlink()
    for name in ("no_tokens", "odd_tokens"):  # like folders of other programs
        relative(name)
        for file in ("meta.json", "tokenizer.model", "tokenizer.json"):
            (root / name / file).unlink()
    bpe = {"type": "BPE", "vocab": 7, "merges": []}
    odd = {"model": bpe, "pre_tokenizer": {"type": "ByteLevel"}}
    (root / "odd_tokens" / "tokenizer.json").write_text(json.dumps(odd))
    scaled = json.loads((ckpt / "config.json").read_text())
    scaled["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}
    (relative("yarn") / "config.json").write_text(json.dumps(scaled))


def put_data_sets(data: Path) -> None:
    other, _, newer, large = (
        Path(shutil.copytree(data / "tiny", data / name))
        for name in ("other", "again", "newer", "large")
    )
    # `other` has another tokenizer.
    meta = json.loads((other / "meta.json").read_text())
    (other / "tokenizer.model").write_bytes(b"\n\x00" + (other / "tokenizer.model").read_bytes())
    meta["tokenizer"]["sha256"] = file_sha256(other / "tokenizer.model")
    meta["tokenizer"]["files"]["tokenizer.model"] = meta["tokenizer"]["sha256"]
    forge(other, "meta.json", json.dumps(meta).encode())
    forge(newer, "meta.json", json.dumps(meta | {"format_version": 99}).encode())
    np.memmap(large / "train.bin", dtype=np.uint16, mode="r+")[77] = 400


PICKLED = (
    "pickled: cannot be loaded (model.safetensors: the weights are pickled (pytorch_model.bin)"
)
# Options of each script -> a part of the message.
TRAIN = {
    "--n_layers=3": "--n_layers: unknown setting 'n_layers'; did you mean 'n_layer'?",
    "--n_layer=three": "n_layer='three' is not accepted; it takes int",
    "--n_layer=0 --lr=-1": "n_layer must be positive; lr must be positive",
    "--learning_rate=1e-4": "'learning_rate'; here it is lr",
    "--per_device_train_batch_size=4": "here it is batch_size",
    "--gradient_accumulation_steps 4 --lr=1": "here it is batch_tokens",
    "--save_steps=500": "here it is save_every",
    "--eval_interval=500": "here it is eval_every",
    "--max_length=500": "here it is block_size",
    "--bf16 true": "here it is dtype=bfloat16",
    "--gradient_checkpointing": "here it is recompute=blocks",
    "--lr": "--lr: a value is missing; it takes float",
    "--lr=nan": "lr='nan' is not accepted",
    "--lr=inf": "lr='inf' is not accepted; it takes float",
    "--preset=bert": "preset='bert' is not accepted",
    "--init=magic": "init='magic' is not accepted",
    "--dropout=1": "dropout must be at least 0 and below 1",
    "--beta2=1": "beta2 must be at least 0 and below 1",
    "--min_lr_ratio=2": "min_lr_ratio must be between 0 and 1",
    "--seed=-1": "seed must be at least 0",
    "--seed=8e18": "and below 2^62",
    "--seed=1e30": "seed='1e30' is not accepted; it takes int",
    "--max_steps=0": "the run has no end: set max_steps, max_epochs or max_tokens",
    "--run_name=.": "run_name '.' must be a plain folder name",
    "--run_name=.. --overwrite": "run_name '..' must be a plain folder name",
    "{root}/nul.py": "run_name='a\\x00b' is not accepted; it takes text",
    f"--batch_tokens={'1' * 400}": "is not accepted; it takes int",
    "--device=meta": "device=meta: not usable here",
    "--run_name=": "run_name '' must be a plain folder name",
    "--run_name=../data": "run_name '../data' must be a plain folder name",
    "-n 3": "argument '-n': expected config/NAME.py or --key=value",
    "nowhere": "argument 'nowhere': expected config/NAME.py or --key=value",
    "config/nowhere.py": "config file config/nowhere.py: No such file or directory",
    "{root}/syntax.py": "syntax.py, line 2: SyntaxError: '(' was never closed",
    "{root}/crash.py": "crash.py, line 2: ZeroDivisionError: division by zero",
    "{root}/unknown.py": "unknown.py: unknown setting 'n_layers'; did you mean 'n_layer'?",
    "{root}/typed.py": "typed.py: lr='high' is not accepted; it takes float",
    "--n_embd=33": "n_embd=33 is not a multiple of n_head=4",
    "--n_kv_head=3": "n_head=4 must be a multiple of n_kv_head=3",
    "--n_embd=36": "head_dim=9 must be even",
    "--block_size=999999": "block_size=999999 needs 1000000",
    "--n_embd=400000 --n_layer=400": (
        "out of memory for the weights alone: make n_layer or n_embd smaller"
    ),
    f"--d_ff={9 * 10**18}": "out of memory for the weights alone",
    f"--n_embd={4 * 10**18}": "out of memory for the weights alone",
    "--dtype=float16 --device=cpu": "dtype=float16 needs a CUDA device",
    "--dtype=int8": "dtype='int8' is not accepted; it takes auto|bfloat16|float16|float32",
    "--device=banana": "device=banana: not usable here",
    "--dataset=nothing": "no data set in {data}/nothing",
    "--dataset=tiny:0": "expected NAME, or NAME:WEIGHT,NAME:WEIGHT with weights above 0",
    "--dataset=tiny,tiny": "expected NAME, or NAME:WEIGHT",
    "--dataset=tiny:0.5,other": "give every data set a weight, or none",
    "--dataset=tiny,other": "other was made with another tokenizer than tiny",
    "--dataset=newer": "newer: format 99, expected 2",
    "--dataset=large": "large/train.bin: token 77 has id 400, beyond the vocabulary of 400",
    "--data_dir={root}/a_file": "a_file/tiny/meta.json: Not a directory",
    "--init_from=resume": "there is no checkpoint in {new}/run/ckpt; name another run",
    "--init_from=nowhere": "init_from=nowhere: cannot be loaded (config.json: No such file",
    "--init_from={gpt2} --block_size=64": "learned positions for 32 tokens, and no others",
    "--init_from={gpt2} --rope_scaling=linear:2": "needs pos=rope",
    "--init_from={root}/cut": "cut: cannot be loaded (model.safetensors: ",
    "--init_from={root}/bert": (
        "bert: cannot be loaded (config.json: architecture 'BertModel' is none of"
    ),
    "--init_from={root}/empty_config": "empty_config: cannot be loaded (config.json: ",
    "--init_from={root}/pickled": PICKLED,
    "--init_from={root}/other_names": "other_names: cannot be loaded (model.safetensors: ",
    "--init_from={root}/yarn": "yarn: cannot be loaded (config.json: rope_scaling",
    "--out_dir={out}": "{out}/run holds an earlier run: --init_from=resume goes on with it",
    "--out_dir={out} --init_from={ckpt} --overwrite": "--overwrite would move {ckpt}",
    "--out_dir={out} --init_from=resume --n_layer=3": "n_layer is 2 there, 3 here",
    "--out_dir={root}/only_ckpt": "{root}/only_ckpt/run holds an earlier run",
    "--out_dir={out} --init_from=resume --dataset=again": (
        "other data: again/train.bin is missing there"
    ),
    "--out_dir={root}/a_file": "a_file/run: Not a directory",
    "--out_dir={mine} --overwrite": "mine/run holds 'thesis.tex' and is not the folder of a run",
    "--out_dir={log} --init_from=resume --max_steps=9": (
        "metrics.jsonl:1: damaged; delete this line"
    ),
}
SAMPLE = {
    "--ckpt=nowhere": "--ckpt nowhere: no checkpoint there",
    "--ckpt={root}": "no checkpoint there (a folder with config.json and model.safetensors, or",
    "--out_dir={mine}": "no checkpoint under {mine}/: train one first",
    "--ckpt={root}/cut": "cut: cannot be loaded (model.safetensors: ",
    "--ckpt={root}/bert": "'BertModel' is none of",
    "--ckpt={root}/empty_config": "empty_config: cannot be loaded (config.json: ",
    "--ckpt={root}/pickled": PICKLED,
    "--ckpt={root}/no_tokenizer": "no_tokenizer/tokenizer.model: missing, or not the tokenizer",
    "--ckpt={root}/no_tokens": "no_tokens: no tokenizer is there: name one, as in --tokenizer=gpt2",
    "--ckpt={root}/odd_tokens": "odd_tokens: its tokenizer files cannot be used (TypeError",
    "--tokenizer=nothing": "--tokenizer nothing: no such file, and no tiktoken encoding",
    "--eval={data}/nothing": "no data set in {data}/nothing",
    "--eval={data}/tiny --block_size=64": "--block_size 64: the model sees 32 tokens",
    "--eval={data}/tiny --batch_size=0 --eval_tokens=-1": (
        "batch_size must be positive; eval_tokens must not be negative"
    ),
    "--prompt_file=nowhere": "nowhere: No such file or directory",
    "--prompt_file={root}/blank.txt": "blank.txt: holds no text",
    "--prompt_file={root}/latin.txt": "latin.txt: not UTF-8 (invalid continuation byte at byte 2)",
    "--prompt_file={root}/long.txt": "tokens, the model sees 31: shorten it",
    "--prompt=a --prompt_file=b": "give one of prompt, prompt_file and interactive",
    "--interactive --prompt=a": "give one of prompt, prompt_file and interactive",
    "--temperature=-1": "temperature must not be negative",
    "--top_k=-1": "top_k must not be negative",
    "--top_p=0": "top_p must be above 0 and at most 1",
    "--num_samples=0 --max_new_tokens=-1": (
        "num_samples must be positive; max_new_tokens must not be negative"
    ),
    "--seed=-1": "seed must be between 0 and 2^63",
    "--device=banana": "--device=banana: not usable here",
    "--dtype=float64": "it takes auto|bfloat16|float16|float32",
    "--promt=a": "did you mean 'prompt'?",
    "hello": "argument 'hello': expected --prompt TEXT or --key=value",
}
PREPARE = {
    "--input nowhere.jsonl": "nowhere.jsonl: no such file",
    "--input {mine}": "has no file that ends in .jsonl",
    "--input {corpus} --encoding=klingon": "encoding",
    "--input {root}/latin.txt": "latin.txt: byte 0xef is not of its encoding: say --encoding",
    "--input {corpus} --fields=body": "body",
    "--input {corpus} --format=pdf": "format='pdf' is not accepted",
    "--input {corpus} --tokenizer=gpt9": "gpt9: no such file, and no tiktoken encoding",
    "--input {corpus} --vocab_size=50000": "--vocab_size=50000: too large for this input",
    "--input {corpus} --vocab_size=10": "vocab_size must be at least 260: 256 bytes and more",
    "--input {corpus} --vocab_size=400 --min_tokens=100000": "no documents",
    "--input": "--input: a value is missing; it takes text ...",
    "--workers=-1": "workers and min_tokens must not be negative",
    "--val_fraction=0": "val_fraction must be between 0 and 1, both excluded",
    "--max_bad=2": "max_bad must be between 0 and 1",
    "--max_record_mb=0": "max_record_mb must be between 0.001 and 1,000,000",
    "--inspect {out}/run --step=0": "steps count from 1",
    "--inspect {out}/run --step=5": "--step=5: the run ends with step 4",
    "--name=a/b": "must be a plain folder name",
    "--inspect nowhere": "no data set in nowhere",
    "--inspect {data}/tiny --show=banana": "show must be first, random or the number of a token",
    "--inspect {data}/tiny --show=99999999": "99999999",
    "--inspect {data}/tiny --step=3": "--step needs the folder of a run",
    "en.jsonl": "argument 'en.jsonl': expected --input FILE or --key=value",
    "--inspect {data}/large": "token 77 has id 400",
}
PLOT = {
    "": "no run under out/: train one first",
    "{mine}/run": "no metrics.jsonl there: name the folder of a run",
    "{log}/run {out}/run": "metrics.jsonl:1: damaged; delete this line",
    "{begun}/run": "metrics.jsonl: no loss in it yet",
    "{out}/run --png=loss.gif": "png='loss.gif' must end in .png, .pdf or .svg",
    "{out}/run --x=epochs": "x='epochs' is not accepted; it takes steps|tokens|time",
    "{out}/run -x": "argument '-x': expected --key=value",
}
BENCH_PREPARE = {
    "nowhere.jsonl": "nowhere.jsonl",
    "{corpus} --rounds=0": "rounds must be positive",
}
COMPARE = {
    "--nanogpt=gone": "nanogpt=gone",
    "--batch_size=auto": "batch_size=auto",
    "--nanogpt={mine}": "nanogpt={mine}",
    "--hf --warmup=29": "warmup",
    "--dataset=tiny --data_dir={data} --hf --device=banana": "--device=banana",
    "--recipe=--max_iters=4": "nanogpt=",
    "--nanogpt={mine} --recipe=banana": "--max_iters",
    "--nanogpt={mine} --recipe=--max_iters=4 --hf": "hf",
}
ROOF = {
    "--batch_size=auto": "batch_size=auto",
    "--vocab_size=0 --seconds=0": "vocab_size must be positive; seconds must be positive",
    "--squares 0": "squares",
    "--tokens=-1": "tokens",
    "--tokens=1000": "tokens",
    "--n_embd=50": "n_embd=50",
    "--device=banana": "device=banana",
    "--json=nowhere/roof.json": "json=nowhere/roof.json",
}
SWEEP = {
    "--batch_size=auto": "batch_size=auto",
    "--vary=T,C": "vary: 'C'",
    "--vary=": "vary: ''",
    "--block_sizes 8 0 --accums 0": "block_sizes must be positive; accums must be positive",
    "--batch_sizes 8 -1": "batch_sizes",
    "--batch_sizes=8,16": "batch_sizes=['8,16']",
    "--steps=0 --warmup=0 --seconds=0": "warmup must be positive; steps must be positive; seconds",
    "--n_layer=0": "n_layer must be positive",
    "--n_embd=33 --n_head=4": "n_embd=33",
    "--dtype=float16 --device=cpu": "dtype=float16 needs a CUDA device",
    "--json={root}/a_file/x": "json={root}/a_file/x",
    "--markdown={root}/gone/x": "markdown={root}/gone/x",
}
LAB = {
    "": "give a file with a question and variants: bench/questions/optimizers.py",
    "gone.py": "config file gone.py: No such file",
    "{inits} --only banana": "'banana' is none of the variants: gpt2, llama",
    "{inits} --baseline=banana": "'banana' is none of the variants: gpt2, llama",
    "{inits} --seeds 1 2 1": "seeds must be different numbers, and not negative",
    "{inits} --lengths 1 0": "lengths must be positive",
    "{inits} --seed=5": "seed: lab.py gives it to each run",
    "{inits} --variants=3": "variants='3' is not accepted; it takes {{...}}",
    "{inits} --config=gone.py": "gone.py: No such file",
    "{inits} --markdown=gone/inits.md": "markdown=gone/inits.md: no such folder",
    "{inits} --n_layer=0": "variant 'gpt2': n_layer must be positive",
    "{inits} --data_dir={data} --dataset=gone": "no data set in",
}
PLAN = {
    "--devices=8": "here it is nproc",
    "--tok_s=9e4": "here it is peak_tflops",
    "--tokens=10B": "it takes float, written in full, such as 10_000_000_000",
    "--gpu=a99 --max_steps=1": "gpu: 'a99' is not in the table of GPUs; the nearest is",
    "--gpu=v100-16g --dtype=bfloat16 --max_steps=1": "dtype=bfloat16: V100 has no",
    "--gpu=h100 --trial --max_steps=1": "leave gpu out",
    "--nproc=0 --tokens=-1 --max_steps=1": "tokens must not be negative; nproc must be positive",
    "--days=-1 --max_steps=1": "days must not be negative",
    "--examples=9 --max_steps=1": "give max_epochs",
    "--examples=9 --max_epochs=1 --dataset=tiny": "no dataset",
    "--gpu=h100": "the run has no end: set max_steps, max_epochs or max_tokens",
    "--gpu=h100 --max_epochs=1 --dataset=gone": "no data set in",
    "--gpu=h100 --max_steps=1 --batch_size=many": (
        "batch_size='many' is not accepted; it takes int|auto"
    ),
}
TABLES = [(train, TRAIN), (sample, SAMPLE), (prepare, PREPARE), (bench.prepare, BENCH_PREPARE)]
TABLES += [(plan, PLAN), (bench.sweep, SWEEP), (bench.roof, ROOF), (bench.compare, COMPARE)]
TABLES += [(plot, PLOT), (bench.lab, LAB)]
TABLE = [(script, *row) for script, rows in TABLES for row in rows.items()]
IDS = [f"{script.__name__} {line}" for script, line, _ in TABLE]


def files(place: dict[str, Path]) -> set[tuple]:
    return {(p, p.stat().st_mtime_ns) for p in place["root"].rglob("*") if p.is_file()}


@pytest.mark.parametrize("script, line, message", TABLE, ids=IDS)
def test_bad_input_is_answered_by_one_line_and_changes_nothing(
    place, tmp_path, refuses, monkeypatch, script, line, message
):
    names = place | {"new": tmp_path}
    argv = line.format(**names).split()
    before = files(place)
    if script is train:
        argv = [*TINY, f"--data_dir={place['data']}", f"--out_dir={tmp_path}", *argv]
    elif script is sample:
        argv = [f"--out_dir={place['out']}", "--device=cpu", *argv]
    elif script is prepare:
        name = [] if "--name" in line else ["--name=new"]
        argv = [f"--data_dir={place['data']}", *name, *argv]
    monkeypatch.chdir(tmp_path)
    assert message.format(**names) in refuses(script.main, *argv)
    assert files(place) == before and not os.listdir(tmp_path)


def test_the_table_is_long_enough():
    assert len(TABLE) >= 100
