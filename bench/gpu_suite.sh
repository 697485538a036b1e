#!/usr/bin/env bash
# Measure every figure that needs a GPU, the most important ones first, in less than nine minutes.
# Nothing is installed and nothing is downloaded. At the end the script names the parts for which no
# time was left, with the command that runs them in another call.
#
#   # all parts
#   OUT=results bash bench/gpu_suite.sh
#   # some of: levers product hf gpt2 small sampling large roof optimizers documents tests sweep
#   OUT=results bash bench/gpu_suite.sh roof small
#   # levers: product hf gpt2 small sampling large, without and with the patches in a folder
#   PATCHES=../gpu_patches OUT=results bash bench/gpu_suite.sh levers
#   # also measure nanoGPT, in a checkout that is already on this machine
#   NANOGPT=../nanoGPT OUT=results bash bench/gpu_suite.sh
#   # check that every command runs, with a toy model on the CPU
#   TOY=1 OUT=results bash bench/gpu_suite.sh
#
# The script writes these files to OUT: suite.log (all that was printed), power.csv, and a .json for
# each part (models.json: small and large). Its exit code is 1 if a part failed or if no time was
# left for one. ROUNDS=3: three turns of each contestant.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:?where to? OUT=results bash bench/gpu_suite.sh}
PATCHES=${PATCHES:+$(cd "$PATCHES" && pwd)}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd)
WORK=$(mktemp -d) && trap 'rm -rf "$WORK"' EXIT
# Parts put their temporary files into WORK, so that those of a killed part are deleted at the end.
# There the parts also share what torch has compiled.
export TMPDIR=$WORK
exec > >(tee -a "$OUT/suite.log") 2>&1 # -a: a second call appends to the log of the first
PYTHON=${PYTHON:-python3}
DEADLINE=$((SECONDS + ${TOY:+3}520))
FAILED=() LATER=()

NANO=(${NANOGPT:+--nanogpt="$NANOGPT"})
ROUNDS=${ROUNDS:-1} LEVERS=${LEVERS:-}
TOY=${TOY:-}
if [ -n "$TOY" ]; then # these stand last on a command line, where they override earlier options
    SHRINK=(--device=cpu --n_layer=2 --n_head=2 --n_kv_head=0 --n_embd=32)
    SHRINK+=(--block_size=32 --batch_size=2 --batch_tokens=128)
    BRIEF=(--steps=4 --warmup=1 --rounds=1 --compile=false --peer_compile=false)
    TOY_SAMPLING=(--num_samples=2 --max_new_tokens=8)
    TOY_SWEEP=(--block_sizes 1 16 --batch_sizes 1 2 --accums 1 2 --seconds=0.1)
    TOY_ROOF=(--seconds=0.001 --compile=false)
fi

# part NAME SECONDS COMMAND...: run COMMAND if time is left, for at most SECONDS. A command that
# takes longer is ended by KILL, together with its children. After TERM it would still save.
# While compile_first() is at work, only start COMMAND with few steps, and write no figures.
part() {
    local name=$1 limit=$2 left=$((DEADLINE - SECONDS)) whole=${1%_*} code
    shift 2
    if [ -n "${COMPILING-}" ]; then
        local few=(--rounds=1 --json=)
        [[ $* != *bench.compare* ]] || few+=(--steps=3 --warmup=1)
        timeout -s KILL 200 "$@" "${few[@]}" &>>"$WORK/compile.log" &
        PIDS+=($!)
        return
    fi
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
    # The part was not begun, or was cut short by the deadline.
    [[ " ${LATER[*]-} " == *" $whole "* ]] || LATER+=("$whole")
}

# dataset V: make a data set for a model with a vocabulary of V. Speed depends on the shapes alone.
# So the corpus of documentation, whose token ids are below 4,096, serves for every V.
dataset() {
    [ -e "$WORK/docs/meta.json" ] ||
        $PYTHON prepare.py --data_dir="$WORK" ${TOY:+--vocab_size=600} >"$WORK/prepare.log" ||
        cat "$WORK/prepare.log"
    $PYTHON - "$WORK" "$1" <<'PY'
import pathlib, shutil, sys
from hardware.disk import json_bytes, read_object, sealed
folder, V = pathlib.Path(sys.argv[1]), int(sys.argv[2])
to = folder / f"v{V}"
if not to.exists():
    shutil.copytree(folder / "docs", to)
    meta = read_object(to / "meta.json") | {"vocab_size": V}
    (to / "meta.json").write_bytes(json_bytes(sealed(meta)))
PY
}

