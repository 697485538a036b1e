"""From files to tokens: corpora are read and cleaned, encoded, merged into a data set, and read in windows."""
