"""The settings of prepare.py: `python prepare.py --help` prints them."""

import re
from dataclasses import dataclass
from typing import Literal

from configurator import option

FIELD = re.compile(r"\{([^{}]+)\}")  # in a template of --fields
MADE_HERE = ("train", "char", "byte")  # values of tokenizer that name no existing tokenizer
LEAST = 263  # vocab_size: 256 bytes, five special tokens, the space and a character
InputFormat = Literal["auto", "jsonl", "json", "csv", "tsv", "txt", "parquet"]


@dataclass(frozen=True)
class PrepareConfig:
    input: tuple[str, ...] = option(
        (),
        "files, folders or globs; default: the documentation of Python, numpy and torch",
        group="Input",
    )
    format: InputFormat = option("auto", "format of every input file; auto: by the file's name")
    fields: str = option(
        "", "question,answer or a template '{question} {answer}'; default: known shapes"
    )
    chat: bool = option(False, "turn an instruction or prompt and its answer into a conversation")
    allow_unread: bool = option(False, "accept that more text is left out of the records than read")
    txt: Literal["file", "block", "line"] = option(
        "file", "one document per file, block or line of .txt"
    )
    separators: str = option(
        "", "strings at which a text is split into documents: '<|im_start|>,<|im_end|>', or '\\n'"
    )
    encoding: str = option(
        "utf-8", "encoding of every input file; gb18030 also reads GBK and GB2312"
    )
    min_tokens: int = option(
        0, "leave out documents with fewer tokens (eos not counted); encyclopedias: 6", minimum=0
    )
    max_bad: float = option(
        0.01,
        "stop if a larger fraction of the records, or of their characters, is bad; 0: at the first",
        minimum=0,
        maximum=1,
        group="Bad records: the report counts them and shows examples",
    )
    max_record_mb: float = option(
        64.0,
        "longest record in millions of characters; a longer one is bad, in .json and .csv an error",
        minimum=0.001,
    )
    name: str = option(
        "",
        "write the data set to data_dir/NAME/; default: the first input's, or docs",
        group="Output",
    )
    data_dir: str = option("data", "folder of all data sets")
    val_fraction: float = option(
        0.01,
        "fraction for val.bin: of the documents by their hash, or of the tokens of few documents",
        above=0,
        below=1,
    )
    tokenizer: str = option(
        "train",
        "train, char, byte, a tiktoken name such as gpt2, a .model or .tiktoken file, or a folder",
        group="Tokenizer",
    )
    eos: str = option(
        "", "the token that ends a document, for a --tokenizer that does not name it: '</s>'"
    )
    vocab_size: int = option(4096, "number of tokens, for --tokenizer=train", minimum=LEAST)
    train_mb: int = option(
        10,
        "million characters sampled to train a tokenizer; try 50 for a large vocabulary",
        minimum=1,
    )
    workers: int = option(0, "worker processes; 0: one for each core", group="Work", minimum=0)
    inspect: str = option(
        "",
        "data set to verify and show; with --step, the folder of a run",
        group="Inspection: --inspect FOLDER changes nothing",
    )
    show: str = option(
        "first", "which documents to show: first, random, or the one that holds token N"
    )
    count: int = option(3, "number of documents to show", minimum=1)
    step: int = option(
        -1, "show the texts that this step of the run trained on, numbered as in the log"
    )

    @property
    def max_record(self) -> int:
        """The greatest length of a record, in characters (.jsonl: in bytes)."""
        return int(self.max_record_mb * 1e6)

    @property
    def line_encoding(self) -> str:
        """The encoding, if each byte 0x0A in it ends a line, as in GB18030; for UTF-16, UTF-8."""
        return self.encoding if "\n".encode(self.encoding) == b"\n" else "utf-8"

    @property
    def split_at(self) -> list[str]:
        """The separators. The longest comes first, since it may begin with another one."""
        names = self.separators.replace("\\n", "\n").split(",") if self.separators else []
        return sorted((name.strip(" ") for name in names), key=len, reverse=True)

    def chooses(self, name: str) -> bool:
        """Return whether `fields` names this field, or a field in it."""
        chosen = FIELD.findall(self.fields) if "{" in self.fields else self.fields.split(",")
        return any(f"{c.strip()}.".startswith(f"{name.strip()}.") for c in chosen)

    def problems(self) -> list[str]:
        is_show = re.fullmatch(r"first|random|\d+", self.show)
        stray = re.search("[{}]", FIELD.sub("", self.fields))
        is_list = "," in self.fields and "{" not in self.fields
        is_exchange = is_list or not (self.chat and self.fields)
        checks = {
            "input is empty: name a file": all(self.input),
            "separators must not be empty": all(self.split_at),
            f"fields={self.fields}: chat needs question,answer": is_exchange,
            "step needs the folder of a run: add --inspect": self.step == -1 or self.inspect,
            "step must be positive: steps count from 1": self.step == -1 or self.step > 0,
            "show must be first, random or the number of a token": is_show,
            f"fields={self.fields}: braces must enclose a name, as in {{answer}}": not stray,
            f"encoding {self.encoding!r} is unknown": is_encoding(self.encoding),
        }
        return [problem for problem, ok in checks.items() if not ok]


def is_encoding(name: str) -> bool:
    try:
        return "a\n".encode(name).decode(name, "surrogateescape") == "a\n"  # as files are read
    except (LookupError, UnicodeError):  # also for a codec of bytes, such as base64
        return False
