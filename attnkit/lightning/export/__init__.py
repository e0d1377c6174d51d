"""Trained modules as safe weights, torch.export and ONNX programs."""
