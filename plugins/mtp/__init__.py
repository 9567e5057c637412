"""Multi-token prediction: the layer for a second next token that some targets bring along in their own checkpoint."""
