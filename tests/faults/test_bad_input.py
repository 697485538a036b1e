"""Wrong input ends in one line and exit code 2, without a traceback. Nothing is written or lost."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, TINY, forge, make_records, saved, train_tiny, write_jsonl

import bench.compare
import bench.init_scales
import bench.lab
import bench.prepare
import bench.roof
import bench.sweep
import plan
import plot
import prepare
import sample
import train


@pytest.fixture(scope="module")
def place(tiny_data, tmp_path_factory) -> dict[str, Path]:
    """Make what the tables below name in braces: a corpus, data sets, a finished run, and copies of
    them that are damaged or look as if another program wrote them.
    """
    root = tmp_path_factory.mktemp("place")
    shutil.copytree(tiny_data / "tiny", root / "data" / "tiny")
    train_tiny(root / "data", root / "out", "--max_steps=4")
    of_gpt2 = ["--max_steps=1", "--preset=gpt2", "--n_kv_head=0"]
    gpt2 = train_tiny(root / "data", root / "gpt2", *of_gpt2)
    ckpt = saved(root / "out" / "run")
    shutil.copytree(ckpt, root / "no_tokenizer")
    (root / "no_tokenizer" / "manifest.json").unlink()  # so that no hash of its files is checked
    (root / "no_tokenizer" / "tokenizer.model").unlink()
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    put_data_sets(root / "data")
    shutil.copytree(root / "out", root / "log")
    (root / "log" / "run" / "metrics.jsonl").write_text('{"step": 1, "lo\n{"step": 2}\n')
    write_jsonl(root / "corpus.jsonl", make_records(50))
    (root / "begun" / "run").mkdir(parents=True)
    (root / "begun" / "run" / "metrics.jsonl").write_text('{"step": 0, "settings": {}}\n')
    (root / "nul.py").write_text("run_name = 'a\\0b'\n")
    texts = {"empty.jsonl": "", "image.png": "", "one.txt": "x"}
    for name, text in (texts | {"clash.tiktoken": "YQ== 0\nYg== 0\n"}).items():
        (root / name).write_text(text)
    (root / "a_file").write_text("in the way")
    (root / "mine" / "run").mkdir(parents=True)
    (root / "mine" / "run" / "thesis.tex").write_text("precious")
    names = {name: root / name for name in ("data", "out", "mine", "log", "begun")}
    names |= {"root": root, "ckpt": ckpt, "corpus": root / "corpus.jsonl"}
    names |= {"gpt2": saved(gpt2)}
    return names | {"inits": REPO / "bench" / "questions" / "inits.py"}


def put_data_sets(data: Path) -> None:
    for name in ("again", "newer", "changed"):
        shutil.copytree(data / "tiny", data / name)
    meta = json.loads((data / "newer" / "meta.json").read_text())
    forge(data / "newer", "meta.json", json.dumps(meta | {"format_version": 99}).encode())
    val = np.memmap(data / "changed" / "val.bin", dtype=np.uint16, mode="r+")
    val[77] ^= 1  # another token: only its hash tells


# Options of each script -> what its message must name: the option, the file or the value.
TRAIN = {
    "--dropout=1": "dropout",
    "--max_steps=0": "max_steps",
    "--run_name=.. --overwrite": "run_name '..'",
    "{root}/nul.py": "run_name",
    "{root}/demoo.py": "demoo.py",
    f"--batch_tokens={'1' * 400}": "batch_tokens",
    "--device=banana": "device=banana",
    "--dtype=float16 --device=cpu": "dtype=float16",
    "--n_embd=36": "head_dim=9",
    "--n_layer=100000": "<= 1000",
    "--block_size=999999": "block_size=999999",
    "--batch_size=9000000 --batch_tokens=300_000_000": "batch_size=9000000 needs",
    "--n_embd=400000 --n_layer=400": "n_layer or n_embd",
    f"--d_ff={9 * 10**18}": "out of memory",
    "--dataset=nothing": "{data}/nothing",
    "--schedule=wsd --warmup_ratio=0.9": "decay_ratio",
    "--shard=all --optimizer=adafactor": "shard=all",
    "--loss_on=answers": "tiny/train.bin has no answers for loss_on=answers",
    "--dataset=newer": "newer",
    "--data_dir={root}/a_file": "a_file/tiny/meta.json",
    "--init_from=resume": "{new}/run/ckpt",
    "--init_from=nowhere": "nowhere: not a model folder on this disk",
    "--init_from={root}/no_tokenizer": "no_tokenizer/tokenizer.model",
    "--init_from={root}/adapter --max_steps=0": "merge_and_unload()",
    "--init_from={gpt2} --block_size=64": "block_size=64",
    "--init_from={gpt2} --rope_scaling=linear:2": "rope",
    "--out_dir={out}": "--overwrite",
    "--out_dir={out} --init_from=resume --optimizer=muon": "optimizer was adamw, is muon",
    "--out_dir={log} --init_from=resume --max_steps=9": "metrics.jsonl:1",
}
SAMPLE = {
    "--ckpt=nowhere": "--ckpt nowhere: no such folder",
    "--ckpt={root}/no_tokenizer": "no_tokenizer/tokenizer.model",
    "--ckpt={root}/adapter": "merge_and_unload()",
    "--tokenizer=nothing": "--tokenizer nothing",
    "--eval={data}/nothing": "{data}/nothing",
    "--eval={data}/changed": "changed/val.bin",
    "--eval={data}/tiny --block_size=64": "--block_size 64",
    "--eval={data}/tiny --batch_size=0 --eval_tokens=-1": "batch_size",
    f"--prompt={'long' * 99}": "31",
    "--prompt=a --interactive": "interactive",
    "--chat --interactive": "chat",
    "--chat --num_samples=2": "chat",
    "--chat --eval=x": "chat",
    "--system=x": "--chat",
    "--temperature=-1": "temperature",
    "hello": "--key=value",
}
PREPARE = {
    "--input nowhere.jsonl": "nowhere.jsonl",
    "--input {mine}": "{mine}",
    "--input {root}/image.png": "image.png: unknown kind",
    "--input {root}/one.txt --tokenizer=byte": "--val_fraction",
    "--input {root}/empty.jsonl": "the input is empty",
    "--input {corpus} -": "--input -",
    "--input {corpus} --tokenizer={root}/clash.tiktoken": "clash.tiktoken",
    "--input {corpus} --tokenizer={root}/none.model": "not a SentencePiece model",
    "--input {corpus} --encoding=klingon": "encoding",
    "--input=": "input",
    "--input {corpus} --tokenizer=gpt9": "gpt9",
    "--input {corpus} --vocab_size=400 --min_tokens=100000": "document",
    "--input": "--input",
    "--inspect {out}/run --step=5": "--step=5",
    "--inspect {out}/run": "add --step",
    "--name=a/b": "name",
    "--inspect {data}/tiny --step=3": "--step",
    "en.jsonl": "--key=value",
}
PLOT = {
    "": "out/",
    "{mine}/run": "metrics.jsonl",
    "{log}/run {out}/run": "metrics.jsonl:1",
    "{begun}/run": "metrics.jsonl",
    "{out}/run --png=loss.gif": "png='loss.gif'",
}
BENCH_PREPARE = {
    "nowhere.jsonl": "nowhere.jsonl",
    "{corpus} --rounds=0": "rounds",
}
COMPARE = {
    "--hf --warmup=30": "warmup",
    "--recipe=--max_iters=4": "nanogpt=",
    "--nanogpt={mine} --recipe=banana": "--max_iters",
}
ROOF = {
    "--squares 0": "squares",
}
SWEEP = {
    "--batch_size=auto": "batch_size",
    "--vary T C": "'C'",
}
SCALES = {"--inits gpt2 magic": "'magic'"}
LAB = {
    "": "bench/questions/optimizers.py",
    "gone.py": "config file gone.py",
    "{inits} --baseline=banana": "'banana'",
}
PLAN = {
    "--gpu=a99 --max_steps=1 --vocab_size=9": "gpu: 'a99'",
    "--gpu=v100-16g --dtype=bfloat16 --max_steps=1 --vocab_size=9": "dtype=bfloat16",
    "--nproc=0 --max_steps=1": "nproc",
    "--gpu=h100": "max_steps",
    "--gpu=h100 --max_epochs=1 --dataset=gone": "gone",
    "--data_dir={data} --dataset=tiny --max_steps=1 --loss_on=answers": "tiny/train.bin",
}
TABLES = [(train, TRAIN), (sample, SAMPLE), (prepare, PREPARE), (bench.prepare, BENCH_PREPARE)]
TABLES += [(plan, PLAN), (bench.sweep, SWEEP), (bench.roof, ROOF), (bench.compare, COMPARE)]
TABLES += [(plot, PLOT), (bench.lab, LAB), (bench.init_scales, SCALES)]
TABLE = [(script, *row) for script, rows in TABLES for row in rows.items()]
IDS = [f"{script.__name__} {line}" for script, line, _ in TABLE]


def files(place: dict[str, Path]) -> set[tuple]:
    return {(p, p.stat().st_mtime_ns) for p in place["root"].rglob("*") if p.is_file()}


@pytest.mark.parametrize("script, line, message", TABLE, ids=IDS)
def test_bad_input_gets_one_line_and_changes_nothing(
    place, tmp_path, refuses, monkeypatch, script, line, message
):
    names = place | {"new": tmp_path}
    argv = [word.format(**names) for word in line.split()]
    before = files(place)
    if script is train:
        argv = [*TINY, f"--data_dir={place['data']}", f"--out_dir={tmp_path}", *argv]
    elif script is sample:
        argv = [f"--out_dir={place['out']}", "--device=cpu", *argv]
    elif script is prepare:
        name = [] if "--name" in line else ["--name=tiny"]  # which stays as it is
        argv = [f"--data_dir={place['data']}", *name, *argv]
    monkeypatch.chdir(tmp_path)
    assert message.format(**names) in refuses(script.main, *argv)
    assert files(place) == before and not [*filter(Path.is_file, tmp_path.rglob("[!.]*"))]
