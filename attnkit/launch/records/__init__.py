"""Records of published and own results in conf/experiment, and running them again."""
