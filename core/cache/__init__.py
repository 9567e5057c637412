"""The KV cache: blocks, block tables, slots, and how a batch addresses them."""
