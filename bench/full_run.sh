#!/usr/bin/env bash
# The full-size run as a user makes it: the code on this machine, prepared; the 26M model on 500M
# tokens, stopped once by Ctrl-C and resumed; conversations and answers; the model with AdamW and
# nanoGPT's settings. After LIMIT seconds (540) Ctrl-C stops it; the same command then goes on.
#   OUT=results bash bench/full_run.sh
#   TOKENS=200000000 OUT=results bash bench/full_run.sh   # in one call; TOY=1: on a CPU, to try it
set -uo pipefail && cd "$(dirname "$0")/.." || exit
mkdir -p "${OUT:?where to? OUT=results bash bench/full_run.sh}"
exec > >(tee -a "$OUT/full.log") 2>&1 # summary.txt and loss.png are written there, too
PYTHON=${PYTHON:-python3} TOY=${TOY:-} W=${WORK:-out/full${TOY:+_toy}} END=$((SECONDS + ${LIMIT:-540}))
PLACE=(--data_dir="$W/data" --out_dir="$W/out") SIZE=(--batch_size=128) PAUSE=100
if [ -n "$TOY" ]; then
    SIZE=(--device=cpu --n_layer=1 --n_embd=64 --d_ff=128 --block_size=64 --compile=false) PAUSE=12
    SIZE+=(--dtype=float32 --batch_size=4 --batch_tokens=512 --eval_every=50 --eval_tokens=4096)
fi
step() { # step NAME COMMAND...: run it, unless an earlier call has done so; say how long it took
    local begun=$SECONDS left=$((END - SECONDS))
    [ ! -e "$W/$1.done" ] || return 0
    echo "---- $1, at $SECONDS s: ${*:2}"
    [ "$left" -gt 5 ] && timeout --foreground -s INT $left "${@:2}" || return 1
    echo "$1: $((SECONDS - begun)) s" >"$W/$1.done"
}
trained() { # trained NAME OPTIONS...: the run NAME, stopped once by Ctrl-C, and resumed
    local command=($PYTHON train.py "${@:2}" --run_name="$1" "${PLACE[@]}" "${SIZE[@]}")
    [ -e "$W/out/$1" ] || timeout --foreground -s INT $PAUSE "${command[@]}" | tee "$W/$1.log"
    step "$1" "${command[@]}" --init_from=auto # goes on, or begins if it came to no step
}
mkdir -p "$W" && mapfile -t FILES < <($PYTHON - "${TOY:+[a-i]*/}" <<'PY'
import glob, importlib.util, pathlib, sys, sysconfig
site = str(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])
std = sysconfig.get_paths()["stdlib"]
roots = [std] if sys.argv[1] or site.startswith(std + "/") else [site, std]
ends = [f"{root}/{sys.argv[1]}**/*.{end}" for root in roots for end in ("py", "pyi", "h", "hpp")]
print(*(e for e in ends if next(glob.iglob(e, recursive=True), None)), sep="\n")
PY
)
TOKENS=${TOKENS:-$([ -n "$TOY" ] && echo 60000 || echo 500000000)}
RUN=(config/minimind_26m.py --dataset=source --max_tokens="$TOKENS" --sample_prompt="def ")
step source $PYTHON prepare.py --input "${FILES[@]}" --format=txt --name=source --vocab_size=6400 \
    --data_dir="$W/data" ${TOY:+--vocab_size=1000 --train_mb=1}
step talks $PYTHON prepare.py --chat --tokenizer="$W/data/source" --val_fraction=0.05 "${PLACE[0]}"
trained muon "${RUN[@]}"
step chat $PYTHON train.py config/chat_26m.py --dataset=chat --init_from="$W/out/muon" --overwrite \
    --sample_prompt="Explain os.path.join." "${PLACE[@]}" "${SIZE[@]}" ${TOY:+--max_steps=30}
trained adamw "${RUN[@]}" --optimizer=adamw --lr=6e-4 --vector_lr=1 --weight_decay=0.1 \
    --beta2=0.95 --schedule=cosine --min_lr_ratio=0.1
{ # what the runs have come to, five texts, and three answers
    WAY=(${TOY:+--device=cpu} --max_new_tokens=100)
    cat "$W"/*.done && grep -E "(memory|data|batch): " "$W/muon.log"
    $PYTHON -c 'import json, sys
for path in sys.argv[1:]:
    last = {key: value for line in open(path) for key, value in json.loads(line).items()}
    last = [last.get(key) for key in ("tokens_per_s", "memory_gb", "val_loss", "val_bits_per_byte")]
    print(path, "tokens/s {:.0f}, memory {:.2f} GB, loss {:.4f}, bits per byte {:.4f}".format(*last))
' "$W"/out/*/metrics.jsonl
    $PYTHON sample.py --ckpt "$W/out/muon" "${WAY[@]}" --prompt "def " "class A(" "import " "#" "if "
    $PYTHON sample.py --ckpt "$W/out/chat_26m" --chat --temperature 0 "${WAY[@]}" --prompt \
        "Explain os.path.join." "What does os.path.exists do?" "Tell me about shutil.copytree."
} 2>&1 | tee "$OUT/summary.txt"
$PYTHON plot.py "$W/out/muon" "$W/out/adamw" --x tokens --png "$OUT/loss.png"
