"""How the models in `assets/tiny` were made; run as modules: `python -m scripts.train_tiny_target`."""
