"""What a run is made of, beside the model: its plan, its step, evaluation, checkpoints, and what it reports."""
