"""First-party proposers. Each is a plugin like any other: found through an entry point, built on specdec.sdk only."""

if __name__ != "specdec.plugins":
    raise ImportError(f"import specdec.plugins, not {__name__}: the same file under two names makes two of every class")
