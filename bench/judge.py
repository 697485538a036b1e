"""Count how many questions a model answers rightly, or its bits per byte on texts, without network.

    python -m bench.judge questions.jsonl --ckpt out/RUN
    # every text alone, from its own beginning
    python -m bench.judge texts.jsonl --ckpt out/RUN/ckpt/step_00001000

A line of the file is {"question": text, "choices": [texts], "answer": number of the right one, from
0}, or {"text": text}. The figures are those of EleutherAI's lm-evaluation-harness (0.4.13), which
opens the model folder too: of a task of the kind multiple_choice, or loglikelihood_rolling. There
the model sees as many tokens before each as fit into its block_size. All is computed in fp32.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configurator import UserError, option, parse, run
from hardware.disk import only_plain
from hardware.kernels import pick_kernels
from hardware.machine import pick_device
from hardware.terminal import ProgressBar, plural
from sample import SampleConfig, open_model


@dataclass(frozen=True)
class JudgeConfig:
    files: tuple[str, ...] = option((), "one or more files of questions or texts")
    ckpt: str = option("", "a model folder, or a run's folder out/RUN; default: the newest run")
    delimiter: str = option(" ", "what stands between a question and a choice; in Chinese: ''")
    device: str = option("auto", "auto: cuda, then mps, then cpu")


class Judge:
    """A model, its tokenizer, and the token that stands before a text without context."""

    def __init__(self, cfg: JudgeConfig):
        self.device = pick_device(cfg.device)
        self.delimiter = cfg.delimiter
        self.folder, _, model, self.tokenizer = open_model(SampleConfig(ckpt=cfg.ckpt))
        self.model = model.to(self.device).use(pick_kernels(self.device)).eval()
        self.prefix = list(self.tokenizer.prefix)
        self.beginning = [*self.prefix, self.tokenizer.eos_id][:1]

    @torch.no_grad()
    def log_likelihood(self, context: list[int], ids: list[int]) -> float:
        """Return ln p(ids | context). Of the context, only the end counts if it is too long."""
        T = self.model.config.block_size
        if not 0 < len(ids) <= T:
            raise ValueError(f"{len(ids)} tokens in a choice; the model sees {T}")
        row = torch.tensor([(context + ids)[-T - 1 :]], device=self.device)  # (1, T + 1)
        x, y = row[:, :-1], row[:, 1:].clone()
        y[:, : -len(ids)] = -1
        return -self.model(x, y, reduction="sum").item()

    def question(self, record: dict[str, Any]) -> dict[str, float]:
        """Return whether the likeliest choice is right: per character, and in all."""
        question, choices, answer = record["question"], record["choices"], record["answer"]
        if type(choices) is not list or len(choices) < 2 or not all(choices):
            raise ValueError("choices must be two texts or more")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise ValueError(f"answer={answer!r} is not the number of a choice")
        # A space belongs to the word behind it, as in the tokens of a text.
        context = self.tokenizer.encode(question.rstrip()).tolist()
        totals = []
        for choice in choices:
            ids = self.tokenizer.encode(question + self.delimiter + choice).tolist()
            ids = ids[len(context) :]
            totals.append(self.log_likelihood(self.prefix + context or self.beginning, ids))
        means = [total / len(choice) for total, choice in zip(totals, choices, strict=True)]
        scores = {"acc_norm": means, "acc": totals}
        return {name: float(s.index(max(s)) == answer) for name, s in scores.items()}

    def text(self, record: dict[str, Any]) -> dict[str, float]:
        """Return -ln p of a text, in windows of T tokens, and its bytes."""
        ids = self.prefix + self.tokenizer.encode(record["text"]).tolist()
        T = self.model.config.block_size
        nats = 0.0
        for at in range(0, len(ids), T):
            context = ids[max(0, at - T) : at] or self.beginning
            nats -= self.log_likelihood(context, ids[at : at + T])
        return {"nats": nats, "bytes": len(record["text"].encode())}


def judge_file(path: Path, judge: Judge) -> str:
    """Return the figures of a file. Raises UserError for a line that cannot be judged."""
    only_plain(path)
    results = []
    for number, line in enumerate(ProgressBar("judging", path.read_bytes().splitlines()), 1):
        try:
            record = json.loads(line)
            results.append((judge.text if "text" in record else judge.question)(record))
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            problem = f"neither a question with choices nor a text ({type(e).__name__}: {e})"
            raise UserError(f"{path}, line {number}: {problem}") from None
    if len({*map(tuple, results)}) != 1:
        raise UserError(f"{path}: it must hold questions, or texts")
    columns = {key: [result[key] for result in results] for key in results[0]}
    n = len(results)
    if "nats" in columns:
        bits = sum(columns["nats"]) / math.log(2) / max(1, sum(columns["bytes"]))
        return f"bits_per_byte {bits:.4f} | {plural(n, 'text')}"
    figures = []
    for key, right in columns.items():
        error = statistics.stdev(right) / math.sqrt(n) if n > 1 else 0.0
        figures.append(f"{key} {statistics.fmean(right):.4f} ± {error:.4f}")
    return " | ".join([*figures, plural(n, "question")])


def main() -> None:
    cfg = parse(JudgeConfig, doc=__doc__, positional="files")
    if not cfg.files:
        raise UserError("files: name a file of questions or texts")
    judge = Judge(cfg)
    for name in cfg.files:
        print(f"{name}: {judge_file(Path(name), judge)} | {judge.folder}")


if __name__ == "__main__":
    run(main)
