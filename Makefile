# make help lists the targets. Each makes .venv on first use.
PYTHON ?= python3

.PHONY: help demo docs chat evening check lint types format quick test test-default soak simgpu clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/    make \1 | \2/p' Makefile | sed 's/ | /\t/' | expand -t 20

demo: .venv/demo  ## Shakespeare, from text to a model that writes scenes
	.venv/bin/python prepare.py --input data/shakespeare.txt.gz --tokenizer char --val_fraction 0.1
	.venv/bin/python train.py config/demo.py --overwrite
	@echo
	.venv/bin/python sample.py --prompt "$$(printf 'ROMEO:\nWhat is love?')" "JULIET:" --max_new_tokens 200 \
		--temperature 0.6 --seed 6
	@echo
	@echo "The curves of the loss are in out/demo/loss.png. For prompts of your own:"
	@echo "    .venv/bin/python sample.py --interactive"

# These names do not exist: the model invents their documentation.
PROMPTS = "Robot.is_happy: Return True if" "Robot.wait_for_rain: Wait" "Robot.sing: Return" \
	"RobotError: Raised when"

# CONFIG=config/docs_large.py trains a model three times as large, with six times the compute.
CONFIG ?= config/docs.py

docs: .venv/demo  ## the documentation of Python, numpy and torch, with a BPE of 4,096 tokens
	.venv/bin/python prepare.py
	.venv/bin/python train.py $(CONFIG) --overwrite
	@echo
	.venv/bin/python sample.py --prompt $(PROMPTS)

# These wordings were held out of training.
QUESTIONS = "Explain os.path.join." "What does os.path.exists do?" "Tell me about shutil.copytree."

out/docs:
	$(MAKE) docs

chat: .venv/demo | out/docs  ## after make docs: its model learns to answer questions
	.venv/bin/python prepare.py --chat --tokenizer data/docs --val_fraction 0.05
	.venv/bin/python train.py config/chat.py --overwrite
	@echo
	.venv/bin/python sample.py --chat --ckpt out/chat --temperature 0 --prompt $(QUESTIONS)

evening: .venv/dev  ## run all commands of docs/evening.md and compare what they print (ten minutes)
	EVENING=1 OMP_NUM_THREADS=2 .venv/bin/python -m pytest -v -s tests/test_evening.py

check: .venv/dev lint quick  ## lint and the quick tests, before you commit (two minutes)

lint: .venv/lint  ## ruff, and the types if .venv has torch
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@test ! -e .venv/dev || $(MAKE) --no-print-directory types

types: .venv/dev  ## pyrefly alone
	.venv/bin/pyrefly check --python-interpreter-path .venv/bin/python

format: .venv/lint  ## let ruff format the code
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

# Two workers on any machine: some tests measure memory, or start several processes.
PYTEST = .venv/bin/python -m pytest -q -n 2 --dist worksteal

quick: .venv/dev  ## the quick tests
	$(PYTEST) -m "not slow" tests

test: .venv/dev  ## all tests (5 minutes)
	$(PYTEST) -rs tests

# Other CPUs round differently. torch's cache of compiled code does not tell them apart. Without the
# second variable, torch uses the AMX of a CPU that has it, and fails.
DEFAULT = train optimizer model documents huggingface chat chat_folder chat_terminal sample judge
OLD_CPU = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.venv/inductor_default

# The tests that train or compare numbers, as on a CPU without AVX2 (2 minutes).
test-default: .venv/dev
	$(OLD_CPU) $(PYTEST) $(DEFAULT:%=tests/test_%.py) tests/faults/test_faults.py \
		tests/faults/test_lost_runs.py

# Kills, signals and damages 100 small runs, and compares each with an undisturbed one.
soak: .venv/dev  ## 100 runs, killed and damaged at random (40 minutes)
	.venv/bin/python tests/faults/harness.py --rounds 100

simgpu: .venv/dev  ## the GPU code on simulated GPUs: SIMGPU=FOLDER make simgpu
	.venv/bin/python -m pytest -v tests/simgpu

clean:  ## remove .venv and caches; your data/ and out/ stay
	rm -rf .venv .pytest_cache .ruff_cache

# ruff alone, so that lint needs no torch
.venv/lint: requirements-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q $$(grep '^ruff==' requirements-dev.txt)
	touch $@

# Without an NVIDIA GPU, the smaller torch for CPUs is enough. If PyTorch's index does not
# answer, the next line installs the other build.
CPU_TORCH = --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 5

.venv/demo: requirements.txt
	$(PYTHON) -m venv .venv
	test "$$(uname)" != Linux || command -v nvidia-smi > /dev/null || \
		.venv/bin/python -m pip install -q $(CPU_TORCH) $$(grep '^torch==' requirements.txt) \
		2> /dev/null || echo "PyTorch's index of CPU builds does not answer"
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

.venv/dev: .venv/demo requirements-dev.txt
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@
