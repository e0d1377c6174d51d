"""What joins nodes that are far from each other, at a cost linear in the nodes."""
