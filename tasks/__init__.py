"""The tasks: each a LightningModule and a LightningDataModule that users subclass."""

# In a clone this folder could also be imported as `tasks`, which would give every class a second
# identity; it is `attnkit.tasks` and nothing else.
if __name__ != "attnkit.tasks":
    raise ImportError(f"import this package as attnkit.tasks, not as {__name__}")
