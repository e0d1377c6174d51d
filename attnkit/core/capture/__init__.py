"""Tools that observe the attention of any model while it runs, without changing it."""