# patched NAME...: if LEVERS and PATCHES are set, let COPIES name copies of this repository, in each of which a
# patch is applied, or two: NAME+NAME. The repository itself stays as it is.
patched() {
    local name patch copy file
    COPIES=()
    [ -n "$PATCHES" ] || return 0
    for name in ${LEVERS:+"$@"}; do
        copy=$WORK/$name
        if [ ! -e "$copy" ]; then
            mkdir "$copy"
            cp -R ./*.py pyproject.toml bench config hardware tests text training "$copy"
            for patch in ${name//+/ }; do
                file=$PATCHES/$patch.patch
                (cd "$copy" && { GIT_CEILING_DIRECTORIES=$WORK git apply "$file" ||
                    patch -sp1 <"$file"; }) && continue
                FAILED+=("$name does not apply") && rm -r "$copy"/*
            done
        fi
        [ ! -e "$copy/train.py" ] || COPIES+=("$copy")
    done
}

# train PART SECONDS V JSON OPTIONS...: measure tokens/s, TFLOPS and MFU of training with a clock
# outside of the process; also for the peers that OPTIONS name, and for the COPIES.
train() {
    local name=$1 limit=$2 V=$3 json=$4 copy others=()
    shift 4
    dataset "$V"
    local data=(--data_dir="$WORK" --dataset="v$V" ${TOY:+"${SHRINK[@]}" "${BRIEF[@]}"})
    if [ -n "${COMPILING-}" ]; then # each copy by itself, at the same time
        for copy in ${COPIES[@]+"${COPIES[@]}"}; do
            part "$name" "$limit" env -C "$copy" $PYTHON -m bench.compare "${@/#--hf/--hf=false}" \
                "${data[@]}" --nanogpt=
        done
    else
        others=(${COPIES[@]+--others "${COPIES[@]}"})
    fi
    part "$name" "$limit" $PYTHON -m bench.compare "$@" --rounds="$ROUNDS" --json="$json" \
        "${data[@]}" ${others[@]+"${others[@]}"}
}

patches() { # their own tests, while the models compile
    local name
    patched graph loss gqa decode flash
    for name in graph loss gqa decode flash; do
        part "tests_$name" 120 env -C "$WORK/$name" $PYTHON -m pytest -q --tb=short \
            "tests/test_$name.py"
    done
}
product() { # what the power limit leaves of the peak: 0.1 seconds, and 10
    local seconds query=timestamp,clocks.sm,power.draw,temperature.gpu n=8192
    [ -z "$TOY" ] || n=64
    nvidia-smi --query-gpu=$query --format=csv,noheader -lms 500 >"$OUT/power.csv" 2>&1 &
    local reader=$!
    for seconds in 0.1 10; do
        part product 60 $PYTHON -m bench.roof --dtype=bfloat16 --squares $n --seconds=$seconds \
            --json="$OUT/product_$seconds.json" ${TOY:+--device=cpu "${TOY_ROOF[@]}"}
    done
    kill $reader 2>/dev/null
    awk 'NR % 4 == 0' "$OUT/power.csv" # a reading every two seconds
}
numbers() { # -v prints the names of the tests one by one, so that they are there after a kill
    local workers=()
    $PYTHON -c "import xdist" 2>/dev/null && workers=(-n 8)
    part tests_numbers 240 $PYTHON -m pytest -v --tb=short -rs ${workers[@]+"${workers[@]}"} \
        -m gpu -k "not predicted" tests
}
tests() {
    [ -n "${NUMBERS-}" ] || numbers
    part tests_memory 240 $PYTHON -m pytest -v --tb=short -rs -m gpu -k predicted tests
}
roof() {
    part roof 90 $PYTHON -m bench.roof config/gpt2_124m.py --batch_size=32 --seconds=0.1 \
        --json="$OUT/roof.json" ${TOY:+"${SHRINK[@]}" "${TOY_ROOF[@]}"}
}
gpt2() { # 124M, T = 1024: 4 x 32 x 1024 tokens a step
    patched loss
    train gpt2 240 50257 "$OUT/gpt2.json" config/gpt2_124m.py ${NANO[@]+"${NANO[@]}"} \
        --peer_compile=true --batch_size=32 --batch_tokens=131072 --steps=50 --warmup=10
}
large() { # 1.15G, T = 2048 and 1024: 16 x 1024 tokens a micro-step, which fit 80 GB; 140 GB fit 32
    local brief=(--batch_tokens=131072 --steps=9 --warmup=3) gb
    gb=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
    patched gqa
    train large_2048 400 32000 "$WORK/1b_2048.json" config/train_1b.py --block_size=2048 \
        --batch_size=8 "${brief[@]}"
    COPIES=()
    [ "${gb:-0}" -lt 120000 ] || train large_16 240 32000 "$WORK/1b_16.json" config/train_1b.py \
        --block_size=2048 --batch_size=16 "${brief[@]}"
    [ -n "$LEVERS" ] || train large_1024 240 32000 "$WORK/1b_1024.json" config/train_1b.py \
        --block_size=1024 --batch_size=16 "${brief[@]}"
}
small() { # MiniMind's size, T = 512
    patched gqa
    train small 90 6400 "$WORK/26m.json" config/minimind_26m.py --batch_size=128 \
        --batch_tokens=131072 --steps=120 --warmup=20
}
hf() { # the 100M model with 8 x 1024 tokens a step, beside transformers' Trainer
    local peer=(--hf)
    $PYTHON -c "import accelerate, transformers" || peer=()
    patched graph
    train hf 150 16384 "$OUT/hf.json" config/train_100m.py ${peer[@]+"${peer[@]}"} --batch_size=8 \
        --batch_tokens=8192 --steps=120 --warmup=20
}
sampling() { # 32 texts at the same time, and one
    local texts
    dataset 50257
    patched decode flash decode+flash
    for texts in 32 1; do
        part "sampling_$texts" 150 $PYTHON -m bench.compare config/gpt2_124m.py --sampling \
            ${NANO[@]+"${NANO[@]}"} --num_samples=$texts --max_new_tokens=512 --rounds="$ROUNDS" \
            --data_dir="$WORK" --dataset=v50257 --json="$OUT/sampling_$texts.json" \
            ${TOY:+"${SHRINK[@]}" "${TOY_SAMPLING[@]}"} ${COPIES[@]+--others "${COPIES[@]}"}
    done
}
optimizers() { # what Muon and Adafactor cost, beside AdamW
    part optimizers 120 $PYTHON -m bench.sweep config/minimind_26m.py --vary=optimizer \
        --vocab_size=6400 --batch_size=128 --batch_tokens=131072 --rounds=4 \
        --json="$OUT/optimizers.json" \
        ${TOY:+"${SHRINK[@]}" --rounds=1 --compile=false}
}
documents() { # what it costs to keep documents apart, compiled with FlexAttention
    local T
    dataset 50257
    for T in 256 512 1024; do
        part "documents_$T" 150 $PYTHON -m bench.sweep config/gpt2_124m.py --vary=documents \
            --data_dir="$WORK" --dataset=v50257 --block_size="$T" --batch_size=$((16384 / T)) \
            --batch_tokens=131072 --rounds=4 --json="$OUT/documents_$T.json" \
            ${TOY:+"${SHRINK[@]}" --rounds=1 --compile=false}
    done
}
sweep() { # not compiled: each of the 17 shapes would take a minute to compile
    part sweep 120 $PYTHON -m bench.sweep config/train_100m.py --vocab_size=16384 \
        --compile=false --seconds=2 --json="$OUT/sweep.json" \
        ${TOY:+"${SHRINK[@]}" "${TOY_SWEEP[@]}"}
}

# compile_first PART...: let the parts that compile do so at the same time, untimed, each on a core of
# its own, and run the tests of numbers meanwhile. torch keeps in WORK what it has compiled. It
# chooses among kernels once more afterwards, when nothing disturbs it. The 1.15G model does not fit
# beside the others: it compiles when it is measured.
compile_first() {
    local name COMPILING=yes PIDS=()
    for name in "$@"; do
        case $name in gpt2 | small | hf | optimizers | documents) $name ;; esac
    done
    COMPILING=
    [ -z "$LEVERS" ] || [ -z "$PATCHES" ] || patches
    [[ " $* " != *" tests "* ]] || { numbers; NUMBERS=done; }
    [ ${#PIDS[@]} -eq 0 ] || wait "${PIDS[@]}"
    find "$WORK" -name '*.best_config' -delete
}

date -u +%F
git log -1 --format='commit %h' 2>/dev/null
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader \
    2>/dev/null
$PYTHON - <<'PY'
import sys, torch
python = sys.version.split()[0]
cudnn = torch.backends.cudnn.version()
print("Python", python, "torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", cudnn)
PY
TABLE="product hf gpt2 small sampling large"
ALL="levers roof optimizers documents tests sweep"
PARTS=()
for name in ${*:-$ALL}; do
    [[ " $ALL $TABLE " == *" $name "* ]] || { echo "no part $name: $ALL $TABLE" && exit 2; }
    [ "$name" != levers ] || { LEVERS=yes && name=$TABLE; }
    PARTS+=($name)
done
[ -n "$TOY" ] || [ ${#PARTS[@]} -eq 1 ] || compile_first "${PARTS[@]}"
[ -z "$TOY" ] || [ -z "$LEVERS" ] || [ -z "$PATCHES" ] || patches
for name in "${PARTS[@]}"; do
    $name
done
$PYTHON - "$OUT/models.json" "$WORK"/1b_*.json "$WORK"/26m.json <<'PY'
import json, pathlib, sys
found = {p.stem: json.loads(p.read_text()) for p in map(pathlib.Path, sys.argv[2:]) if p.exists()}
if found:
    target = pathlib.Path(sys.argv[1])
    before = json.loads(target.read_text()) if target.exists() else {}
    target.write_text(json.dumps(before | found, indent=1) + "\n")
PY
again="${NANOGPT:+NANOGPT=$NANOGPT }${LEVERS:+LEVERS=yes }OUT=$OUT bash bench/gpu_suite.sh ${LATER[*]-}"
summary="$SECONDS s${FAILED[*]:+; failed: ${FAILED[*]}}"
echo && echo "---- $summary${LATER[*]:+; no time was left for ${LATER[*]}: $again}"
[ $((${#FAILED[@]} + ${#LATER[@]})) -eq 0 ]
