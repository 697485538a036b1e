# make demo: corpus -> model -> text in a few minutes.   make chat: then it answers questions.
# make check: before you commit.   make test: all tests.
# Each makes .venv on first use.
PYTHON ?= python3

.PHONY: demo chat check lint format quick test soak simgpu clean

# Nobody has written these yet: the model documents them all the same.
PROMPTS = "Robot.is_happy: Return True if" "Robot.wait_for_rain: Wait" "Robot.sing: Return" \
	"RobotError: Raised when"

demo: .venv/demo
	.venv/bin/python prepare.py
	.venv/bin/python train.py config/demo.py --overwrite
	@echo
	.venv/bin/python sample.py --prompt $(PROMPTS)
	@echo
	@echo "The curves of the loss are in out/demo/loss.png. For prompts of your own:"
	@echo "    .venv/bin/python sample.py --interactive"

# In wordings that were held out of the training.
QUESTIONS = "Explain os.path.join." "What does os.path.exists do?" "Tell me about shutil.copytree."

# The model of the demo, which is made first if it is not there, learns to answer.
out/demo:
	$(MAKE) demo

chat: .venv/demo | out/demo
	.venv/bin/python prepare.py --chat --tokenizer data/demo --val_fraction 0.05
	.venv/bin/python train.py config/chat.py --overwrite
	@echo
	.venv/bin/python sample.py --chat --ckpt out/chat --temperature 0 --prompt $(QUESTIONS)

check: lint quick

lint: .venv/lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/lint
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

# Two workers, whatever the machine: some tests measure memory, or start several processes.
PYTEST = .venv/bin/python -m pytest -q -n 2 --dist worksteal

quick: .venv/dev
	$(PYTEST) -m "not slow" tests

test: .venv/dev
	$(PYTEST) -rs tests

# Kills, signals and damages 100 small trainings, and compares each with one that was left alone.
# It takes 40 minutes on two cores.
soak: .venv/dev
	.venv/bin/python tests/faults/harness.py --rounds 100

# ruff alone, so that lint needs no torch
.venv/lint: requirements-dev.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q $$(grep '^ruff==' requirements-dev.txt)
	touch $@

.venv/demo: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

.venv/dev: .venv/demo requirements-dev.txt
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@

# What runs on GPUs, on simulated ones that compute nothing: SIMGPU=FOLDER make simgpu
simgpu: .venv/dev
	.venv/bin/python -m pytest -v tests/simgpu

# Your data/ and out/ stay.
clean:
	rm -rf .venv .pytest_cache .ruff_cache
