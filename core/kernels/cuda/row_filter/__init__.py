"""Min-p, top-k and top-p as one cutoff per row and new tile masses; nothing of vocabulary size is written."""
