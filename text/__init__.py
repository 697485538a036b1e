"""From corpora to windows of tokens: documents are read, encoded, and arranged in windows."""
