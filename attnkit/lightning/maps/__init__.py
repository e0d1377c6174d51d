"""Maps of where a model looks: what its layers give, and how it is drawn."""
