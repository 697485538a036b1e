#!/usr/bin/env bash
# Every figure that needs a GPU, the most telling first, for under nine minutes; nothing is installed, nothing downloaded. What then
# found no time is named, with the command for another call.
#
#   OUT=results bash bench/gpu_suite.sh                  # all parts
#   OUT=results bash bench/gpu_suite.sh roof small       # some of them: roof gpt2 large small hf sampling tests sweep
#   NANOGPT=../nanoGPT OUT=results bash bench/gpu_suite.sh    # nanoGPT beside ours, where a checkout of it is at hand
#   TOY=1 OUT=results bash bench/gpu_suite.sh            # every command with a toy model on the CPU, to see that they run
#
# It leaves eight files in OUT: suite.log (all that was printed), roof.json, gpt2.json, models.json, hf.json, sampling.json,
# sweep.json, sweep.md. Where a part failed or found no time left, the exit code is 1.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?where to? OUT=results bash bench/gpu_suite.sh}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd)
WORK=$(mktemp -d) && trap 'rm -rf "$WORK"' EXIT
export TMPDIR=$WORK # a killed part leaves its files there; and what torch compiled for one part is there for the next
exec > >(tee -a "$OUT/suite.log") 2>&1 # -a: another call adds to it
PYTHON=${PYTHON:-python3}
DEADLINE=$((SECONDS + 520))
FAILED=() LATER=()

NANO=(${NANOGPT:+--nanogpt="$NANOGPT"})
TOY=${TOY:-}
if [ -n "$TOY" ]; then # the last of equal options counts
    SHRINK=(--device=cpu --n_layer=2 --n_head=2 --n_kv_head=0 --n_embd=32 --head_dim=0 --block_size=32 --batch_size=2 --batch_tokens=128)
    BRIEF=(--steps=4 --warmup=1 --rounds=1 --compile=false)
    TOY_SAMPLING=(--num_samples=2 --max_new_tokens=8)
    TOY_SWEEP=(--block_sizes 1 16 --batch_sizes 1 2 --accums 1 2 --seconds=0.1)
    TOY_ROOF=(--seconds=0.001)
fi

# part NAME SECONDS COMMAND...: run it if time is left for it, and for so long at most; KILL takes its children along, TERM would let them save.
part() {
    local name=$1 limit=$2 left=$((DEADLINE - SECONDS)) whole=${1%_*} code
    shift 2
    if [ "$left" -lt 20 ]; then
        echo "---- $name: no time left"
    else
        echo && echo "---- $name, at $SECONDS s: $*"
        timeout -s KILL "$((limit < left ? limit : left))" "$@" && return
        code=$?
        if [ "$code" -ne 137 ] || [ "$limit" -le "$left" ]; then
            FAILED+=("$name (exit code $code)")
            return
        fi
    fi
    [[ " ${LATER[*]-} " == *" $whole "* ]] || LATER+=("$whole") # not begun, or cut short
}

# dataset V: a data set for a model with a vocabulary of V. The speed depends on the shapes alone, so that the demo corpus and its
# tokens below 4,096 do for every V.
dataset() {
    [ -e "$WORK/demo/meta.json" ] || $PYTHON prepare.py --data_dir="$WORK" ${TOY:+--vocab_size=600} >"$WORK/prepare.log" || cat "$WORK/prepare.log"
    $PYTHON - "$WORK" "$1" <<'PY'
import pathlib, shutil, sys
from hardware.disk import json_bytes, read_object, sealed
folder, V = pathlib.Path(sys.argv[1]), int(sys.argv[2])
to = folder / f"v{V}"
if not to.exists():
    shutil.copytree(folder / "demo", to)
    meta = read_object(to / "meta.json") | {"vocab_size": V}
    (to / "meta.json").write_bytes(json_bytes(sealed(meta)))
PY
}

# train PART SECONDS V JSON OPTIONS...: tokens/s, TFLOPS and MFU of training by an outside clock, beside peers if options name them.
train() {
    local name=$1 limit=$2 V=$3 json=$4
    shift 4
    dataset "$V"
    part "$name" "$limit" $PYTHON bench/compare.py "$@" --data_dir="$WORK" --dataset="v$V" --json="$json" ${TOY:+"${SHRINK[@]}" "${BRIEF[@]}"}
}

