"""From a command line to one plain, checked configuration. No torch; the only Hydra."""
