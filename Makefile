# make demo: corpus -> model -> text in a few minutes.    make test: all tests.    Both make .venv on first use.
PYTHON ?= python3

.PHONY: demo test lint clean soak

demo: .venv/demo
	.venv/bin/python prepare.py
	.venv/bin/python train.py config/demo.py --overwrite
	.venv/bin/python sample.py --num_samples 3

test: .venv/dev
	.venv/bin/python -m pytest -q -rs tests

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/demo: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

.venv/dev: .venv/demo requirements-dev.txt
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv data out

# 1,000 single bits turned over; then 100 small trainings and preparations, killed, signalled and damaged, each compared with one
# that was left alone. 40 minutes on two cores.
soak: .venv/dev
	.venv/bin/python tests/faults/harness.py --rounds 100 --flips 1000
