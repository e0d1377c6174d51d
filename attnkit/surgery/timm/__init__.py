"""Attention of timm whose projections are not the shared block's: its forward, with our `attend`."""
