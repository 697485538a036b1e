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
from hardware.kernels import pick_kernels
from hardware.machine import pick_device
from hardware.terminal import ProgressBar, plural
from model import GPT
from sample import SampleConfig, open_model


@dataclass(frozen=True)
class JudgeConfig:
    files: tuple[str, ...] = option((), "one or more files of questions or texts")
    ckpt: str = option("", "a model folder, or a run's folder out/RUN; default: the newest run")
    delimiter: str = option(" ", "what stands between a question and a choice; in Chinese: ''")
    device: str = option("auto", "auto: cuda, then mps, then cpu")


@torch.no_grad()
def log_likelihood(model: GPT, context: list[int], ids: list[int]) -> float:
    """Return ln p(ids | context). Of the context, only the end counts if it is too long."""
    T = model.config.block_size
    if not 0 < len(ids) <= T:
        raise ValueError(f"{len(ids)} tokens in a choice; the model sees {T}")
    row = torch.tensor([(context + ids)[-T - 1 :]], device=model.wte.weight.device)  # (1, T + 1)
    x, y = row[:, :-1], row[:, 1:].clone()
    y[:, : -len(ids)] = -1
    return -model(x, y, reduction="sum").item()


Figures = dict[str, float]  # of one line of a file


def judge_question(record: dict[str, Any], model: GPT, tokenizer: Any, delimiter: str) -> Figures:
    """Return whether the likeliest choice is right: per character, and in all."""
    question, choices, answer = record["question"], record["choices"], record["answer"]
    if not 0 <= answer < len(choices):
        raise ValueError(f"answer={answer!r} is not the number of a choice")
    # A space belongs to the word after it, as in the tokens of a text.
    context = tokenizer.encode(question.rstrip())
    totals = []
    for choice in choices:
        ids = tokenizer.encode(question + delimiter + choice)[len(context) :]
        before = [*tokenizer.prefix, *context] or [tokenizer.eos_id]
        totals.append(log_likelihood(model, before, ids))
    means = [total / len(choice) for total, choice in zip(totals, choices, strict=True)]
    scores = {"acc_norm": means, "acc": totals}
    return {name: float(s.index(max(s)) == answer) for name, s in scores.items()}


def judge_text(text: str, model: GPT, tokenizer: Any) -> Figures:
    """Return -ln p of a text, in windows of T tokens, and its bytes."""
    ids = [*tokenizer.prefix, *tokenizer.encode(text)]
    T = model.config.block_size
    nats = 0.0
    for at in range(0, len(ids), T):
        context = ids[max(0, at - T) : at] or [*tokenizer.prefix, tokenizer.eos_id][:1]
        nats -= log_likelihood(model, context, ids[at : at + T])
    return {"nats": nats, "bytes": len(text.encode())}


def judge_file(path: Path, model: GPT, tokenizer: Any, delimiter: str) -> str:
    """Return the figures of a file. Raises UserError for a line that cannot be judged."""
    results = []
    for number, line in enumerate(ProgressBar("judging", path.read_bytes().splitlines()), 1):
        try:
            record = json.loads(line)
            if "text" in record:
                results.append(judge_text(record["text"], model, tokenizer))
            else:
                results.append(judge_question(record, model, tokenizer, delimiter))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as e:
            problem = f"neither a question with choices nor a text ({type(e).__name__}: {e})"
            raise UserError(f"{path}, line {number}: {problem}") from None
    if len({*map(tuple, results)}) != 1:
        raise UserError(f"{path}: it must hold questions, or texts")
    n = len(results)
    columns = {key: [result[key] for result in results] for key in results[0]}
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
    folder, _, model, tokenizer = open_model(SampleConfig(ckpt=cfg.ckpt))
    device = pick_device(cfg.device)
    model = model.to(device).use(pick_kernels(device)).eval()
    for name in cfg.files:
        print(f"{name}: {judge_file(Path(name), model, tokenizer, cfg.delimiter)} | {folder}")


if __name__ == "__main__":
    run(main)
