"""The host: an engine, what it steps, and the registry that finds its plugins. Public names are in `specdec`."""

if __name__ != "specdec.core":
    raise ImportError(f"import specdec.core, not {__name__}: the same file under two names makes two of every class")
