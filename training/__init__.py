"""The parts of a training run: plan, step, evaluation, checkpoints and reports."""
