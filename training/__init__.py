"""The parts of a training run: start, plan, batches, optimizer, evaluation, records, saves."""
