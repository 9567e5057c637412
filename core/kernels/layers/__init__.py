"""What a network's layers are made of, recognised by what it computes, and its forms of fewer operations."""
