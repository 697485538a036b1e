# The same question for two mixtures. --dataset names the shares, which the hash of a run contains.
#   python -m bench.lab bench/questions/documents_mixed.py
from bench.questions.documents import *  # noqa: F403

question = "Does the worth of masks and packing depend on the mixture?"
_more_code = "wiki:0.3,code:0.7"
_more_wiki = "wiki:0.7,code:0.3"
baseline = "more code, stream"
variants = {
    "more code, stream": {"dataset": _more_code},
    "more code, mask": {"dataset": _more_code, "documents": "mask"},
    "more code, pack": {"dataset": _more_code, "documents": "pack"},
    "more wiki, stream": {"dataset": _more_wiki},
    "more wiki, mask": {"dataset": _more_wiki, "documents": "mask"},
    "more wiki, pack": {"dataset": _more_wiki, "documents": "pack"},
}
