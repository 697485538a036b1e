"""Count how many questions about the demo corpus models answer rightly, in wordings held out.

    python -m bench.answers out/demo out/chat

`prepare.py --chat` leaves one wording of each question out of the data set. An answer is right if
its first five words are. The likeliest token is taken at each step.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from configurator import option, parse, run
from hardware.terminal import ProgressBar
from model import GPT
from sample import SampleConfig, check_chat, open_model
from text.chat import marks_of, question_ids
from text.demo import TAUGHT, demo_sources, questions
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswersConfig:
    ckpts: tuple[str, ...] = option(("out/demo", "out/chat"), "model folders, or folders of runs")
    count: int = option(200, "number of questions, spread evenly over the modules")
    show: int = option(3, "number of answers to show")


def answers(model: GPT, tokenizer: Tokenizer, asked: list[str]) -> dict[str, str]:
    """Return question -> answer. Prompts of the same length are continued in one batch."""
    by_length = defaultdict(list)
    for question in asked:
        ids = question_ids(question, tokenizer)
        by_length[len(ids)].append((question, ids))
    answered = {}
    for batch in ProgressBar("answering", by_length.values()):
        idx = torch.tensor([ids for _, ids in batch])  # (B, T)
        _, end = marks_of(tokenizer)
        tokens = torch.stack(list(model.generate(idx, 48, temperature=0, eos_id=end)), dim=1)
        for (question, _), row in zip(batch, tokens.tolist(), strict=True):
            answered[question] = tokenizer.decode([*row, end][: [*row, end].index(end)])
    return answered


def main() -> None:
    cfg = parse(AnswersConfig, doc=__doc__, positional="ckpts")
    texts = [(s.path.read_bytes(), s.name) for s in demo_sources() if s.name in TAUGHT]
    held_out = {q: a for text in texts for q, a, is_held_out in questions(*text) if is_held_out}
    asked = list(held_out)[:: max(1, len(held_out) // cfg.count)][: cfg.count]
    for ckpt in cfg.ckpts:
        folder, label, model, tokenizer = open_model(SampleConfig(ckpt=ckpt))
        check_chat(folder, tokenizer)
        answered = answers(model.eval(), tokenizer, asked)
        right = [answered[q].split()[:5] == held_out[q].split()[:5] for q in asked]
        print(f"{label}: {sum(right)} of {len(asked)} answers have the right first five words")
        for question in asked[:: max(1, len(asked) // cfg.show)][: cfg.show]:
            print(f"    {question}\n        {answered[question]!r}")


if __name__ == "__main__":
    run(main)
