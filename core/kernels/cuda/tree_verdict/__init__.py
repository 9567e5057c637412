"""Verifying the trees of each request in one launch; its plain torch form is `rejection.tree.verify_trees`."""
