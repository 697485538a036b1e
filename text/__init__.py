"""From corpora to batches: documents are read, cleaned, encoded, merged and read in windows."""
