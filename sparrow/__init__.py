"""``sparrow``: one command over all parts. It imports a part only when that is called."""
