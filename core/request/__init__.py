"""One request on its way: its tokens, its text, what a step did to it, what it counts."""
