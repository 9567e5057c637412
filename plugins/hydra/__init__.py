"""Hydra: heads in a row, each of which reads the tokens drafted before it beside one state of the prompt."""