tests() { part tests 480 $PYTHON -m pytest -v --tb=short -m gpu -rs tests; } # -v: the names are there even if it is killed
roof() { part roof 90 $PYTHON bench/roof.py config/gpt2_124m.py --batch_size=64 --json="$OUT/roof.json" ${TOY:+"${SHRINK[@]}" "${TOY_ROOF[@]}" --compile=false}; }
gpt2() { # 124M, T = 1024: 2 x 64 x 1024 tokens a step
    train gpt2 240 50257 "$OUT/gpt2.json" config/gpt2_124m.py ${NANO[@]+"${NANO[@]}"} --peer_compile --batch_size=64 --batch_tokens=131072 --steps=50 --warmup=10 --rounds=1
}
large() { # 1.15G, T = 1024 and 2048: 32 x 1024 tokens a micro-step
    train large_1024 150 32000 "$WORK/1b_1024.json" config/train_1b.py --block_size=1024 --batch_size=32 --batch_tokens=65536 --steps=14 --warmup=4 --rounds=1
    train large_2048 150 32000 "$WORK/1b_2048.json" config/train_1b.py --block_size=2048 --batch_size=16 --batch_tokens=65536 --steps=14 --warmup=4 --rounds=1
}
small() { # MiniMind's size, T = 512
    train small 90 6400 "$WORK/26m.json" config/minimind_26m.py --batch_size=128 --batch_tokens=131072 --steps=120 --warmup=20 --rounds=1
}
hf() { # the 100M model at 8 x 1024 tokens a step, against transformers' Trainer
    train hf 150 16384 "$OUT/hf.json" config/train_100m.py --hf --batch_size=8 --batch_tokens=8192 --steps=120 --warmup=20 --rounds=1
}
sampling() {
    dataset 50257
    part sampling 120 $PYTHON bench/compare.py config/gpt2_124m.py ${NANO[@]+"${NANO[@]}"} --sampling --num_samples=32 --max_new_tokens=512 --rounds=1 \
        --data_dir="$WORK" --dataset=v50257 --json="$OUT/sampling.json" ${TOY:+"${SHRINK[@]}" "${TOY_SAMPLING[@]}"}
}
sweep() { # without compile: 17 shapes would take a minute each
    part sweep 120 $PYTHON bench/sweep.py config/train_100m.py --vocab_size=16384 --compile=false --seconds=2 --json="$OUT/sweep.json" \
        --markdown="$OUT/sweep.md" ${TOY:+"${SHRINK[@]}" "${TOY_SWEEP[@]}"}
}

date -u +%F
git log -1 --format='commit %h' 2>/dev/null
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null
$PYTHON -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())'
for name in "${@:-roof gpt2 large small hf sampling tests sweep}"; do
    for each in $name; do
        case $each in
        tests | roof | gpt2 | large | small | hf | sampling | sweep) $each ;;
        *) echo "no part $each: roof gpt2 large small hf sampling tests sweep" && exit 2 ;;
        esac
    done
done
$PYTHON - "$OUT/models.json" "$WORK"/1b_*.json "$WORK"/26m.json <<'PY'
import json, pathlib, sys
found = {p.stem: json.loads(p.read_text()) for p in map(pathlib.Path, sys.argv[2:]) if p.exists()}
if found:
    target = pathlib.Path(sys.argv[1])
    before = json.loads(target.read_text()) if target.exists() else {}
    target.write_text(json.dumps(before | found, indent=1) + "\n")
PY
echo && echo "---- $SECONDS s${FAILED[*]:+; failed: ${FAILED[*]}}${LATER[*]:+; no time was left for: ${NANOGPT:+NANOGPT=$NANOGPT }OUT=$OUT bash bench/gpu_suite.sh ${LATER[*]}}"
[ $((${#FAILED[@]} + ${#LATER[@]})) -eq 0 ]
