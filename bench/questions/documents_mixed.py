# The same question for two mixtures. --dataset names the weights, which the hash of a run contains.
#   python -m bench.lab bench/questions/documents_mixed.py
from bench.questions.documents import *  # noqa: F403

question = "Does the worth of masks and packing depend on the mixture?"
_mixtures = {"more code": "wiki:0.3,code:0.7", "more wiki": "wiki:0.7,code:0.3"}
baseline = "more code, stream"
variants = {
    f"{name}, {documents}": {"dataset": _mixtures[name], "documents": documents}
    for name in _mixtures
    for documents in ("stream", "mask", "pack")
}
