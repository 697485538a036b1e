# Whose words may a token see, and what should count the same: a token, or a document? Every run is
# judged in both ways, by `--judge=val_loss` (windows anywhere, all before a token is seen) and by
# `--judge=val_document_loss` (each document alone, from its own beginning).
#   python -m bench.lab bench/questions/documents.py --dataset=NAME
question = "Should attention stay within a document, and a document stay in one window?"
config = "config/docs_large.py"
n_layer = 3
n_embd = 96
n_head = 3
block_size = 512
batch_size = 4
batch_tokens = 4 * 512
max_steps = 400
eval_every = 200
baseline = "stream"
variants = {name: {"documents": name} for name in ("stream", "mask", "pack")}
variants |= {f"{k}, per document": v | {"loss_per": "document"} for k, v in variants.items()}
